"""Which copies of a version one rank fills, and where their replicas go. Pure; the rule itself is `job/commit.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phoenix_launch.job import commit
from phoenix_launch.messages import Ground


@dataclass(frozen=True, slots=True)
class OwnCopy:
    """A slot of its node that a rank fills; the checkpoint server sends it on to the nodes in `replicas`."""

    bundle: str
    replicas: tuple[int, ...] = ()


def copies_of(rank: int, holds: Iterable[commit.Bundle], ground: Ground) -> tuple[OwnCopy, ...]:
    """Of the bundles that the rank holds, those that it fills. All ranks together fill what `commit.copy_plan` says."""
    places, domains = ground.places, dict(ground.domains)
    node = places[rank]
    found = []
    for bundle in holds:
        if commit.writer(bundle, node, places) == rank:
            plan = commit.copy_plan((bundle,), places, domains)
            found.append(OwnCopy(bundle.key, tuple(copy.node for copy in plan.filled_by(node) if copy.node != node)))
    return tuple(found)
