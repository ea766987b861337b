"""Ranks that compute longer than their peers, for which the others wait in every step: found by comparing what they say. Pure.

A rank's compute time is what a step takes it without its waits in collectives (`phoenix_runtime/communicators/blocked.py`), so
whoever waits for a straggler is none. Only ranks of an equal role are compared; one that has no peer is never blamed.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from phoenix_launch.job.state import Holder, Slow

FACTOR: Final = 1.5  # times the median of its peers
MARGIN: Final = 0.05  # and so many seconds more
CALM: Final = 1.25  # it is over below this factor, or half of the margin
STEPS: Final = 10  # for so many steps
SECONDS: Final = 5.0  # and so long each verdict has to hold before it is told
LOOK: Final = 0.5  # seconds from one look to the next
PAUSE: Final = 600.0  # from one straggler's replacement to the next


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of a rank by itself, at one look. `slow` and `calm` may both be False: in between nothing changes."""

    compute: float
    median: float  # of its peers

    @property
    def slow(self) -> bool:
        return self.compute > FACTOR * self.median and self.compute - self.median >= MARGIN

    @property
    def calm(self) -> bool:
        return self.compute < CALM * self.median or self.compute - self.median < MARGIN / 2


def verdicts(holders: Iterable[Holder]) -> dict[int, Verdict]:
    """By rank, of those that have peers."""
    by_role: dict[int, dict[int, float]] = {}
    for holder in holders:
        if holder.pace is not None:
            by_role.setdefault(holder.pace.role, {})[holder.rank] = holder.pace.compute
    found: dict[int, Verdict] = {}
    for computes in by_role.values():
        ordered = sorted(computes.values())
        if len(ordered) > 1:
            found |= {rank: Verdict(compute, median_without(ordered, compute)) for rank, compute in computes.items()}
    return found


def median_without(ordered: Sequence[float], one: float) -> float:
    """The median of all but one of these, which are in order; there are thousands of ranks, and each is asked for."""
    place, others = bisect.bisect_left(ordered, one), len(ordered) - 1
    low, high = (ordered[k if k < place else k + 1] for k in ((others - 1) // 2, others // 2))
    return (low + high) / 2


def watched(before: Mapping[int, Slow], holders: Mapping[int, Holder], now: float) -> dict[int, Slow]:
    """Who is slow, or seems to be, after this look; `told` where that has held for long enough to be said."""
    after: dict[int, Slow] = {}
    found = verdicts(holders.values())
    for rank, holder in holders.items():
        known = before.get(rank)
        if known is not None and known.born != holder.born:
            known = None
        verdict = found.get(rank)
        if verdict is None:
            if known is not None and known.told:  # its process has new peers, or none that has said anything yet
                after[rank] = known
            continue
        new = _next(known, verdict, holder, now)
        if new is not None:
            after[rank] = new
    return after


def _next(known: Slow | None, verdict: Verdict, holder: Holder, now: float) -> Slow | None:
    if known is None:
        fresh = Slow(holder.born, now, holder.step, verdict.compute, verdict.median)
        return fresh if verdict.slow else None
    known = replace(known, compute=verdict.compute, median=verdict.median)
    lasts = holder.step - known.step >= STEPS and now - known.since >= SECONDS
    if not known.told:
        if not verdict.slow:
            return None
        return replace(known, told=True, calming=False) if lasts else known
    if not verdict.calm:
        return replace(known, calming=False)
    if not known.calming:
        return replace(known, calming=True, since=now, step=holder.step)
    return None if lasts else known
