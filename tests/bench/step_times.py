"""Reads what the measured scripts log (`workers/step_log.py`) while they run, and kills one rank of them at a time."""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from measure import until


@dataclass(frozen=True)
class Moment:
    """A line of a log. `at`: by CLOCK_MONOTONIC."""

    event: str
    step: int
    at: float


@dataclass
class Life:
    """One process of a rank."""

    rank: int
    pid: int
    moments: list[Moment] = field(default_factory=list)

    def of(self, *events: str, after: float = 0.0) -> list[Moment]:
        return [moment for moment in self.moments if moment.event in events and moment.at >= after]

    @property
    def done(self) -> int:
        """The newest step that it has finished, -1: none."""
        return max((moment.step for moment in self.of("done")), default=-1)

    def spans(self, first: str, last: str) -> list[float]:
        """Seconds from each `first` to the `last` of the same step, where both were logged."""
        ends = {moment.step: moment.at for moment in self.of(last)}
        return [ends[moment.step] - moment.at for moment in self.of(first) if moment.step in ends]


class Logs:
    """All logs of a folder. `lives`: by pid, in the order in which they were seen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.lives: dict[int, Life] = {}

    def follow(self) -> None:
        for path in self._folder.glob("*-*.log"):
            rank, pid = map(int, path.stem.split("-"))
            life = self.lives.setdefault(pid, Life(rank, pid))
            with path.open("rb") as opened:
                opened.seek(self._read.get(path, 0))
                text = opened.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.decode().splitlines():
                event, step, at = line.split()
                life.moments.append(Moment(event, int(step), float(at)))

    def newest(self) -> dict[int, Life]:
        """Each rank's newest process."""
        found: dict[int, Life] = {}
        for life in self.lives.values():
            if life.moments and (life.rank not in found or life.moments[0].at > found[life.rank].moments[0].at):
                found[life.rank] = life
        return found

    def past(self, step: int, since: float, gone: int = 0) -> dict[int, float]:
        """By rank: when it had finished this step or a later one. Who did so before `since` is past it as well."""
        found: dict[int, float] = {}
        for life in self.lives.values():
            if life.pid == gone:
                continue
            for moment in life.of("done"):
                if moment.step >= step:
                    found[life.rank] = min(max(moment.at, since), found.get(life.rank, float("inf")))
        return found

    def wait_for_steps(self, world: int, steps: int = 3) -> None:
        """Until `world` ranks have each finished so many more steps, in the process that they have by then."""
        self.follow()
        before = {life.pid: len(life.of("done")) for life in self.lives.values()}

        def train_on() -> bool:
            self.follow()
            newest = self.newest()
            return len(newest) >= world and all(
                len(life.of("done")) >= before.get(life.pid, 0) + steps for life in newest.values()
            )

        until(train_on, f"{world} ranks that train on")

    def step_seconds(self) -> float:
        """Median over all ranks, of steps that followed upon one another."""
        taken = [
            later.at - earlier.at
            for life in self.lives.values()
            for earlier, later in itertools.pairwise(life.of("done"))
            if later.step == earlier.step + 1
        ]
        return statistics.median(taken)


@dataclass(frozen=True)
class Kill:
    """One SIGKILL. `interrupted`: the step (from 0) that the victim was in; `past`: when each rank was past it."""

    victim: Life
    at: float
    interrupted: int
    past: dict[int, float]

    @property
    def seconds(self) -> float:
        return max(self.past.values()) - self.at


def kill_one(logs: Logs, rank: int, world: int, chance: random.Random, replicas: int = 0) -> Kill:
    """Kill a rank somewhere within a step, once `replicas` (else `world`) train on; wait until `world` are past that step."""
    logs.wait_for_steps(replicas or world)
    victim = logs.newest()[rank]
    before = len(victim.of("done"))

    def stepped() -> bool:
        logs.follow()
        return len(victim.of("done")) > before

    until(stepped, f"another step of rank {rank}", pause=0.001)
    begun = victim.of("done")[-1].at
    time.sleep(max(0.0, begun + chance.random() * logs.step_seconds() - time.monotonic()))
    at = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    return after_kill(logs, victim, at, world)


def after_kill(logs: Logs, victim: Life, at: float, world: int) -> Kill:
    until(lambda: not Path(f"/proc/{victim.pid}/stat").exists() or _ended(victim.pid), "the victim's end")
    logs.follow()
    interrupted = victim.done + 1

    def past() -> bool:
        logs.follow()
        return len(logs.past(interrupted, at, victim.pid)) >= world

    until(past, f"{world} ranks past step {interrupted}", seconds=120)
    by_rank = logs.past(interrupted, at, victim.pid)
    first = dict(sorted(by_rank.items(), key=lambda item: item[1])[:world])
    return Kill(victim, at, interrupted, first)


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
