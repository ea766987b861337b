"""From a worker's SIGKILL to the next useful step of the example, with a checkpoint every step: against torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from measure import EXAMPLE, PHOENIX, RUN_SECONDS, TORCHRUN, alternate, job, rounds_option

from phoenix_launch.records.journal import WorkerStarted, read_events

WORLD = 4
VICTIM = 1  # a rank; not 0, which writes the checkpoints
STEPS_BEFORE = 10
SMALL = ["--layers", "1", "--width", "32", "--sequence", "32", "--steps", "100000"]


def restart(launcher: str) -> float:
    command = [launcher, "--nproc-per-node", str(WORLD), "--max-restarts", "3", str(EXAMPLE), *SMALL]
    options = ["--log-every", "1", "--checkpoint-every", "1", "--checkpoint", "gpt.pt"]
    # without the variable torchrun's restarted gloo workers find the old store and never meet
    with job([*command, *options], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as (process, folder):
        steps = _steps(process)
        before = next(step for step in steps if step >= STEPS_BEFORE)
        victim = _journalled(folder) if launcher == PHOENIX else _descendant(process.pid)
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        # what was printed before the kill and not read yet is no step after it: those are at most a few
        useful = _restarted_at(process) + 1
        for step in steps:
            if step >= max(useful, before + 1):
                return time.monotonic() - killed
    raise SystemExit(f"{launcher}: no step after the kill")


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline and (line := process.stdout.readline()):
        yield line


def _steps(process: subprocess.Popen[str]) -> Iterator[int]:
    for line in _lines(process):
        if found := re.match(r"step +(\d+)/", line):
            yield int(found[1])


def _restarted_at(process: subprocess.Popen[str]) -> int:
    """The step from which the restarted example says that it goes on."""
    for line in _lines(process):
        if found := re.search(r"from step (\d+) of ", line):
            return int(found[1])
    raise SystemExit("the example did not start again")


def _journalled(folder: Path) -> int:
    (path,) = folder.glob("home/jobs/*/events.jsonl")
    return next(event.pid for event in read_events(path) if isinstance(event, WorkerStarted) and event.rank == VICTIM)


def _descendant(launcher: int) -> int:
    for process in psutil.Process(launcher).children(recursive=True):
        if process.environ().get("RANK") == str(VICTIM):
            return int(process.pid)
    raise SystemExit(f"torchrun has no rank {VICTIM}")


if __name__ == "__main__":
    rounds = rounds_option(__doc__, 5)
    alternate({"phoenix-run": lambda: restart(PHOENIX), "torchrun": lambda: restart(TORCHRUN)}, rounds)
