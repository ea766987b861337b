"""When a version of the training state is safe, and which in-memory copy may be overwritten: the commit rule. Pure.

Called by the workers' copier threads and by the nodes' checkpoint servers; nothing here needs the supervisor. Version v is
the state at the entry of step v + 1. Every node keeps each bundle that lives on it in a pair of slots, and a bundle that
no other failure domain holds has a replica in another one. The rule in four sentences: all ranks copy the same versions,
agreed upon in a round at the step's entry. The first optimizer of a step waits until its node's copies are sealed, so a
rank that joins a later round has sealed the version agreed upon before, and that version is complete when all have
joined. Only what is older than a complete version is overwritten or freed. So every bundle has a copy of one common
version at all times, at most one completed step old.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from phoenix_launch.copies import Slot, Stamp
from phoenix_launch.wire import Generation

NO_VERSION: Final = -1

SlotPair: TypeAlias = tuple[Slot | None, Slot | None]
EMPTY: Final[SlotPair] = (None, None)
Place: TypeAlias = tuple[str, int]  # of a slot pair: the bundle's key, the node
Kept: TypeAlias = Mapping[Place, SlotPair]


@dataclass(frozen=True, slots=True, order=True)
class Bundle:
    """The tensors that the same ranks hold. The private one of a rank (random states, position in the data) changes in a
    forward pass already, so that a survivor, too, has to restore it."""

    key: str
    holders: tuple[int, ...]
    private: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Copy:
    """A slot pair of `bundle` on `node`. `origin`: the node whose worker fills it; it is the node itself unless a replica."""

    bundle: str
    node: int
    origin: int

    @property
    def place(self) -> Place:
        """Where it lies. A pair stays what it is when its node becomes the bundle's own, or no longer is."""
        return (self.bundle, self.node)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Which copies make a version complete in a generation. `unprotected`: bundles that die with one failure domain."""

    copies: tuple[Copy, ...]
    unprotected: tuple[str, ...] = ()

    def filled_by(self, node: int) -> tuple[Copy, ...]:
        """The copies that this node has to see sealed: its own slots, and the replicas of them elsewhere."""
        return tuple(copy for copy in self.copies if copy.origin == node)


def copy_plan(
    bundles: Iterable[Bundle],
    places: Mapping[int, int],
    domains: Mapping[int, str],
    *,
    replicas: int = 1,
    distance: int = 1,
    avoided: Collection[int] = (),
) -> CopyPlan:
    """`places`: rank -> node; `domains`: node -> failure domain, of the nodes that have ranks, in the ring's order; `replicas`:
    of what only one domain holds, the first of them `distance` domains on; `avoided`: nodes that are no partners now."""
    copies: list[Copy] = []
    unprotected: list[str] = []
    for bundle in bundles:
        homes = sorted({places[rank] for rank in bundle.holders})
        copies.extend(Copy(bundle.key, node, node) for node in homes)
        if len({domains[node] for node in homes}) > 1:
            continue
        partners = [node for node in _partners(homes[0], domains, distance) if node not in avoided][:replicas]
        copies.extend(Copy(bundle.key, partner, homes[0]) for partner in partners)
        if not partners:
            unprotected.append(bundle.key)
    return CopyPlan(tuple(copies), tuple(unprotected))


def writer(bundle: Bundle, node: int, places: Mapping[int, int]) -> int:
    """Which rank fills the node's own slot of a bundle that it holds."""
    return min(rank for rank in bundle.holders if places[rank] == node)


def _partners(node: int, domains: Mapping[int, str], distance: int) -> list[int]:
    """One node of each other failure domain, in the ring's order, beginning `distance` domains on.

    Of a domain it is the one in the same place as this node in its own, so that no node keeps replicas for many.
    """
    members: dict[str, list[int]] = {}
    for other, domain in domains.items():
        members.setdefault(domain, []).append(other)
    ring = list(members)
    own = ring.index(domains[node])
    others = ring[own + 1 :] + ring[:own]
    place = members[domains[node]].index(node)
    first = (distance - 1) % len(others) if others else 0
    return [members[domain][place % len(members[domain])] for domain in others[first:] + others[:first]]


# --- lineage: what an older generation computed beyond the version at which a later one resumed is void --------------


class Lineage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At which version each generation resumed that did not begin at the script's start, oldest first."""

    resumes: tuple[Stamp, ...] = ()

    def resumed(self, generation: Generation, version: int) -> Lineage:
        """With one more. An earlier entry that says no more than this one is left out."""
        kept = tuple(stamp for stamp in self.resumes if stamp.version < version and stamp.generation < generation)
        return Lineage((*kept, Stamp(generation, version)))

    def loadable(self, stamp: Stamp) -> bool:
        return all(stamp.version <= later.version for later in self.resumes if later.generation > stamp.generation)


def intact(slot: Slot | None, lineage: Lineage) -> bool:
    """Whether it may be loaded. Reading does not need the current generation."""
    return slot is not None and slot.sealed and lineage.loadable(slot.stamp)


def may_write(writer: Generation, current: Generation) -> bool:
    """Writing needs the current generation: a worker that does not know yet that it was replaced changes nothing."""
    return writer == current


def holds(pair: SlotPair, version: int, lineage: Lineage) -> bool:
    """Whether the pair has this version already: what a swap restored from is not copied again."""
    return any(slot is not None and slot.stamp.version == version and intact(slot, lineage) for slot in pair)


# --- the round of a version ------------------------------------------------------------------------------------------


class Vote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank brings to the round at a step's entry. `sealed`: the newest version of which it has seen all copies
    sealed that its node fills, in this generation; `ready`: no backlog, and the interval says that it is time."""

    version: int
    sealed: int
    ready: bool = True
    halt: bool = False  # it was told that the job is about to stop


@dataclass(frozen=True, slots=True)
class Round:
    """What all ranks agreed upon: whether `version` is copied, and the newest version that is complete. `first`: the
    generation began at this version; when it is sealed all meet in a second round on it. `halt`: so they do, and nobody goes
    on to the optimizer: the job stops, and this version is all that was done."""

    version: int
    copy: bool
    complete: int
    first: bool = False
    halt: bool = False


def agreed(votes: Sequence[Vote], resume: int) -> Round:
    """The same for all ranks. The version at which the generation resumed (or the job began, 0) is always copied: until then
    not every single fault can be repaired. Raises ValueError when ranks vote in different steps."""
    versions = {vote.version for vote in votes}
    if len(versions) != 1:
        raise ValueError(f"votes on versions {sorted(versions)} in one round")
    version = versions.pop()
    halt = any(vote.halt for vote in votes)
    copied = version == resume or halt or all(vote.ready for vote in votes)
    return Round(version, copied, min(vote.sealed for vote in votes), first=version == resume, halt=halt)


def may_step(plan: CopyPlan, node: int, decided: Round | None, kept: Kept, lineage: Lineage) -> bool:
    """Whether the first optimizer of the step after the round's version may start on this node.

    It changes parameters, so a version that was chosen has to be in its slots; and in the replicas, or the loss of this
    node would leave the others with versions that it cannot be brought back to. With the first one of a generation there is
    no older version to fall back on: it has to be complete, not only here.
    """
    if decided is None or (decided.first and decided.complete < decided.version):
        return False
    copies = plan.filled_by(node) if decided.copy else ()
    return all(holds(kept.get(copy.place, EMPTY), decided.version, lineage) for copy in copies)


# --- slots -----------------------------------------------------------------------------------------------------------


def may_free(slot: Slot | None, complete: int, lineage: Lineage) -> bool:
    """Whether nobody can need it: void, torn, or older than a complete version.

    `complete` begins anew with each generation (`complete_at_resume`), so what a swap restored from stays until a later
    version has all copies of the new plan, also in places that the new plan no longer names.
    """
    return slot is None or not intact(slot, lineage) or slot.stamp.version < complete


def slot_to_fill(pair: SlotPair, complete: int, lineage: Lineage) -> int | None:
    """Which slot of the pair takes the next version: one that is of no use, else the older one. None: not yet any."""
    free = [index for index, slot in enumerate(pair) if may_free(slot, complete, lineage)]
    return min(free, key=lambda index: _use(pair[index], lineage), default=None)


def _use(slot: Slot | None, lineage: Lineage) -> int:
    return slot.stamp.version if slot is not None and intact(slot, lineage) else NO_VERSION


def complete_at_resume(pair: SlotPair, resume: int, lineage: Lineage) -> int:
    """The newest version in the pair that a generation knows to be safe when it begins.

    It could resume at `resume` only if every bundle has that version, and a version is copied by anybody only after the
    one agreed upon before was complete. So the newest older one in this pair makes still older ones dispensable.
    """
    older = [slot.stamp.version for slot in pair if slot is not None and intact(slot, lineage)]
    return max((version for version in older if version < resume), default=NO_VERSION)


def complete_version(plan: CopyPlan, kept: Kept, lineage: Lineage) -> int:
    """The newest version of which every copy of the plan is sealed (for status, for the emergency save)."""
    common: set[int] | None = None
    for copy in plan.copies:
        here = {s.stamp.version for s in kept.get(copy.place, EMPTY) if s is not None and intact(s, lineage)}
        common = here if common is None else common & here
    return max(common or (), default=NO_VERSION)
