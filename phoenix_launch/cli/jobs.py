"""The jobs verb."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

import click

from phoenix_launch.cli.asking import last_status
from phoenix_launch.cli.command import Command
from phoenix_launch.errors import EXIT_OK, PhoenixError, UsageError
from phoenix_launch.records.folders import JobFolder, JobRecord, all_jobs, jobs_root
from phoenix_launch.records.view import JobLine, command_shown, jobs_text, state_word
from phoenix_launch.status import JobState, JobStatus

PRUNED_AFTER: Final = "14"  # days
_DAY: Final = 86400.0


def jobs(prune: str | None) -> int:
    """List all jobs, the newest last."""
    root = jobs_root(os.environ)
    if prune is not None:
        return _prune(root, prune)
    columns = os.get_terminal_size().columns if sys.stdout.isatty() else 0
    print(jobs_text([_line(folder, record) for folder, record in all_jobs(root)], time.time(), columns))
    return EXIT_OK


def _line(folder: JobFolder, record: JobRecord) -> JobLine:
    if folder.is_running():
        status = folder.read_status() or JobStatus(job=record.job, state=JobState.STARTING)
    else:
        status = last_status(folder)
    return JobLine(
        job=record.job,
        state=state_word(status),
        created=record.created,
        exit_code=status.exit_code,
        nodes=len(status.nodes) or len(record.nodes),
        command=command_shown(
            str(record.settings.get("script", "")), record.settings.get("script_args", ()), record.argv
        ),
    )


def _prune(root: Path, text: str) -> int:
    days = _days(text)
    removed = []
    for folder, record in all_jobs(root):
        try:
            ended = folder.ended_at()
        except PhoenixError:
            continue  # nobody can say that it has ended
        if ended is not None and time.time() - ended > days * _DAY:
            folder.remove()
            removed.append(record.job)
    print(f"removed {len(removed)} job{'s' * (len(removed) != 1)} that ended more than {days:g} days ago", end="")
    print(f": {', '.join(removed)}" if removed else "")
    return EXIT_OK


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < float("inf"):
        raise UsageError(
            f"--prune {text}: must be a number of days from 0",
            hint=f"`phoenix-run jobs --prune` alone removes what ended more than {PRUNED_AFTER} days ago",
        )
    return days


command = Command(
    "jobs",
    jobs,
    [
        click.Option(
            ["--prune"],
            metavar="[DAYS]",
            is_flag=False,
            flag_value=PRUNED_AFTER,
            default=None,
            help=f"Remove the folders, with logs, of jobs that ended more than DAYS ({PRUNED_AFTER}) ago.",
        )
    ],
)
