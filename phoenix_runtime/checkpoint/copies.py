"""Which copies of a version one rank fills, and where their replicas go. Pure; the rule itself is `job/commit.py`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from phoenix_launch.job import commit
from phoenix_launch.messages import Ground


@dataclass(frozen=True, slots=True)
class OwnCopy:
    """A slot of its node that a rank fills; the checkpoint server sends it on to the nodes in `replicas`."""

    bundle: str
    replicas: tuple[int, ...] = ()


def copies_of(
    rank: int, holds: Iterable[commit.Bundle], ground: Ground, avoided: Collection[int] = ()
) -> tuple[OwnCopy, ...]:
    """Of the bundles that the rank holds, those that it fills. All ranks together fill what `commit.copy_plan` says.

    `avoided`: nodes that cannot be reached from here now; other partners are taken.
    """
    node = ground.places[rank]
    found = []
    for bundle in holds:
        if commit.writer(bundle, node, ground.places) == rank:
            plan = _plan(bundle, ground, avoided)
            found.append(OwnCopy(bundle.key, tuple(copy.node for copy in plan.filled_by(node) if copy.node != node)))
    return tuple(found)


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
