"""A swap at 8, 16 and 32 ranks on two nodes, with a tiny model: its phases, and which of them grow with the number of ranks.

Also how long an abort takes: from a notice until every thread is out of its collective.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from measure import PHOENIX, WORKERS, job, summary, swaps, until
from step_times import Logs, kill_one

from phoenix_launch.records.journal import Swap

MODEL: Final = ("--layers", "1", "--width", "32", "--heads", "2", "--batch", "1", "--sequence", "32")
ABORT: Final = Path(__file__).parents[1] / "communicators" / "abort_ranks.py"


def swapped(ranks: int, kills: int) -> tuple[list[Swap], list[float], float]:
    """The swaps, seconds until all ranks were past the step, and a step's seconds."""
    options = ("--nodes", "2", "--nproc-per-node", str(ranks // 2), "--local-spares", "1")
    chance = random.Random(1)
    with job([PHOENIX, *options, str(WORKERS / "train_phoenix.py"), *MODEL]) as (_, folder):
        logs = Logs(folder)
        taken = [kill_one(logs, 1 + number % (ranks - 1), ranks, chance).seconds for number in range(kills)]
        until(lambda: len(swaps(folder)) == kills, "the swaps in the journal")
        return swaps(folder), taken, logs.step_seconds()


def aborts(ranks: int) -> str:
    """Until the slowest rank was out of each of the collectives that the test's script hangs in."""
    command = [sys.executable, str(ABORT), str(ranks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return summary([1000 * line["seconds"] for line in told if "seconds" in line], "ms")


def phases(found: Iterable[Swap]) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for swap in found:
        for name, value in {**swap.phases, "total": swap.total}.items():
            columns.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in columns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--kills", type=int, default=3)
    options = parser.parse_args()
    for ranks in options.ranks:
        found, taken, step = swapped(ranks, options.kills)
        told = "  ".join(f"{name} {value * 1000:.0f}" for name, value in phases(found).items())
        print(f"{ranks:3} ranks: past the step {summary(taken)}; a step {step:.3f} s; phases, ms: {told}", flush=True)
        print(f"     abort: {aborts(ranks)}; load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
