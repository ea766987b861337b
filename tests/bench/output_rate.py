"""What carrying the lines of 4 workers costs, at 2,500 lines/s each and as fast as they can, against piping into `cat`.

Cost is CPU time of the whole tree, less that of the same run without a line. Every line must arrive, in order.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from measure import PHOENIX, RUN_SECONDS, WORKERS, job, rounds_option, summary

WORLD = 4
WRITER = str(WORKERS / "writer.py")


def spent() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def by_phoenix(lines: int, rate: int) -> float:
    """Seconds that the slowest writer took."""
    with job([PHOENIX, "--nproc-per-node", str(WORLD), WRITER, str(lines), str(rate)]) as (process, folder):
        shown, _ = process.communicate(timeout=RUN_SECONDS)
        check(shown, lines)
        return slowest(folder)


def by_cat(lines: int, rate: int) -> float:
    with tempfile.TemporaryDirectory(prefix="bench-") as name, contextlib.ExitStack() as stack:
        processes = []
        for rank in range(WORLD):
            environment = {**os.environ, "RANK": str(rank), "BENCH_FOLDER": name}
            command = [sys.executable, WRITER, str(lines), str(rate)]
            writer = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
            taken = stack.enter_context(Path(name, f"out-{rank}").open("wb"))
            processes += [writer, subprocess.Popen(["cat"], stdin=writer.stdout, stdout=taken)]
            assert writer.stdout is not None
            writer.stdout.close()
        for process in processes:
            process.wait(RUN_SECONDS)
        check("".join(path.read_text() for path in sorted(Path(name).glob("out-*"))), lines)
        return slowest(Path(name))


def slowest(folder: Path) -> float:
    return max(float(path.read_text()) for path in folder.glob("seconds-*"))


def check(shown: str, lines: int) -> None:
    for rank in range(WORLD):
        numbers = [int(number) for number in re.findall(rf"^rank {rank} line (\d+) .* line has$", shown, re.M)]
        if numbers != list(range(lines)):
            raise SystemExit(f"rank {rank}: {len(numbers)} of {lines} lines, or not in order")


def measure(name: str, carry: Callable[[int, int], float], lines: int, rate: int, rounds: int) -> None:
    costs, seconds = [], []
    for _ in range(rounds):
        start = spent()
        carry(0, 0)
        empty = spent() - start
        seconds.append(carry(lines, rate))
        costs.append(spent() - start - 2 * empty)
    print(f"  {name:12} cpu {summary(costs)}  writers took {summary(seconds)}")


if __name__ == "__main__":
    rounds = rounds_option(__doc__, 3)
    for title, lines, rate in [("2,500 lines/s each", 25_000, 2_500), ("as fast as they can", 200_000, 0)]:
        print(f"{WORLD} workers, {lines} lines each, {title}")
        measure("phoenix-run", by_phoenix, lines, rate, rounds)
        measure("cat", by_cat, lines, rate, rounds)
