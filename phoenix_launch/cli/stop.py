"""The stop verb."""

from __future__ import annotations

import os
import time

from phoenix_launch.cli.asking import ask, last_status
from phoenix_launch.cli.command import Command, job_argument
from phoenix_launch.errors import EXIT_OK, PhoenixError
from phoenix_launch.records.folders import JobFolder, JobRecord, choose, jobs_root, wait_for_end
from phoenix_launch.status import JobState
from phoenix_launch.timeouts import timeout


def stop(job: str) -> int:
    """End a job as SIGTERM would, and wait until it has ended.

    Its workers get the signal and --shutdown-timeout to end; the job then exits 143. Without JOB: the one that runs.
    """
    folder = choose(jobs_root(os.environ), job)
    if not folder.is_running():
        return _say_how_it_ended(folder)
    record = folder.read_record()
    from phoenix_launch.command_messages import StopRequest

    try:
        ask(folder, "control", StopRequest())
    except PhoenixError:
        if folder.is_running():
            raise
    if not _ended(record, _patience(record)):
        raise PhoenixError(
            f"job {record.job} was told to stop and has not ended within {_patience(record):g} s",
            hint=f"ask again to shorten the workers' time to end; `phoenix-run status {record.job}` shows who is left",
        )
    print(f"job {record.job} stopped, exit code {last_status(folder).exit_code}")
    return EXIT_OK


def _say_how_it_ended(folder: JobFolder) -> int:
    last = last_status(folder)
    if last.state is JobState.ORPHANED:
        raise PhoenixError(
            f"the supervisor of job {folder.job} is gone: nobody can be asked, and its nodes end by themselves",
            hint=f"`phoenix-run resume --detach {folder.job}` takes over, then it can be stopped; "
            f"else they are gone {_orphan_timeout(folder):g} s after its death (--orphan-timeout)",
        )
    print(f"job {folder.job} has ended already, exit code {last.exit_code}")
    return EXIT_OK


def _orphan_timeout(folder: JobFolder) -> float:
    return float(folder.read_record().settings.get("orphan_timeout", timeout("orphan")))


def _patience(record: JobRecord) -> float:
    """The longest that a stop can take."""
    grace = float(record.settings.get("shutdown_timeout", timeout("shutdown")))
    return grace + timeout("reap") + timeout("drain_output") + timeout("exit_output") + timeout("command")


def _ended(record: JobRecord, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not wait_for_end(record, deadline - time.monotonic()):
        if time.monotonic() >= deadline:
            return False
    return True


command = Command("stop", stop, [job_argument()])
