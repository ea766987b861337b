"""Which node runs which ranks: the line-up of a generation, and the cheapest replacement for what was lost. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A live node as far as placement is concerned. `slots`: how many workers it can run."""

    index: int
    domain: str
    slots: int
    group_rank: int = -1  # fixed by --node-rank, -1: any
    spare: bool = False
    ready: bool = True  # False: keeps the seat it has, takes no other


@dataclass(frozen=True, slots=True)
class Seat:
    """One place of a line-up: the position is the group rank, `slots` how many ranks sit there."""

    node: int
    slots: int


@dataclass(frozen=True, slots=True)
class RankPlace:
    rank: int
    local_rank: int
    node: int
    group_rank: int
    local_world_size: int


def first_lineup(candidates: Sequence[Candidate], seats: int) -> tuple[Seat, ...] | None:
    """The line-up a job starts with: training nodes by group rank and index, spare nodes only where those are missing.

    None while there are fewer candidates than seats.
    """
    ordered = sorted(candidates, key=lambda c: (c.spare, c.index))
    if len(ordered) < seats:
        return None
    chosen = sorted(ordered[:seats], key=lambda c: c.index)
    fixed = {c.group_rank: c for c in chosen if 0 <= c.group_rank < seats}
    others = iter(c for c in chosen if fixed.get(c.group_rank) is not c)
    return tuple(Seat(c.index, c.slots) for c in (fixed.get(g) or next(others) for g in range(seats)))


def refilled(lineup: Sequence[Seat], candidates: Sequence[Candidate], at_least: int) -> tuple[Seat, ...] | None:
    """The same line-up with every seat of a node that is gone given to a live node that is free.

    Seats that nobody can take are left out (an elastic job shrinks); None when fewer than `at_least` would be left.
    Of several nodes that could take one, one in a failure domain that holds the fewest seats is taken (so that the spread
    over domains is kept), then the one with the fewest slots to spare, then the lowest index.
    """
    alive = {c.index: c for c in candidates}
    taken = {seat.node for seat in lineup if seat.node in alive}
    load = Counter(alive[node].domain for node in taken)
    result: list[Seat] = []
    for seat in lineup:
        if seat.node in alive:
            result.append(seat)
            continue
        free = [c for c in candidates if c.ready and c.index not in taken and c.slots >= seat.slots]
        if not free:
            continue
        best = min(free, key=lambda c: (load[c.domain], c.slots, c.index))
        taken.add(best.index)
        load[best.domain] += 1
        result.append(Seat(best.index, seat.slots))
    return tuple(result) if len(result) >= at_least else None


def places(lineup: Sequence[Seat]) -> tuple[RankPlace, ...]:
    """Ranks are dealt out seat by seat, as torchrun does."""
    result: list[RankPlace] = []
    for group_rank, seat in enumerate(lineup):
        first = len(result)
        result.extend(RankPlace(first + i, i, seat.node, group_rank, seat.slots) for i in range(seat.slots))
    return tuple(result)
