"""The status verb: its options. What it does is in `showing.py`."""

from __future__ import annotations

import click

from phoenix_launch.cli.command import Command, job_argument
from phoenix_launch.cli.showing import status

command = Command(
    "status",
    status,
    [
        job_argument(),
        click.Option(["as_json", "--json"], is_flag=True, help="The whole state as one line of JSON, schema 1."),
        click.Option(["--watch"], is_flag=True, help="Again every second, until the job ends."),
    ],
)
