"""A worker's way to say how far it is: `report`, which writes its progress page and never waits for anything."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any, Final, SupportsFloat

from phoenix_launch.progress import PaceFigures, Phase, ProgressPage

PROGRESS_VARIABLE: Final = "PHOENIX_PROGRESS"  # the page's path, set by the agent

_page: ProgressPage | None = None
_looked = False
_writer = 0  # the process that maps the page; a data loader's worker inherits the mapping and must not write


def progress_page() -> ProgressPage | None:
    """This worker's page; None without phoenix-run, and in processes that a worker forked."""
    global _page, _looked, _writer
    if not _looked:
        _looked, _writer = True, os.getpid()
        _page = _attach(os.environ.get(PROGRESS_VARIABLE, ""))
    return _page if os.getpid() == _writer else None


def report(
    step: int | None = None,
    loss: SupportsFloat | Any | None = None,  # Any: a tensor, and torch is not imported for its type's sake
    tokens: int = 0,
) -> None:
    """Say how far this rank is: for the live view, `status` and the journal. Does nothing without phoenix-run.

    Args:
        step: completed optimizer steps.
        loss: a number or a tensor of one element. A tensor that is not in this process's own memory (a GPU's, a
            DTensor) is left out, since reading it would wait for a device or for other ranks.
        tokens: how many were trained on since the last report; they are added up.
    """
    page = progress_page()
    if page is None:
        return
    before = page.read()
    value = None if loss is None else _local_value(loss)
    page.write(
        dataclasses.replace(
            before,
            phase=Phase.TRAINING,
            step=before.step if step is None else step,
            loss=before.loss if value is None else value,
            tokens=before.tokens + tokens,
        )
    )


def inside(step: int) -> None:
    """The step that run_step is in, counted from 1; -1: none."""
    page = progress_page()
    if page is not None:
        page.write_inside(step)


def typical(seconds: float) -> None:
    """What a step takes here, as a rule."""
    page = progress_page()
    if page is not None:
        page.write_typical(seconds)


def computing(seconds: float, role: int) -> None:
    """What a step takes this rank as a rule, its waits for others left out; 0: not known. `role`: whom it is compared with."""
    page = progress_page()
    if page is not None:
        page.write_pace(PaceFigures(compute=seconds, role=role))


def allowed(seconds: float) -> None:
    """What the piece that runs now may take without a sign of life; 0: as much as ever."""
    page = progress_page()
    if page is not None:
        page.write_allowed(seconds)


def remark(text: str) -> None:
    """One line for the user, among what the script writes to stderr."""
    print(f"phoenix: {text}", file=sys.stderr, flush=True)


def _attach(path: str) -> ProgressPage | None:
    if not path:
        return None
    try:
        return ProgressPage.attach(path)
    except (OSError, ValueError):  # an inherited variable of a job that is gone: no reason to end a training run
        return None


def _local_value(loss: Any) -> float | None:
    device = getattr(loss, "device", None)
    if device is None:
        return float(loss)
    if getattr(device, "type", "") != "cpu" or hasattr(loss, "to_local"):
        return None
    return float(loss.detach())
