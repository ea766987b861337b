"""Which copies of a version one rank fills, and where their replicas go. Pure; the rule itself is `job/commit.py`."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from phoenix_launch.job import commit
from phoenix_launch.messages import Ground


@dataclass(frozen=True, slots=True)
class OwnCopy:
    """A slot of its node that a rank fills; the checkpoint server sends it on to the nodes in `replicas`.

    `part` of `parts`: what is sent nowhere may be filled by all of the node's holders together, a slice each.
    """

    bundle: str
    replicas: tuple[int, ...] = ()
    part: int = 0
    parts: int = 1


def copies_of(
    rank: int, holds: Iterable[commit.Bundle], ground: Ground, avoided: Collection[int] = ()
) -> tuple[OwnCopy, ...]:
    """Of the bundles that the rank holds, those that it fills. All ranks together fill what `commit.copy_plan` says.

    `avoided`: nodes that cannot be reached from here now; other partners are taken.
    """
    node = ground.places[rank]
    found = []
    for bundle in holds:
        here = [holder for holder in bundle.holders if ground.places[holder] == node]
        plan = _plan(bundle, ground, avoided)
        replicas = tuple(copy.node for copy in plan.filled_by(node) if copy.node != node)
        if commit.writer(bundle, node, ground.places) == rank:
            found.append(OwnCopy(bundle.key, replicas, 0, 1 if replicas else len(here)))
        elif not replicas:
            found.append(OwnCopy(bundle.key, (), here.index(rank), len(here)))
    return tuple(found)


def sound(rank: int, holds: Iterable[commit.Bundle], odd: Collection[int]) -> list[commit.Bundle]:
    """What this rank holds, for those who may fill it: `odd` ranks have other bits in something that others hold, too."""
    if not odd:
        return list(holds)
    found = []
    for bundle in holds:
        left = tuple([holder for holder in bundle.holders if holder not in odd]) or bundle.holders
        if rank in left:
            found.append(replace(bundle, holders=left))
    return found


def slice_of(sizes: Sequence[int], part: int, parts: int) -> range:
    """Which tensors, by their sizes in bytes, belong to a slice: neighbours, about as many bytes in each."""
    total = sum(sizes)
    middles = [end - size / 2 for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    low, high = total * part / parts, total * (part + 1) / parts
    first = bisect.bisect_left(middles, low)
    last = len(sizes) if part == parts - 1 else bisect.bisect_left(middles, high)
    return range(first, last)


def nodes_of(bundle: commit.Bundle, ground: Ground, avoided: Collection[int] = ()) -> tuple[int, ...]:
    """All nodes that keep copies of a bundle."""
    return tuple(copy.node for copy in _plan(bundle, ground, avoided).copies)


def _plan(bundle: commit.Bundle, ground: Ground, avoided: Collection[int]) -> commit.CopyPlan:
    return commit.copy_plan(
        (bundle,),
        ground.places,
        dict(ground.domains),
        replicas=ground.replicas,
        distance=ground.distance,
        avoided=avoided,
    )
