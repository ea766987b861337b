"""A hundred swaps in one job: what those processes hold that live on, and whether the last swap is as fast as the first.

2 ranks on one node, a tiny model; rank 1 is killed each time, so rank 0 has survived them all.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import psutil
from measure import PHOENIX, WORKERS, job, parked, swaps, until
from step_times import Logs, kill_one

MODEL: Final = ("--layers", "1", "--width", "32", "--heads", "2", "--batch", "1", "--sequence", "32")


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    pid: int
    threads: int
    descriptors: int
    rss: float  # MiB

    @classmethod
    def by(cls, process: psutil.Process) -> Held:
        """The least of a second: old communicators end beside the training, in threads of their own."""
        found, until = [], time.monotonic() + 1
        while time.monotonic() < until:
            with process.oneshot():
                found.append((process.num_threads(), process.num_fds(), process.memory_info().rss / 2**20))
            time.sleep(0.05)
        return cls(process.pid, *map(min, zip(*found, strict=True)))

    def __str__(self) -> str:
        return f"{self.threads} threads, {self.descriptors} descriptors, {self.rss:.1f} MiB"


def lasting(supervisor: int, survivor: int) -> dict[str, psutil.Process]:
    """The processes that no swap replaces."""
    agent = psutil.Process(survivor).parent()
    assert agent is not None
    found = {"survivor": psutil.Process(survivor), "agent": agent, "supervisor": psutil.Process(supervisor)}
    for child in agent.children():
        words = " ".join(child.cmdline())
        if "fork_server" in words and child.pid != survivor and psutil.Process(child.pid).ppid() == agent.pid:
            found.setdefault("fork server", child)
        if "phoenix_launch.checkpoint" in words:
            found["checkpoint server"] = child
    return found


def tens(seconds: Sequence[float]) -> str:
    first, last = (statistics.median(part) for part in (seconds[:10], seconds[-10:]))
    return f"first ten {first:.3f} s, last ten {last:.3f} s, ratio {last / first:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=100)
    wanted = parser.parse_args().swaps
    command = [PHOENIX, "--nproc-per-node", "2", "--local-spares", "1", str(WORKERS / "train_phoenix.py"), *MODEL]
    chance, seconds = random.Random(1), []
    held: dict[str, dict[int, Held]] = {}
    with job(command) as (process, folder):
        logs = Logs(folder)
        for number in range(1, wanted + 1):
            until(lambda seen=number: parked(folder) >= seen, "a process that is ready")  # type: ignore[misc]
            seconds.append(kill_one(logs, 1, 2, chance).seconds)
            if number in (1, 10) or number % 25 == 0:
                logs.wait_for_steps(2)
                for name, one in lasting(process.pid, logs.newest()[0].pid).items():
                    held.setdefault(name, {})[number] = Held.by(one)
        until(lambda: len(swaps(folder)) == wanted, "the swaps in the journal")
        totals = [swap.total for swap in swaps(folder)]
        anew = [f"swap {number + 1}: {swap.why}" for number, swap in enumerate(swaps(folder)) if swap.rung != 1]
    for name, rows in held.items():
        print(f"\n{name}{'' if len({row.pid for row in rows.values()}) == 1 else ', which was replaced meanwhile'}")
        for number, row in rows.items():
            print(f"  after swap {number:4}: {row}")
        if len(rows) > 1:
            after = sorted(rows)[1]  # not the first: what a first swap loads stays
            print(f"  growth of RSS since swap {after}: {100 * (rows[max(rows)].rss / rows[after].rss - 1):+.1f} %")
    print(f"\nnot in place: {'; '.join(anew) or 'none'}")
    print(f"until all ranks are past the step: {tens(seconds)}\nthe swap alone: {tens(totals)}")


if __name__ == "__main__":
    main()
