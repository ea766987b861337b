"""What a node keeps: a pair of slots for each bundle, who may write which of them now, and who is reading.

The rules are those of `job/commit.py`; here they meet memory and threads. All methods may be called from any thread.
A slot that somebody was filling when the generation changed is given up together with its memory: its writer, which may
not know yet, goes on storing into memory that nobody else will ever look at.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from phoenix_launch.checkpoint.budget import Demand, Shortage, shortage
from phoenix_launch.checkpoint.slots import SlotMemory, memory_size
from phoenix_launch.copies import KeptSlot, Slot, Stamp
from phoenix_launch.errors import PhoenixError
from phoenix_launch.job import commit
from phoenix_launch.wire import NO_GENERATION, Generation

_ANNOUNCE_SECONDS: Final = 3.0  # in which all of a node's workers come to their first step, once one of them has


class SlotRefusedError(PhoenixError):
    """A slot cannot be written or read now: an older generation, a version that is still needed."""


class NoRoomError(SlotRefusedError):
    """The copies do not fit into a node's memory: to ask again is of no use. The message is the arithmetic."""

    def __init__(self, message: str, need: int = 0, *, limited: bool = False, replicas: bool = False) -> None:
        """As `budget.Shortage` has it."""
        super().__init__(message)
        self.need, self.limited, self.replicas = need, limited, replicas


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the job stands: the current generation, at which version it resumed, and what that made void."""

    generation: Generation = NO_GENERATION
    resume: int = 0
    lineage: commit.Lineage = field(default_factory=commit.Lineage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A copy that somebody wants to write. `complete`: the newest version known to be; `size`: bytes of memory; `expected`:
    what later versions will need, as far as is known; `replica`: of another node's bundle."""

    writer: object
    generation: Generation
    bundle: str
    stamp: Stamp
    complete: int
    size: int
    expected: int = 0
    replica: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """That this writer may fill this memory, until it is sealed or somebody else may."""

    wish: Wish
    index: int
    memory: SlotMemory


@dataclass(slots=True)
class _Place:
    """One slot of a pair. `slot`: the sealed copy in it; `writer`: who fills it now; `readers`: how many send from it."""

    memory: SlotMemory | None = None
    slot: Slot | None = None
    writer: object = None
    readers: int = 0

    def is_smaller(self, size: int) -> bool:
        return self.memory is None or self.memory.size < size

    def drop(self) -> None:
        self.memory, self.slot, self.writer = None, None, None


@dataclass(slots=True)
class _Pair:
    places: tuple[_Place, _Place] = field(default_factory=lambda: (_Place(), _Place()))
    generation: Generation = NO_GENERATION  # the newest in which somebody wanted to fill it
    slot_bytes: int = 0  # that each of the two needs, or is going to need
    replica: bool = False

    @property
    def demand(self) -> Demand:
        present = sum(place.memory.size for place in self.places if place.memory is not None)
        return Demand(self.slot_bytes, present, self.replica)

    @property
    def slots(self) -> commit.SlotPair:
        return self.places[0].slot, self.places[1].slot


class SlotPairs:
    """`on_change` is called after what is kept has changed, in the thread that changed it, with no lock held.

    `free`: bytes that this node could allocate now; `limit`: bytes that all copies may take, 0: what is free.
    """

    def __init__(
        self,
        job: str,
        on_change: Callable[[], None] = lambda: None,
        free: Callable[[], float] = lambda: math.inf,
        limit: int = 0,
    ) -> None:
        self.job = job
        self._on_change = on_change
        self._free, self._limit = free, limit
        self.workers = 0  # how many this node has
        self._announced: dict[object, tuple[tuple[str, int, int], ...]] = {}
        self._pairs: dict[str, _Pair] = {}
        self._standing = Standing()
        self._changed = threading.Condition()

    @property
    def generation(self) -> Generation:
        return self._standing.generation

    def kept(self) -> tuple[Generation, tuple[KeptSlot, ...]]:
        """All sealed slots, as of this generation: no older one changes them any more."""
        with self._changed:
            slots = [
                KeptSlot(bundle, slot)
                for bundle, pair in sorted(self._pairs.items())
                for slot in pair.slots
                if slot is not None
            ]
            return self._standing.generation, tuple(slots)

    def follow(self, standing: Standing) -> None:
        """What the agent says of the job. An older generation than the one that is known is not heard any more."""
        with self._changed:
            if standing.generation < self._standing.generation:
                return
            newer = standing.generation > self._standing.generation
            self._standing = standing
            for pair in self._pairs.values():
                for place in pair.places:
                    void = place.slot is not None and not commit.intact(place.slot, standing.lineage)
                    if (newer and place.writer is not None) or (void and not place.readers):
                        place.drop()
            self._changed.notify_all()
        self._on_change()

    # --- writing ---

    def begin(self, wish: Wish, seconds: float) -> Grant | None:
        """Memory to fill; None when this very copy is kept already. Waits while others use the slot.

        Who writes may know of a new generation first: its word comes another way. Raises SlotRefusedError.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            self._changed.wait_for(lambda: self._standing.generation >= wish.generation, seconds)
            self._check(wish)
            pair = self._pairs.setdefault(wish.bundle, _Pair())
            pair.generation = wish.generation  # before anything is waited for: `_forget_others` lets it alone
            index = self._slot_for(wish, pair, deadline)
            self._forget_others(wish)
            pair.slot_bytes, pair.replica = memory_size(max(wish.size, wish.expected)), wish.replica
            if index is not None and pair.places[index].is_smaller(wish.size):
                self._check_room(min(deadline, time.monotonic() + _ANNOUNCE_SECONDS))
                index = self._slot_for(wish, pair, deadline)  # others may have come meanwhile
            if index is None:
                return None
            place = pair.places[index]
            grows = place.is_smaller(wish.size)
            place.slot, place.writer = None, wish.writer
            if grows:
                place.memory = None
            memory = place.memory
        self._on_change()
        return Grant(wish, index, memory) if memory is not None else self._with_memory(wish, index, place)

    def _slot_for(self, wish: Wish, pair: _Pair, deadline: float) -> int | None:
        while True:
            self._check(wish)
            if any(slot is not None and slot.stamp == wish.stamp for slot in pair.slots):
                return None
            standing = self._standing
            complete = max(wish.complete, commit.complete_at_resume(pair.slots, standing.resume, standing.lineage))
            index = commit.slot_to_fill(pair.slots, complete, standing.lineage)
            if index is None:
                raise SlotRefusedError(f"both copies of bundle {wish.bundle!r} are still needed")
            if all(place.writer in (None, wish.writer) for place in pair.places):
                own = [number for number, place in enumerate(pair.places) if place.writer is wish.writer]
                index = own[0] if own else index  # what it began and never sealed is of no use to anybody
                if not pair.places[index].readers:
                    return index
            if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                raise SlotRefusedError(f"the slot of bundle {wish.bundle!r} is in use by somebody else")

    def _check(self, wish: Wish) -> None:
        current = self._standing
        if not commit.may_write(wish.generation, current.generation):
            raise SlotRefusedError(f"generation {wish.generation} may not write, this is {current.generation}")
        if wish.stamp.generation > wish.generation or not current.lineage.loadable(wish.stamp):
            raise SlotRefusedError(f"version {wish.stamp.version} of {wish.stamp.generation} is void")

    def announce(self, writer: object, demands: Iterable[tuple[str, int, int]]) -> None:
        """What a worker is going to fill: bundle, bytes of a copy, and how many replicas of it go to other nodes."""
        with self._changed:
            self._announced[writer] = tuple(demands)
            self._changed.notify_all()

    def forget_writer(self, writer: object) -> None:
        with self._changed:
            self._announced.pop(writer, None)

    def _check_room(self, deadline: float) -> None:
        """Before a slot gets more memory. What does not fit is looked at again when all workers have said what they need, so
        that the arithmetic is whole. Raises NoRoomError."""
        if self._shortage() is None:
            return
        self._changed.wait_for(lambda: len(self._announced) >= self.workers, max(0.0, deadline - time.monotonic()))
        if self._shortage() is None:
            return
        found = self._shortage(as_given=True)
        assert found is not None
        raise NoRoomError(found.words, found.need, limited=found.limited, replicas=found.replicas)

    def _shortage(self, *, as_given: bool = False) -> Shortage | None:
        """`as_given`: with as many replicas of others (none is here yet) as this node gives away: so it is in a ring."""
        demands = {bundle: pair.demand for bundle, pair in self._pairs.items()}
        sent = 0
        for bundle, size, replicas in itertools.chain.from_iterable(self._announced.values()):
            known = demands.get(bundle, Demand(0, 0))
            demands[bundle] = replace(known, slot=max(known.slot, memory_size(size)))
            sent += replicas * memory_size(size)
        if as_given and not any(demand.replica for demand in demands.values()):
            demands[""] = Demand(sent, 0, replica=True)
        return shortage(demands.values(), self._free(), self._limit)

    def _forget_others(self, wish: Wish) -> None:
        """What this generation does not copy to here any more goes as soon as a later version is complete."""
        for bundle, pair in list(self._pairs.items()):
            if pair.generation == wish.generation:
                continue
            for place in pair.places:
                older = place.slot is None or place.slot.stamp.version < wish.complete
                if older and not place.readers and place.writer is None:
                    place.drop()
            if all(place.memory is None and place.writer is None for place in pair.places):
                del self._pairs[bundle]

    def _with_memory(self, wish: Wish, index: int, place: _Place) -> Grant:
        """Allocated without the lock: it takes some tenths of a second for a gigabyte."""
        try:
            memory = SlotMemory(wish.size)
        except OSError as error:
            with self._changed:
                if place.writer is wish.writer:
                    place.drop()
                self._changed.notify_all()
            raise NoRoomError(f"no memory for {wish.size} bytes of bundle {wish.bundle!r}: {error}") from None
        with self._changed:
            if place.writer is not wish.writer or not commit.may_write(wish.generation, self._standing.generation):
                raise SlotRefusedError(f"generation {wish.generation} was replaced meanwhile")
            place.memory = memory
        return Grant(wish, index, memory)

    def slot_bytes(self, bundle: str) -> int:
        """What each slot of the bundle's pair needs, or is going to need."""
        with self._changed:
            pair = self._pairs.get(bundle)
            return pair.slot_bytes if pair is not None else 0

    def seal(self, grant: Grant) -> Slot:
        """Take the copy as kept. Raises SlotRefusedError when it is not what was granted, or not any more."""
        wish = grant.wish
        with self._changed:
            self._check(wish)
            place = self._granted(grant)
            if place is None:
                raise SlotRefusedError(f"the slot of bundle {wish.bundle!r} is not this writer's any more")
            slot = self._found(wish, grant.memory)
            place.writer, place.slot = None, slot
            self._changed.notify_all()
        self._on_change()
        if slot is None:
            raise SlotRefusedError(f"the slot of bundle {wish.bundle!r} does not hold a whole copy of {wish.stamp}")
        return slot

    def abandon(self, grant: Grant) -> None:
        """Its writer broke off or is gone. A copy that it had sealed before it went is as good as any."""
        with contextlib.suppress(SlotRefusedError):
            self.seal(grant)

    def discard(self, grant: Grant) -> None:
        """Void, with its memory: somebody may go on storing into that."""
        with self._changed:
            place = self._granted(grant)
            if place is not None:
                place.drop()
                self._changed.notify_all()
        self._on_change()

    def _granted(self, grant: Grant) -> _Place | None:
        place = self._pairs[grant.wish.bundle].places[grant.index]
        return place if place.writer is grant.wish.writer and place.memory is grant.memory else None

    def _found(self, wish: Wish, memory: SlotMemory) -> Slot | None:
        found = memory.header()
        if found is None or (found.label.job, found.label.bundle, found.label.stamp) != (
            self.job,
            wish.bundle,
            wish.stamp,
        ):
            return None
        return found.label.slot

    # --- reading: of any generation ---

    @contextlib.contextmanager
    def reading(self, bundle: str, stamp: Stamp) -> Iterator[SlotMemory | None]:
        """The memory of this copy, which nobody overwrites meanwhile; None when it is not here, or void."""
        with self._changed:
            place = self._holding(bundle, stamp)
            if place is not None:
                place.readers += 1
        try:
            yield place.memory if place is not None else None
        finally:
            if place is not None:
                with self._changed:
                    place.readers -= 1
                    self._changed.notify_all()

    def forget(self, bundle: str, stamp: Stamp) -> None:
        """This copy is damaged. Its memory is used again when the pair is filled."""
        with self._changed:
            place = self._holding(bundle, stamp)
            if place is not None:
                place.slot = None
                self._changed.notify_all()
        self._on_change()

    def _holding(self, bundle: str, stamp: Stamp) -> _Place | None:
        pair = self._pairs.get(bundle)
        for place in pair.places if pair is not None else ():
            if (
                place.slot is not None
                and place.slot.stamp == stamp
                and commit.intact(place.slot, self._standing.lineage)
            ):
                return place
        return None
