"""The jobs verb."""

from __future__ import annotations

import os

from phoenix_launch.cli.asking import last_status
from phoenix_launch.cli.command import Command
from phoenix_launch.errors import EXIT_OK
from phoenix_launch.records.folders import JobFolder, JobRecord, all_jobs, jobs_root
from phoenix_launch.records.view import JobLine, jobs_text
from phoenix_launch.status import JobState


def jobs() -> int:
    """List all jobs, the newest last."""
    print(jobs_text([_line(folder, record) for folder, record in all_jobs(jobs_root(os.environ))]))
    return EXIT_OK


def _line(folder: JobFolder, record: JobRecord) -> JobLine:
    if folder.is_running():
        saved = folder.read_status()
        state, exit_code = saved.state if saved else JobState.STARTING, None
    else:
        last = last_status(folder)
        state, exit_code = last.state, last.exit_code
    return JobLine(record.job, state.value, record.created, exit_code, len(record.nodes), record.argv)


command = Command("jobs", jobs, [])
