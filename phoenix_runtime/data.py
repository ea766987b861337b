"""`Batches`: the data of a training loop, which never ends and gives the same batches again when a step is repeated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from torch import Tensor

from phoenix_runtime import randomness
from phoenix_runtime.adapters.generators import GeneratorPart, GeneratorState, generators_of
from phoenix_runtime.adapters.part import EARLY
from phoenix_runtime.adapters.state_dicts import has_state_dict
from phoenix_runtime.adapters.values import copied
from phoenix_runtime.batch_copies import BatchCopy
from phoenix_runtime.errors import ScriptError
from phoenix_runtime.randomness import Randomness


@dataclass(frozen=True, slots=True)
class Draws:
    """Where all generators stood: the global ones, and others in the order of their owner."""

    world: Randomness
    others: tuple[GeneratorState, ...]

    @classmethod
    def seen(cls, generators: Sequence[GeneratorPart]) -> Draws:
        return cls(randomness.capture(), tuple([generator.capture() for generator in generators]))

    def put_back(self, generators: Sequence[GeneratorPart]) -> None:
        for generator, state in zip(generators, self.others, strict=True):
            generator.restore(state)
        randomness.restore(self.world)


@dataclass(frozen=True, slots=True)
class Position:
    """Between two batches. `served`: of this epoch; `total`: of all; `begin`: the draws of the epoch's begin, None before it.

    `own`: where the loader's own generators stand now. `loader`: its own state, where it has one and has been read.
    `approximate`: of a job with another number of ranks; it may lie behind the epoch's end.
    """

    order: ClassVar[int] = EARLY
    epoch: int
    served: int
    total: int
    begin: Draws | None
    own: tuple[GeneratorState, ...] = ()
    loader: Any = None
    approximate: bool = False

    def place(self) -> tuple[int, int, int]:
        return self.epoch, self.served, self.total


@dataclass(slots=True)
class _Fetched:
    """A batch since the step's entry: where the data stood before it, and where the generators stood after it."""

    batch: BatchCopy
    before: Position
    after: Draws


def _nothing() -> None:
    return None


@dataclass(slots=True)
class _Frontier:
    """How far the loader itself has been read."""

    position: Position
    iterator: Iterator[Any] | None = None


@dataclass(slots=True, weakref_slot=True, eq=False)
class Batches:
    """The batches of a loader, epoch after epoch: `next(batches)` never ends.

    Args:
        loader: a DataLoader, or anything that can be iterated again and again; a function that returns an iterator will do.
        epoch: the number of the first epoch. `set_epoch` of the loader, its samplers and its dataset is called with it,
            and then with the following numbers.

    Workers that a DataLoader keeps from one epoch to the next (`persistent_workers`) are begun anew with each: what they
    draw in an epoch would otherwise depend on all epochs before, and no other process could continue there. A loader with a
    state_dict of its own is trusted to say all: where torchdata's workers draw augmentations, their dataset has to keep the
    generator in its state.
    """

    captures: ClassVar[type] = Position

    loader: Any
    epoch: int = 0
    safe_point: Callable[[], None] = _nothing  # called before each batch; may raise to end the step
    generators: Sequence[
        GeneratorPart
    ] = ()  # that are restored with the state: a repeated fetch leaves them as the first
    _fetched: list[_Fetched] = field(init=False, default_factory=list)
    _given: int = field(init=False, default=0)  # of these
    _frontier: _Frontier = field(init=False)
    _entry: Position | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if (
            not isinstance(self.loader, Iterable)
            and not callable(self.loader)
            and not hasattr(self.loader, "__getitem__")
        ):
            raise TypeError(f"Batches(...) wants a data loader or something else to iterate, not {self.loader!r}")
        self._frontier = _Frontier(Position(self.epoch, 0, 0, None))

    # --- batches -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        self.safe_point()
        if self._given == len(self._fetched):
            return self._fetch()
        fetched = self._fetched[self._given]
        place = f"batch {fetched.before.total}"
        batch = fetched.batch.again(place)
        self._given += 1
        fetched.after.put_back(self.generators)
        return batch

    def finish_step(self) -> None:
        """The batches that were given are not going to be asked for again."""
        del self._fetched[: self._given]
        self._given = 0
        self._entry = None

    def close(self) -> None:
        """Stop reading: the loader's workers end. The next batch would begin the epoch again."""
        self._end_epoch()
        self._fetched.clear()
        self._given, self._entry = 0, None

    def _fetch(self) -> Any:
        before = self._frontier.position
        batch = self._read()
        self._fetched.append(_Fetched(BatchCopy.of(batch), before, Draws.seen(self.generators)))
        self._given += 1
        self.epoch = self._frontier.position.epoch
        return batch

    def _read(self) -> Any:
        frontier = self._frontier
        if frontier.iterator is None:
            self._begin_epoch(frontier.position.epoch)
        for _ in range(2):  # at the end of an epoch the next one begins
            assert frontier.iterator is not None
            try:
                batch = next(frontier.iterator)
            except StopIteration:
                if not frontier.position.served:
                    break
                self._end_epoch()
                self._begin_epoch(frontier.position.epoch + 1)
            else:
                now = frontier.position
                frontier.position = Position(now.epoch, now.served + 1, now.total + 1, now.begin)
                return batch
        self._end_epoch()
        raise ScriptError(
            f"the loader gave no batch in epoch {frontier.position.epoch}",
            hint="it must not be empty, and iter(loader) must begin anew each time (a generator can be read only once:"
            " give the function that makes it)",
        )

    # --- epochs ------------------------------------------------------------------------------------------------------

    def _begin_epoch(self, epoch: int) -> None:
        begin = Draws.seen(generators_of(self.loader))
        total = self._frontier.position.total
        self._frontier.position = Position(epoch, 0, total, begin)
        _set_epoch(self.loader, epoch)
        self._frontier.iterator = self._iterated()

    def _iterated(self) -> Iterator[Any]:
        loader = self.loader
        repeatable = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
        return iter(loader if repeatable else loader())

    def _end_epoch(self) -> None:
        iterator, self._frontier.iterator = self._frontier.iterator, None
        _end_workers(iterator)
        if getattr(self.loader, "persistent_workers", False):
            _end_workers(getattr(self.loader, "_iterator", None))
            self.loader._iterator = None

    # --- position ----------------------------------------------------------------------------------------------------

    @property
    def value(self) -> Batches:
        return self

    def position(self) -> Position:
        """Where the data stands, without the loader's own state."""
        pending = self._given < len(self._fetched)
        return self._fetched[self._given].before if pending else self._frontier.position

    def capture(self) -> Position:
        now = self.position()
        if self._entry is not None and self._entry.place() == now.place():
            return self._entry
        if self._given < len(self._fetched):
            return now
        own = tuple([generator.capture() for generator in generators_of(self.loader)])
        read = self._frontier.iterator is not None and has_state_dict(self.loader)
        return dataclasses.replace(now, own=own, loader=copied(self.loader.state_dict()) if read else None)

    def restore(self, captured: Position) -> None:
        """Go back to where this step began; or continue from another process's position."""
        places = [fetched.before.place() for fetched in self._fetched] + [self._frontier.position.place()]
        if captured.place() in places and (self._fetched or self._frontier.iterator is not None):
            self._given = places.index(captured.place())
            self._entry = captured
        else:
            self.load(captured)

    def load(self, position: Position) -> None:
        """Continue where another process stood: by the loader's own state, else by fetching the epoch's batches again.

        The global random number generators are left as they are.
        """
        self.close()
        self._frontier.position = Position(position.epoch, position.served, position.total, position.begin)
        self.epoch = position.epoch
        if position.begin is not None:
            self._continue(position, position.begin)
        for generator, state in zip(generators_of(self.loader), position.own, strict=False):
            generator.restore(state)

    def _continue(self, position: Position, begin: Draws) -> None:
        now = Draws.seen(self.generators)
        try:
            begin.put_back(generators_of(self.loader))
            _set_epoch(self.loader, position.epoch)
            if position.loader is not None:
                self.loader.load_state_dict(copied(position.loader))
                self._frontier.iterator = self._iterated()
            else:
                self._frontier.iterator = self._iterated()
                self._skip(position)
        finally:
            now.put_back(self.generators)

    def _skip(self, position: Position) -> None:
        assert self._frontier.iterator is not None
        for fetched in range(position.served):
            try:
                next(self._frontier.iterator)
            except StopIteration:
                if position.approximate:
                    self._end_epoch()
                    self._frontier.position = Position(position.epoch + 1, 0, position.total, None)
                    self.epoch = position.epoch + 1
                    return
                raise ScriptError(
                    f"epoch {position.epoch} ended after {fetched} batches; in the process before it had at least"
                    f" {position.served}",
                    hint="the loader has to give the same batches in every process of the job",
                ) from None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())


_EPOCH_OWNERS: Final = (("sampler",), ("batch_sampler",), ("batch_sampler", "sampler"), ("dataset",))


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tell everybody whose order depends on the epoch, each once."""
    owners = [loader]
    for path in _EPOCH_OWNERS:
        owner = loader
        for name in path:
            owner = getattr(owner, name, None)
        owners.append(owner)
    told: set[int] = set()
    for owner in owners:
        if callable(getattr(owner, "set_epoch", None)) and id(owner) not in told:
            told.add(id(owner))
            owner.set_epoch(epoch)


def _end_workers(iterator: Any) -> None:
    """End the processes behind a DataLoader's iterator now, not when it is collected as garbage."""
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()
