"""The resume verb."""

from __future__ import annotations

import os

import click

from phoenix_launch.cli.command import Command, job_argument
from phoenix_launch.cli.loading import loading
from phoenix_launch.records.folders import choose, jobs_root


def resume(job: str, force: bool, detach: bool) -> int:
    """Take over a job whose supervisor is gone.

    Training goes on meanwhile, or is repaired. Most nodes of the job have to answer. From another host: when it sees the
    job's folder and reaches its nodes. Without JOB: the newest one. Exits as the job does.
    """
    folder = choose(jobs_root(os.environ), job)
    with loading():
        from phoenix_launch.supervision.resumption import resume as take_over
    return take_over(folder, os.environ, force=force, detach=detach)


command = Command(
    "resume",
    resume,
    [
        job_argument(),
        click.Option(["--force"], is_flag=True, help="Also when the old supervisor lives, or few nodes answer."),
        click.Option(["--detach"], is_flag=True, help="Go on in the background."),
    ],
)
