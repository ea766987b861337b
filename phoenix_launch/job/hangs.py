"""Whether a job hangs, and who holds up the others: found by comparing what the ranks have begun. Pure.

A rank waits for another one when it has begun more operations of a group than that one has (of a direction between two ranks:
only when it says that it waits there, since what is sent need not be waited for). Whoever is waited for and waits for nobody
holds up the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phoenix_launch.job.state import Holder, State
from phoenix_launch.messages import Standstill
from phoenix_launch.wording import counted, ranks_named

STEPS: Final = 10.0  # usual steps without any move
BETWEEN: Final = 10.0  # for who is between two steps, where a script may do anything: so many times as long


@dataclass(frozen=True, slots=True)
class Hang:
    """Nobody has moved for `age` seconds. `culprits`: who holds up the others; empty when that cannot be said."""

    age: float
    culprits: tuple[int, ...]
    detail: str


def hang(state: State) -> Hang | None:
    """None as long as somebody moves, or what they do may take that long."""
    rules = state.rules
    still: dict[int, Standstill] = {}
    for holder in (state.holders.get(place.rank) for place in state.places):
        if holder is None or not _takes_part(holder):
            return None
        if holder.rank in state.ended or holder.still is None:
            return None
        still[holder.rank] = holder.still
    if not still:
        return None
    age, usual = min(each.age for each in still.values()), limit(rules.hang_timeout, rules.first_step_timeout, still)
    if age < usual:
        return None
    found = _named(state, still, age)
    inside = [state.holders[rank].inside >= 0 for rank in found.culprits or still]
    promised = any(each.allowed for each in still.values())  # then the script has said how long it takes
    between = not promised and not (all(inside) if found.culprits else any(inside))
    return None if between and age < BETWEEN * usual else found


def _takes_part(holder: Holder) -> bool:
    runtime = holder.runtime
    return runtime is not None and bool(runtime.holds) and not runtime.leaving and not runtime.outside


def limit(least: float, first: float, still: Mapping[int, Standstill]) -> float:
    """How long nobody may move, as long as whoever holds up the others is in a step."""
    typical = max(each.typical for each in still.values())
    allowed = max(each.allowed for each in still.values())
    if allowed:
        return allowed
    if any(each.typical == 0.0 for each in still.values()):  # a replacement may compile what the others have compiled
        return first
    return max(least, STEPS * typical)


def waits_for(still: Mapping[int, Standstill]) -> dict[int, frozenset[int]]:
    """By rank, for whom it waits."""
    return {
        rank: frozenset(other for other, its in still.items() if other != rank and _is_ahead(mine, its))
        for rank, mine in still.items()
    }


def _is_ahead(mine: Standstill, its: Standstill) -> bool:
    key, number = mine.waits_for
    if key and key in its.begun and its.begun[key] < number:
        return True
    # Who waits in C++ does not say so; that all take part in what it has begun, and some have not, is as good.
    shared = mine.begun.keys() & its.begun.keys()
    return not key and any(mine.begun[group] > its.begun[group] for group in shared if group % 2 == 0)


def culprits(still: Mapping[int, Standstill]) -> tuple[int, ...]:
    stopped = tuple(sorted(rank for rank, each in still.items() if each.stopped))
    if stopped:
        return stopped
    edges = waits_for(still)
    waited_for = frozenset().union(*edges.values())
    return tuple(sorted(rank for rank in waited_for if not edges[rank]))


def _named(state: State, still: Mapping[int, Standstill], age: float) -> Hang:
    found = culprits(still)
    others = tuple(sorted(still.keys() - set(found)))
    if not found:
        waiting = [rank for rank, each in still.items() if each.waits_for[0]]
        what = f"{counted(len(waiting), 'rank')} of {len(still)} in a collective that does not end" if waiting else ""
        return Hang(age, (), f"no rank has moved for {age:.0f} s{what and ', '}{what}; none can be named")
    where = "; ".join(state.stacks_seen[rank] for rank in found if state.stacks_seen.get(rank))
    does = "hang" if len(found) > 1 else "hangs"
    said = f"{does} for {age:.0f} s: {ranks_named(others)} wait{'s' * (len(others) == 1)} for it" if others else does
    said = said.replace("for it", "for them") if len(found) > 1 else said
    return Hang(age, found, f"{said}{where and '; '}{where}")
