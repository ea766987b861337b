"""What the processes that hold the ranks have said, and what follows from that for a repair. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from phoenix_launch.copies import KeptSlot, StartupCopy
from phoenix_launch.job import recovery
from phoenix_launch.job.commit import Bundle
from phoenix_launch.job.state import Ended, Holder, Rung, State
from phoenix_launch.messages import NoRoom
from phoenix_launch.wire import NO_GENERATION


def resilient(state: State) -> bool:
    """Whether a fault is repaired rather than answered by a restart: a rank has said that it can be, so it is such a script."""
    if state.rung is not Rung.START or state.swap is not None:
        return True
    return any(
        (holder := state.holders.get(place.rank)) is not None and holder.runtime is not None for place in state.places
    )


def held(state: State, rank: int) -> bool:
    holder = state.holders.get(rank)
    return holder is not None and rank not in state.ended and state.members[holder.node].alive


def unheard(state: State) -> bool:
    """A node that lives has not said yet whether it has started one of its workers."""
    return any(not h.seen and state.members[h.node].alive for h in state.holders.values())


def lost(state: State) -> frozenset[int]:
    """Ranks that no process holds any more, as far as is known."""
    return frozenset(place.rank for place in state.places if not held(state, place.rank))


def failed(state: State) -> list[Ended]:
    """Ranks whose end is a fault, the earliest first."""
    faults = [ended for ended in state.ended.values() if ended.report.code != 0 or too_early(state, ended)]
    return sorted(faults, key=lambda ended: (ended.at, ended.rank))


def too_early(state: State, ended: Ended) -> bool:
    """It ended well in the middle of a job that has to have all its ranks: it did not wait for the others, and one of them is
    in a step that it has not done. (A script may call os._exit at its very end.)"""
    if ended.report.code != 0 or not resilient(state) or all(p.rank in state.ended for p in state.places):
        return False
    holder = state.holders.get(ended.rank)
    if holder is None:
        return False
    if holder.runtime is None:  # without a word: such a one is of no use to a swap, and else it may come to its end
        return state.swap is not None and holder.born == state.generation
    if holder.runtime.leaving:
        return False
    return state.swap is not None or any(held(state, o.rank) and o.inside > holder.step for o in state.holders.values())


def no_room(state: State) -> NoRoom | None:
    """What a rank says of a node whose memory is too small for the copies."""
    found = [
        h.runtime.no_room for h in state.holders.values() if h.runtime is not None and h.runtime.no_room is not None
    ]
    return min(found, key=lambda its: its.node, default=None)


def all_leaving(state: State) -> bool:
    """All scripts are over, so nobody's memory is needed any more."""
    return bool(state.holders) and all(
        (holder.runtime is not None and holder.runtime.leaving)
        or (holder.rank in state.ended and state.ended[holder.rank].report.code == 0)
        for holder in state.holders.values()
    )


def left_behind(state: State) -> tuple[Holder, Holder] | None:
    """One whose script is over, and one in a step beyond. All ranks take part in each step, so that one never ends."""
    for first in state.holders.values():
        if first.runtime is not None and first.runtime.leaving and first.runtime.finished >= 0:
            beyond = [holder for holder in state.holders.values() if holder.inside > first.runtime.finished]
            if beyond:
                return first, beyond[0]
    return None


def cannot_stay(holders: Iterable[Holder]) -> str:
    """Why not all of these can be repaired in place; empty: as far as is known they can."""
    holders = list(holders)
    reasons = {holder.runtime.outside if holder.runtime is not None else "" for holder in holders}
    if len(holders) > 1 and len(reasons) == 1 and "" not in reasons:  # of the job, not of one rank
        return f"no rank can be repaired in place: {reasons.pop()}"
    for holder in holders:
        if holder.runtime is not None and holder.runtime.outside:
            return f"rank {holder.rank} cannot be repaired in place: {holder.runtime.outside}"
        if holder.runtime is not None and holder.runtime.leaving:
            return f"rank {holder.rank} is past its last step"
    return ""


def has_stepped(state: State, holder: Holder) -> bool:
    """It has finished a step in this generation, so whatever began it has served its purpose."""
    runtime = holder.runtime
    return runtime is not None and (runtime.stepped == state.generation or runtime.complete > state.resume)


def is_seasoned(holder: Holder) -> bool:
    """It, or who held the rank before, has finished a step: from here on it can be repaired in place. (A step count comes with
    heartbeats only, so the first step is said by itself.)"""
    return holder.runtime is not None and (holder.step >= 1 or holder.runtime.stepped != NO_GENERATION)


# --- in the generation that a swap began -----------------------------------------------------------------------------


def survivors(state: State) -> list[Holder]:
    """Those that a swap kept and that have to leave their step. Who has not said yet that it knows the runtime is in none."""
    return [h for h in state.holders.values() if h.born < state.generation and h.runtime is not None]


def has_aborted(state: State, holder: Holder) -> bool:
    """No thread of it is in a collective any more."""
    at = state.generation
    return holder.runtime is not None and (holder.runtime.aborted >= at or has_joined(state, holder))


def has_joined(state: State, holder: Holder) -> bool:
    """It knows of this generation, and does nothing of an older one any more."""
    return holder.runtime is not None and holder.runtime.joined == state.generation


def has_restored(state: State, holder: Holder) -> bool:
    return has_joined(state, holder) and holder.runtime is not None and holder.runtime.restored == state.generation


def cannot_go_back(holder: Holder, version: int) -> bool:
    """Its script stands at a later version than that at which all resume, and it cannot run again what lies between."""
    runtime = holder.runtime
    return runtime is not None and runtime.at - version > runtime.returns


def offered(state: State) -> dict[int, tuple[KeptSlot, ...]]:
    """By node, what it keeps; of those that have said so since the generation began: no older one changes it any more."""
    return {
        member.index: member.kept
        for member in state.members.values()
        if member.alive and member.offered >= state.generation
    }


def startups(state: State, ranks: Iterable[int]) -> dict[int, StartupCopy]:
    """With what new processes among these ranks can start, while survivors still leave their step."""
    new = {rank: state.holders[rank] for rank in ranks if rank in state.holders}
    homes = {rank: holder.node for rank, holder in new.items() if holder.born == state.generation}
    return recovery.startups(state.bundles, offered(state), homes, state.lineage) if homes else {}


def addresses(state: State) -> dict[int, str]:
    """By rank, where its communicators of this generation are; empty until all have said."""
    found = {
        holder.rank: holder.runtime.address
        for holder in state.holders.values()
        if holder.runtime is not None and has_joined(state, holder) and holder.runtime.address
    }
    return found if len(found) == len(state.places) else {}


def bundles(state: State) -> tuple[Bundle, ...]:
    """The table of bundles, from what each rank says that it holds; empty when not all have said."""
    holders: dict[str, list[int]] = {}
    private: set[str] = set()
    for place in state.places:
        holder = state.holders.get(place.rank)
        if holder is None or holder.runtime is None or not holder.runtime.holds:
            return ()
        private.add(holder.runtime.private)
        for key in holder.runtime.holds:
            holders.setdefault(key, []).append(place.rank)
    return tuple(Bundle(key, tuple(ranks), private=key in private) for key, ranks in sorted(holders.items()))
