"""What copies in memory at every step cost a DDP job in which nothing fails, against torchrun with gloo and no checkpoints.

2 ranks on one node, 2,048 tokens a rank. Both jobs run side by side and take turns: while one trains, the workers of the other
are stopped (SIGSTOP), so that what else the machine does meets both alike. Only steps that lie within one turn count. The
ratio is that of the medians of all steps; its interval (95 %) is found by drawing turns with replacement. Beside it, with less
noise: the processor time that all processes of each job take for a step. `odd`: a model whose
blocks are registered in the reverse of the order in which they run, so that DDP's own bucket order would be another than ours.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil
from measure import PHOENIX, TORCHRUN, WORKERS, job, until
from step_times import Logs

WORLD: Final = 2
DRAWS: Final = 2000
MODELS: Final = {
    "5 M": ["--layers", "6", "--width", "256"],
    "30 M": ["--layers", "10", "--width", "512", "--heads", "8"],
    "odd": ["--layers", "10", "--width", "512", "--heads", "8", "--odd"],
}
TOKENS: Final = ["--batch", "16", "--sequence", "128"]
STOPPED: Final = ["--hang-timeout", "86400"]  # workers that are stopped for others' turns do not hang
Turn = list[float]  # its steps, in seconds


class Job:
    """One of the two. Its workers are stopped except in its turns. `work`: seconds of processor time, for so many `steps`."""

    def __init__(self, launcher: int, folder: Path) -> None:
        self.work, self.steps = 0.0, 0
        self.folder = folder
        self._launcher = psutil.Process(launcher)
        self._logs = Logs(folder)
        self._logs.wait_for_steps(WORLD)
        self._signal(signal.SIGSTOP)

    def turn(self, steps: int) -> Turn:
        """Train for so many steps that were neither begun before nor ended after."""
        self._logs.follow()
        life = self._logs.newest()[0]
        before, begun, work = len(life.of("done")), time.monotonic(), self._worked()

        def trained() -> bool:
            self._logs.follow()
            return len(life.of("done")) > before + steps

        self._signal(signal.SIGCONT)
        try:
            until(trained, "the steps of a turn", pause=0.02)
        finally:
            self._signal(signal.SIGSTOP)
        self.work += self._worked() - work
        self.steps += len(life.of("done")) - before
        ends = [moment.at for moment in life.of("done", after=begun)]
        return [later - earlier for earlier, later in itertools.pairwise(ends)][:steps]

    def _worked(self) -> float:
        processes = [self._launcher, *self._launcher.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def _signal(self, number: int) -> None:
        for life in self._logs.newest().values():
            os.kill(life.pid, number)

    def spans(self, *pairs: tuple[str, str]) -> list[float]:
        """Seconds that rank 0's pieces of a step took all together, from each first event to the second, by step."""
        self._logs.follow()
        life = self._logs.newest()[0]
        ends = [moment.at for moment in life.of("done")]
        found = [0.0] * len(ends)
        for first, second in pairs:
            for begun, ended in zip(life.of(first), life.of(second), strict=False):
                step = bisect.bisect(ends, begun.at)
                if step < len(found):
                    found[step] += ended.at - begun.at
        return found[2:]  # without the first steps, whose memory has to be made

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)


@contextlib.contextmanager
def attended(command: Sequence[str], **environment: str) -> Iterator[Job]:
    with job(command, **environment) as (process, folder):
        made = Job(process.pid, folder)
        try:
            yield made
        finally:
            made.go_on()


def measured(model: str, turns: int, steps: int) -> str:
    options = [*MODELS[model], *TOKENS]
    nproc = ["--nproc-per-node", str(WORLD)]
    ours: list[Turn] = []
    plain: list[Turn] = []
    with (
        attended([PHOENIX, *STOPPED, *nproc, str(WORKERS / "train_phoenix.py"), *options]) as copying,
        attended([TORCHRUN, "--standalone", *nproc, str(WORKERS / "train_disk.py"), *options]) as bare,
    ):
        for number in range(turns):
            pair = [(ours, copying), (plain, bare)]
            for taken, one in pair if number % 2 else reversed(pair):
                taken.append(one.turn(steps))
    low, high = interval(ours, plain)
    first, second = median(ours), median(plain)
    return (
        f"{model:6} {first * 1000:8.1f} ms with copies, {second * 1000:8.1f} ms without: {first / second:.4f} "
        f"({low:.4f}-{high:.4f}), {sum(map(len, ours))} and {sum(map(len, plain))} steps; processor time a step "
        f"{copying.work / copying.steps:.3f} and {bare.work / bare.steps:.3f} s: "
        f"{copying.work / copying.steps / (bare.work / bare.steps):.4f}"
    )


def median(turns: Sequence[Turn]) -> float:
    return statistics.median(seconds for turn in turns for seconds in turn)


def interval(ours: Sequence[Turn], plain: Sequence[Turn]) -> tuple[float, float]:
    """95 % of the ratios that other choices of these turns would have had; a turn of ours goes with that of the other job."""
    chance = random.Random(1)
    ratios = []
    for _ in range(DRAWS):
        drawn = [chance.randrange(len(ours)) for _ in ours]
        ratios.append(median([ours[i] for i in drawn]) / median([plain[i] for i in drawn]))
    ratios.sort()
    return ratios[DRAWS // 40], ratios[-DRAWS // 40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} [all]")
    parser.add_argument("--turns", type=int, default=10, help="of each job")
    parser.add_argument("--steps", type=int, default=4, help="in each turn")
    options = parser.parse_args()
    for model in options.models or MODELS:
        print(f"{measured(model, options.turns, options.steps)}; load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
