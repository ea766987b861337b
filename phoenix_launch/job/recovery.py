"""From what the survivors of a fault can give: the version at which all resume, and where each rank takes it from. Pure.

Deterministic: the same offers give the same plan, in whatever order they came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from phoenix_launch.copies import KeptSlot, Source, SourceKind, Stamp, StartupCopy
from phoenix_launch.job.commit import Bundle, Lineage, intact


@dataclass(frozen=True, slots=True)
class Survivor:
    """A rank whose process lives and has left the aborted step. `live`: the state that it holds, None: dirty.

    Who is live at a version holds all of it, its private bundle in the copy that was taken at the step's entry.
    """

    rank: int
    node: int
    live: Stamp | None = None


@dataclass(frozen=True, slots=True)
class Recovery:
    """All ranks resume at `stamp`; `sources`: by rank, one for each bundle that the rank holds."""

    stamp: Stamp
    sources: Mapping[int, tuple[Source, ...]]

    @property
    def moved(self) -> frozenset[int]:
        """Ranks that have to load more than their private bundle's entry copy."""
        return frozenset(
            rank for rank, sources in self.sources.items() if any(s.kind is not SourceKind.ITSELF for s in sources)
        )


def plan(
    bundles: Iterable[Bundle],
    survivors: Iterable[Survivor],
    kept: Mapping[int, Iterable[KeptSlot]],
    places: Mapping[int, int],
    lineage: Lineage,
    *,
    from_holders: bool = True,
) -> Recovery | None:
    """The newest version that every rank can have all its bundles of, and the cheapest source for each.

    `kept`: by node, its slots and the replicas it keeps; `places`: rank -> node in the generation to come; `lineage`: that of
    all generations so far; `from_holders`: whether a rank may take a bundle from another one that is live, and not from
    slots only. None when there is no such version: then the next rung of the ladder.
    """
    table = sorted(bundles)
    live = {s.rank: (s.node, s.live) for s in survivors if s.live is not None and lineage.loadable(s.live)}
    slots: dict[str, dict[Stamp, list[int]]] = {bundle.key: {} for bundle in table}
    for node in sorted(kept):
        for kept_slot in kept[node]:
            if kept_slot.bundle in slots and intact(kept_slot.slot, lineage):
                slots[kept_slot.bundle].setdefault(kept_slot.slot.stamp, []).append(node)
    common: set[Stamp] | None = None
    for bundle in table:
        here = [{live[rank][1]} if rank in live else set() for rank in bundle.holders]
        there = set(slots[bundle.key]) | (set.union if from_holders else set.intersection)(*here)
        common = there if common is None else common & there
    if not common:
        return None
    stamp = max(common, key=lambda s: (s.version, s.generation))
    holders = {rank: node for rank, (node, its) in sorted(live.items()) if its == stamp}
    sources: dict[int, list[Source]] = {rank: [] for rank in places}
    for bundle in table:
        nodes = slots[bundle.key].get(stamp, [])
        for rank in bundle.holders:
            sources[rank].append(_cheapest(bundle, rank, places[rank], nodes, holders))
    return Recovery(stamp, {rank: tuple(found) for rank, found in sources.items()})


def _cheapest(bundle: Bundle, rank: int, home: int, nodes: list[int], holders: Mapping[int, int]) -> Source:
    """`nodes` have a slot of it, `holders` (rank -> node) are live at it; one of them exists."""
    if rank in holders:
        return Source(bundle.key, SourceKind.ITSELF, home)
    if home in nodes:
        return Source(bundle.key, SourceKind.OWN_NODE, home)
    if nodes:
        return Source(bundle.key, SourceKind.OTHER_NODE, nodes[0])
    holder = next(other for other in bundle.holders if other in holders)
    return Source(bundle.key, SourceKind.HOLDER, holders[holder], holder)


def startups(
    bundles: Iterable[Bundle],
    kept: Mapping[int, Iterable[KeptSlot]],
    new: Mapping[int, int],
    lineage: Lineage,
) -> dict[int, StartupCopy]:
    """The newest copy of the private bundle of each rank that a new process takes, of the own node if there is one.

    `new`: rank -> node, of those ranks. Where all resume need not be known: the startup record is in every version.
    """
    wanted = {b.key: b.holders[0] for b in bundles if b.private and b.holders[0] in new}
    best: dict[int, tuple[Stamp, bool, int]] = {}
    for node, slots in kept.items():
        for kept_slot in slots:
            rank = wanted.get(kept_slot.bundle)
            if rank is not None and intact(kept_slot.slot, lineage):
                copy = (kept_slot.slot.stamp, node == new[rank], -node)
                best[rank] = max(copy, best.get(rank, copy))
    keys = {rank: key for key, rank in wanted.items()}
    return {
        rank: StartupCopy(Source(keys[rank], SourceKind.OWN_NODE if own else SourceKind.OTHER_NODE, -node), stamp)
        for rank, (stamp, own, node) in best.items()
    }


def lost_steps(reached: Iterable[int], resume: int) -> int:
    """How many steps that every rank had completed are computed again. `reached`: the version each rank was at."""
    return max(0, min(reached, default=resume) - resume)
