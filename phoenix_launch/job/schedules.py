"""Drills one after the other: when the next one is due, whom it hits, what a file of them says. Pure, by seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phoenix_launch.command_messages import DrillKind
from phoenix_launch.errors import UsageError
from phoenix_launch.job.drills import EITHER, RANKS, DrillPlan, parse_plan
from phoenix_launch.status import JobStatus

AT_NODES = frozenset({DrillKind.KILL_NODE, DrillKind.KILL_AGENT, DrillKind.KILL_SERVER})  # whose loss training feels


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`every`: seconds between two; or `mtbf`: their mean, exponentially distributed. `count`: how many, 0: no end."""

    every: float = 0.0
    mtbf: float = 0.0
    seed: int = 0
    count: int = 0

    def delays(self) -> Iterator[float]:
        """Seconds from the job's side to each: from now, then from the one before."""
        times = random.Random(f"times {self.seed}")
        numbers = itertools.count() if self.count == 0 else range(self.count)
        return (self.every if self.every else times.expovariate(1.0 / self.mtbf) for _ in numbers)


class Aim:
    """Chooses at random whom the next drill hits, among those that live."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"targets {seed}")

    def choose(self, kind: DrillKind, status: JobStatus) -> tuple[int, str] | None:
        """(rank, "") or (-1, node); None: nobody is there who could be hit."""
        number = self._random.random()  # one for each drill, whether somebody is there or not
        if kind in RANKS or kind in EITHER:
            ranks = sorted(rank.rank for rank in status.ranks if rank.state == "running")
            return (ranks[int(number * len(ranks))], "") if ranks else None
        nodes = _nodes(kind, status)
        return (-1, nodes[int(number * len(nodes))]) if nodes else None


def _nodes(kind: DrillKind, status: JobStatus) -> list[str]:
    ready = [node for node in sorted(status.nodes, key=lambda node: node.index) if node.state == "ready"]
    if kind is DrillKind.FAIL_SPARE:
        return [node.name for node in ready if node.spares]
    return [node.name for node in ready if node.role == "training" or kind not in AT_NODES]


def read_plans(text: str, name: str) -> list[DrillPlan]:
    """A file of drills: one a line in the syntax of --drill; `#` begins a comment. Raises UsageError with the line's number."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        try:
            plan = parse_plan(words)
        except UsageError as error:
            raise UsageError(f"{name}, line {number}: {error.message}", hint=error.hint) from None
        if plan.kind is DrillKind.KILL_SUPERVISOR:
            raise UsageError(
                f"{name}, line {number}: without its supervisor nobody sees how the job recovers",
                hint="leave kill-supervisor out; `phoenix-run inject-fault kill-supervisor` does it by itself",
            )
        found.append(plan)
    if not found:
        raise UsageError(f"{name} has no drill in it", hint='a line is, for example, "kill-node --node 1 --after 20"')
    return found


def is_ready(plan: DrillPlan, status: JobStatus, since: float) -> bool:
    """Whether the next drill may begin, so many seconds after the one before was over."""
    return since >= plan.after and (plan.at_step < 0 or (status.step is not None and status.step >= plan.at_step))


@dataclass(frozen=True, slots=True)
class Drilled:
    """What became of one. Seconds; None: it did not come to that. `why`: it was refused, or the job has ended."""

    name: str
    detection: float | None = None
    recovery: float | None = None
    redundancy: float | None = None
    lost_steps: int | None = None
    over: bool = False  # its end was told
    harmless: bool = False  # nobody had to be recovered
    why: str = ""

    @property
    def recovered(self) -> bool:
        return self.over and (self.harmless or self.recovery is not None)

    def line(self) -> str:
        if self.why:
            return f"{self.name}: {self.why}"
        if not self.over:
            return f"{self.name}: not over in time"
        if self.recovery is None:
            seen = "nobody was disturbed" if self.detection is None else f"noticed in {self.detection:.2f} s"
            return f"{self.name}: {seen}" if self.harmless else f"{self.name}: {seen}, not recovered"
        lost = "" if self.lost_steps is None else f", {self.lost_steps} steps lost"
        after = "not fully redundant" if self.redundancy is None else f"fully redundant {self.redundancy:.2f} s later"
        return (
            f"{self.name}: detected in {self.detection or 0.0:.2f} s, recovered in {self.recovery:.2f} s{lost}, {after}"
        )


def summary(drills: Sequence[Drilled]) -> str:
    well = sum(each.recovered for each in drills)
    recoveries = sorted(each.recovery for each in drills if each.recovery is not None)
    longest = f", the longest recovery took {recoveries[-1]:.2f} s" if recoveries else ""
    lost = sum(each.lost_steps or 0 for each in drills)
    return f"{well} of {len(drills)} drills recovered, {lost} steps lost{longest}"
