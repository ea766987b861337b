"""CPU and memory of supervisor, guardians and agents while 4 workers train on 2 nodes; torchrun's agent beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import psutil
from measure import EXAMPLE, PHOENIX, TORCHRUN, job, rounds_option, summary

WATCH_SECONDS = 20.0
TRAIN = [str(EXAMPLE), "--steps", "100000", "--log-every", "1"]


def own_processes(launcher: int) -> list[psutil.Process]:
    """The launcher and those below it that are neither fork server nor worker."""
    root = psutil.Process(launcher)
    return [root, *(p for p in root.children(recursive=True) if "phoenix_launch.node.guardian" in p.cmdline())]


def watch(command: Sequence[str]) -> tuple[float, float]:
    """Percent of one core that all of them take together, and megabytes of the largest."""
    with job([*command, *TRAIN]) as (process, _):
        assert process.stdout is not None
        while not process.stdout.readline().startswith("step"):
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended")
        threading.Thread(target=lambda: process.stdout and list(process.stdout), daemon=True).start()
        watched = own_processes(process.pid)
        before = sum(sum(p.cpu_times()[:2]) for p in watched)
        time.sleep(WATCH_SECONDS)
        after = sum(sum(p.cpu_times()[:2]) for p in watched)
        return 100 * (after - before) / WATCH_SECONDS, max(p.memory_info().rss for p in watched) / 2**20


if __name__ == "__main__":
    rounds = rounds_option(__doc__, 3)
    cases = {
        "phoenix-run": [PHOENIX, "--nodes", "2", "--nproc-per-node", "2"],
        "torchrun": [TORCHRUN, "--nproc-per-node", "4"],
    }
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, command in cases.items():
            results[name].append(watch(command))
    for name, taken in results.items():
        print(
            f"{name:24} cpu {summary([cpu for cpu, _ in taken], '%')}  largest {summary([m for _, m in taken], 'MB')}"
        )
