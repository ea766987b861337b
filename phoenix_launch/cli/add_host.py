"""The add-host verb."""

from __future__ import annotations

import os
import time

import click

from phoenix_launch.cli.asking import ask
from phoenix_launch.cli.command import Command, job_argument
from phoenix_launch.errors import EXIT_OK, PhoenixError
from phoenix_launch.records.folders import choose, jobs_root
from phoenix_launch.timeouts import timeout

_PAUSE = 0.2  # seconds between two questions


def add_host(host: str, job: str) -> int:
    """Give a running job one more host, as a spare node.

    HOST is a destination for ssh, as in --nodes; in a job of simulated nodes the next one's name (node3), or that of a node
    that has left. It is checked like all others first. Without JOB: the one that runs.
    """
    folder = choose(jobs_root(os.environ), job)
    if not folder.is_running():
        raise PhoenixError(f"job {folder.job} does not run", hint="`phoenix-run jobs` lists all jobs")
    from phoenix_launch.command_messages import AddHostRequest, HostReply, HostStage

    patience = timeout("preflight") + timeout("fork_server")
    deadline, said = time.monotonic() + patience, ""
    while time.monotonic() < deadline:
        reply = ask(folder, "control", AddHostRequest(host))
        assert isinstance(reply, HostReply)
        if reply.stage is HostStage.REFUSED:
            raise PhoenixError(reply.text, hint="mend that and add it again; the job goes on without it")
        if reply.text != said:
            said = reply.text
            print(said, flush=True)
        if reply.stage is HostStage.READY:
            return EXIT_OK
        time.sleep(_PAUSE)
    raise PhoenixError(
        f"{host} is not ready after {patience:g} s",
        hint="the job takes it in when it is; `phoenix-run status` shows it",
    )


command = Command("add-host", add_host, [click.Argument(["host"]), job_argument()])
