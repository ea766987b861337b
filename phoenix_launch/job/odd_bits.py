"""Holders of the same tensors that do not have the same bits: what is new of it, its words, which copies it spoils. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phoenix_launch.copies import KeptSlot
from phoenix_launch.job.state import Odd, State
from phoenix_launch.messages import OddBits
from phoenix_launch.wording import counted, ranks_named


def news(state: State) -> list[OddBits]:
    """What was not known yet, each once, though all holders say it."""
    known = {each.found for each in state.odd}
    said: dict[OddBits, None] = {}
    for _, holder in sorted(state.holders.items()):
        for found in holder.runtime.odd if holder.runtime is not None else ():
            here = found.stamp.generation == state.generation and holder.rank not in found.odd
            if here and holder.rank in found.holders and found not in known:
                said[found] = None
    return list(said)


def remembered(state: State, found: OddBits) -> Odd:
    homes = {place.rank: place.node for place in state.places}
    tainted = {homes[rank] for rank in found.odd if rank in homes}
    holding_nodes = {homes[rank] for rank in found.holders if rank in homes}
    return Odd(found, frozenset(holding_nodes - tainted))


def told(found: OddBits) -> str:
    """As words that go on from who it is."""
    others = len(found.holders) - len(found.odd)
    what = f"{found.tensor} at the entry of step {found.stamp.version + 1}"
    return f"{'has' if len(found.odd) == 1 else 'have'} other bits in {what} than {counted(others, 'other rank')}"


def unclear(found: OddBits) -> str:
    return (
        f"{ranks_named(found.holders)} do not have the same bits in {found.tensor} at the entry of step "
        f"{found.stamp.version + 1}: memory of one of them is damaged; whose cannot be said, and nobody is replaced"
    )


def trusted(kept: Mapping[int, Iterable[KeptSlot]], odd: Iterable[Odd]) -> dict[int, tuple[KeptSlot, ...]]:
    """Without what an odd rank may have written before it was found out: older versions of that bundle count only on nodes with
    holders of which none was odd."""
    blamed = [each for each in odd if each.found.odd]
    return {
        node: tuple(
            slot for slot in slots if not any(each.spoils(node, slot.bundle, slot.slot.stamp) for each in blamed)
        )
        for node, slots in kept.items()
    }
