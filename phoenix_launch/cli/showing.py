"""What `status` does. It runs without click, whose loading takes a quarter of the 0.2 s that `status` has in all."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

from phoenix_launch.cli.asking import current_status
from phoenix_launch.errors import EXIT_OK
from phoenix_launch.records.folders import choose, jobs_root, wait_for_end
from phoenix_launch.records.view import status_text
from phoenix_launch.status import JobState, JobStatus, encode_status

WATCH_SECONDS: Final = 1.0
_CLEAR: Final = "\x1b[H\x1b[J"


class Wish(NamedTuple):
    """What the words after `status` ask for."""

    job: str = ""
    as_json: bool = False
    watch: bool = False


def plain(words: Sequence[str]) -> Wish | None:
    """Words that can only be read in one way; None where click has to read them, or to say what is wrong."""
    names = [word for word in words if not word.startswith("-")]
    if len(names) > 1 or not {*words} - {*names} <= {"--json", "--watch"}:
        return None
    return Wish("".join(names), "--json" in words, "--watch" in words)


def status(job: str, as_json: bool, watch: bool) -> int:
    """Show what a job, its nodes and its ranks are doing.

    Without JOB: the one that runs, else the newest.
    """
    folder = choose(jobs_root(os.environ), job)
    while True:
        current = current_status(folder)
        _print(current, as_json, redraw=watch and not as_json and sys.stdout.isatty())
        if not watch or current.state.final or current.state is JobState.ORPHANED:
            return EXIT_OK
        wait_for_end(folder.read_record(), WATCH_SECONDS)


def _print(current: JobStatus, as_json: bool, redraw: bool) -> None:
    text = encode_status(current).decode() if as_json else status_text(current)
    print((_CLEAR if redraw else "") + text, flush=True)
