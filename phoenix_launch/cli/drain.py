"""The drain verb."""

from __future__ import annotations

import os
import time

import click

from phoenix_launch.cli.asking import ask, current_status
from phoenix_launch.cli.command import Command, job_argument
from phoenix_launch.errors import EXIT_OK, PhoenixError
from phoenix_launch.records.folders import JobFolder, choose, jobs_root
from phoenix_launch.timeouts import timeout

_PAUSE = 0.2  # seconds between two looks


def drain(node: str, job: str) -> int:
    """Move a node's ranks to a spare node and let the node go.

    NODE is a name or an index. No step that is done is run again. Returns when nothing of the job is on the node any more:
    it can be switched off. Without JOB: the one that runs.
    """
    folder = choose(jobs_root(os.environ), job)
    if not folder.is_running():
        raise PhoenixError(f"job {folder.job} does not run", hint="`phoenix-run jobs` lists all jobs")
    from phoenix_launch.command_messages import Answer, DrainRequest

    answer = ask(folder, "control", DrainRequest(node))
    print(answer.text if isinstance(answer, Answer) else "", flush=True)
    deadline = time.monotonic() + timeout("drain")
    while time.monotonic() < deadline:
        if (gone := _has_left(folder, node)) is not None:
            print(gone)
            return EXIT_OK
        time.sleep(_PAUSE)
    raise PhoenixError(
        f"{node} was not drained within {timeout('drain'):g} s",
        hint="`phoenix-run status` shows what the job waits for",
    )


def _has_left(folder: JobFolder, node: str) -> str | None:
    """What became of it; None: it is still there."""
    status = current_status(folder)
    if status.state.final:
        return f"job {status.job} has ended"
    (found,) = [each for each in status.nodes if node in (each.name, str(each.index))]
    if found.state == "lost":
        return f"{found.name} was lost meanwhile"
    return f"{found.name} is drained" if found.state == "drained" and found.role != "training" else None


command = Command("drain", drain, [click.Argument(["node"]), job_argument()])
