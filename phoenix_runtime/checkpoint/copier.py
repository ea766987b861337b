"""Copies each version of this rank's state into its node's slots while the step computes, and holds back its first optimizer.

Threads: `phoenix-copier`, one a process, does the copying and takes part in the round of all ranks (`job/commit.py`) at each
step's entry. The main thread asks for a copy at the entry, and waits for it before anything changes. The thread that brings
notices makes both leave whatever they are in.

A rank waits for the copies that it fills itself. That is as good as waiting for all of its node: who joins the next round has
seen its own sealed, so when all have joined all are.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
import torch.distributed as dist

from phoenix_launch.checkpoint.client import SlotsLink
from phoenix_launch.checkpoint.layout import Layout
from phoenix_launch.checkpoint.pairs import SlotRefusedError
from phoenix_launch.checkpoint.slots import slot_size
from phoenix_launch.copies import Stamp
from phoenix_launch.job import commit
from phoenix_launch.messages import Ground
from phoenix_launch.timeouts import timeout
from phoenix_launch.wire import Generation
from phoenix_runtime import link
from phoenix_runtime.checkpoint.bundles import Bundle, private_bundle
from phoenix_runtime.checkpoint.copies import OwnCopy, copies_of
from phoenix_runtime.checkpoint.memory import SlotTargets, entry, local, marks
from phoenix_runtime.checkpoint.private import Private, encoded
from phoenix_runtime.communicators.gate import Gate, StepAborted
from phoenix_runtime.fault_points import FAULT_POINTS

_LOOK_UP: Final = 0.05  # seconds; the gate may be closed by who does not know of us
_PAUSE: Final = 0.1  # seconds before a server is asked again
_LEAVE: Final = timeout("abort")


@dataclass(frozen=True, slots=True)
class Footing:
    """What a generation's copies stand on. `resume`: the version at which it began, 0 at the script's start."""

    generation: Generation
    ground: Ground | None  # None: there are no copies in memory, only some to disk
    resume: int
    slots: str  # path of the node's checkpoint server


class ToDisk(Protocol):
    """Who writes some of the versions to disk, too: when all ranks are ready for that."""

    def due(self, version: int) -> bool:
        """Whether this one is to be written."""

    def idle(self) -> bool:
        """Whether this rank can begin now."""

    def missed(self, version: int) -> None:
        """It was due, but not all ranks could begin."""

    def take(
        self,
        stamp: Stamp,
        bundles: Sequence[Bundle],
        private: Private,
        ready: Sequence[torch.Event] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """All ranks begin; returns when the tensors may change again. `stamp`: with the generation that is now."""


class CopyFailedError(RuntimeError):
    """A version could not be copied, so the step after it must not change anything."""


class _Left(BaseException):
    """The version under way is void: nobody waits for it any more."""


@dataclass(eq=False)
class _Order:
    """One version to copy. `left`: it is void; `over`: the thread has done with it; `whole`: the optimizer may step."""

    footing: Footing
    stamp: Stamp
    bundles: Sequence[Bundle]
    private: Private | None
    ready: list[torch.Event]
    left: threading.Event = field(default_factory=threading.Event)
    over: bool = False
    whole: bool = False

    def check(self) -> None:
        if self.left.is_set():
            raise _Left


class Copier:
    """Made once a process; `group`: of all ranks, for agreement, None in a world of one.

    Main thread: resume, begin, wait, end. `stop` is for the thread that brings notices.
    """

    def __init__(
        self,
        job: str,
        rank: int,
        gate: Gate,
        group: dist.ProcessGroup | None,
        seconds: float = timeout("slot_request"),
        to_disk: ToDisk | None = None,
    ) -> None:
        """`seconds`: for how long a server that does not keep a copy is asked again."""
        self.complete = commit.NO_VERSION  # the newest version that is known to be complete, in this generation
        self.stalled = 0.0  # seconds that the main thread waited, all together
        self.error: BaseException | None = None  # why a version could not be copied; the gate was closed with it
        self._job, self._rank, self._gate, self._group, self._seconds = job, rank, gate, group, seconds
        self._to_disk = to_disk
        self._changed = threading.Condition()
        self._footing: Footing | None = None
        self._order: _Order | None = None  # the last one
        self._stopped = self._ended = False
        # The thread's own; others only interrupt the link.
        self._link: SlotsLink | None = None
        self._sealed = commit.NO_VERSION
        self._plan: tuple[Footing | None, tuple[str, ...], tuple[OwnCopy, ...]] = (None, (), ())
        self._targets = SlotTargets()
        self._thread = threading.Thread(target=self._run, name="phoenix-copier", daemon=True)
        self._thread.start()
        _copiers.add(self)

    # --- the main thread ---------------------------------------------------------------------------------------------

    def release(self) -> None:
        """In a swap, as soon as the step was left: give back what the generation before had open, which takes a while.
        Raises TimeoutError."""
        self.stop()
        with self._changed:
            if not self._changed.wait_for(lambda: self._order is None or self._order.over, _LEAVE):
                raise TimeoutError(f"the thread that copies did not leave its copy within {_LEAVE:g} s")
            self._drop_link()

    def resume(self, footing: Footing) -> None:
        """Before the first step, and in a swap before the communicators are adopted (what the thread still does for the
        generation before must not meet the new ones): `complete` begins anew. Raises TimeoutError."""
        self.release()
        with self._changed:
            self._order, self._footing, self.error, self._stopped = None, footing, None, False
            self._sealed = self.complete = commit.NO_VERSION

    def begin(self, stamp: Stamp, bundles: Sequence[Bundle], private: Private) -> None:
        """At a step's entry. Of `bundles` nothing may change until `wait` has returned. Said again it is the same copy.

        After a step without an optimizer (a scaler has skipped it) it waits for that step's copy itself.
        """
        began = time.monotonic()
        with self._changed:
            assert self._footing is not None, "resume() comes first"
            before = self._order
            if before is not None and before.stamp == stamp and not before.left.is_set():
                return
            while before is not None and not before.over:
                self._changed.wait(_LOOK_UP)
            self.stalled += time.monotonic() - began
            self._order = order = _Order(self._footing, stamp, bundles, private, marks())
            if self._stopped:
                order.left.set()
            self._changed.notify_all()

    def wait(self, check: Callable[[], None]) -> None:
        """Before the step's first optimizer: return when it may step. `check` is LOOP.check: raises when the gate is closed.

        The copying thread has deadlines of its own for all that it does, and closes the gate when one has passed.
        """
        began = time.monotonic()
        with self._changed:
            order, void_since = self._order, 0.0
            assert order is not None, "begin() comes first"
            while not order.whole:
                self._changed.wait(_LOOK_UP)
                check()
                if order.over and not order.whole:
                    void_since = void_since or time.monotonic()
                    if time.monotonic() > void_since + _LEAVE:
                        raise self.error or RuntimeError("the copying was stopped, but the step was not aborted")
        self.stalled += time.monotonic() - began

    def end(self) -> None:
        """The process leaves; the thread ends."""
        with self._changed:
            self._ended = True
        self.stop()
        self._thread.join(_LEAVE)
        self._drop_link()

    # --- any thread --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The step under way is aborted: returns at once, what is open is void, until the next `resume`. Any thread."""
        with self._changed:
            self._stopped = True
            if self._order is not None:
                self._order.left.set()
            if self._link is not None:
                self._link.interrupt()
            self._changed.notify_all()

    # --- the copying thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._gate.ours.add(threading.get_ident())
        while (order := self._next()) is not None:
            try:
                self._carry_out(order)
                order.whole = True
            except (_Left, StepAborted):
                pass
            except BaseException as error:
                if not order.left.is_set():
                    self.error = error
                    self._gate.close(error)
            with self._changed:
                order.over, order.bundles, order.private = True, (), None
                self._changed.notify_all()

    def _next(self) -> _Order | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or (self._order is not None and not self._order.over))
            return None if self._ended else self._order

    def _carry_out(self, order: _Order) -> None:
        FAULT_POINTS.reached("voting")
        version, disk = order.stamp.version, self._to_disk
        due = disk is not None and disk.due(version)
        decided, writes = self._round(order, ready=due and disk is not None and disk.idle())
        FAULT_POINTS.reached("agreed")
        self._know_complete(decided.complete)
        in_memory = order.footing.ground is not None
        if decided.copy and in_memory:
            self._copy(order)
            self._sealed = order.stamp.version
        if decided.first and in_memory:  # nothing older to fall back on: it has to be complete everywhere
            self._know_complete(self._round(order)[0].complete)
            if self.complete < order.stamp.version:
                raise CopyFailedError(f"version {order.stamp.version} is not complete on all nodes")
        if disk is not None and writes:
            order.check()
            assert order.private is not None
            disk.take(Stamp(order.footing.generation, version), order.bundles, order.private, order.ready, order.check)
        elif disk is not None and due:
            disk.missed(version)

    def _know_complete(self, version: int) -> None:
        if version != self.complete:
            self.complete = version
            page = link.progress_page()
            if page is not None:
                page.write_complete(version)

    def _round(self, order: _Order, *, ready: bool = False) -> tuple[commit.Round, bool]:
        """What all ranks agree upon, and whether all were ready to write this version to disk. Void when the gate closes
        meanwhile: then nobody knows what was said."""
        version, sealed = order.stamp.version, self._sealed
        order.check()
        votes = [commit.Vote(version, sealed)]
        if self._group is not None:
            epoch = self._gate.epoch
            lowest = torch.tensor([version, -version, sealed, int(ready)])
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]  # as torch itself sets it
            self._group.allreduce([lowest], options).wait()
            if self._gate.closed or self._gate.epoch != epoch:
                raise _Left
            first, last, sealed, all_ready = lowest.tolist()
            ready = bool(all_ready)
            votes = [commit.Vote(first, sealed), commit.Vote(-last, sealed)]
        order.check()
        return commit.agreed(votes, order.footing.resume), ready

    def _copy(self, order: _Order) -> None:
        """Until all copies that this rank fills are sealed. A server that was restarted has lost them: then once more."""
        until = time.monotonic() + self._seconds
        while True:
            try:
                self._fill(order, self._connected(order))
                return
            except (OSError, SlotRefusedError) as error:
                order.check()
                if isinstance(error, OSError):
                    self._drop_link()
                if time.monotonic() > until:
                    raise CopyFailedError(f"version {order.stamp.version} could not be copied: {error}") from error
            order.left.wait(_PAUSE)

    def _fill(self, order: _Order, slots: SlotsLink) -> None:
        slots.complete = self.complete
        stamp, own = order.stamp, self._own_copies(order)
        parts = {part.key: part for part in self._parts(order)}
        for copy in own:
            part = parts[copy.bundle]
            writer = slots.fill(part.key, stamp, slot_size(part.layout, len(part.extras)))
            if writer is not None:
                data = writer.begin(self._job, part.key, stamp, part.layout, part.extras)
                self._targets.store(writer, data, part.layout, part.tensors, order.check, order.ready)
                order.check()
                FAULT_POINTS.reached("copying")
                writer.seal()
            slots.sealed(part.key, stamp, copy.replicas)
        FAULT_POINTS.reached("sealed")
        assert order.footing.ground is not None
        node = order.footing.ground.places[self._rank]
        for copy in own:
            for where, error in slots.copied(copy.bundle, stamp, (node, *copy.replicas)).items():
                raise SlotRefusedError(f"the copy of bundle {copy.bundle!r} on node {where}: {error}")
        FAULT_POINTS.reached("replicated")

    def _parts(self, order: _Order) -> Iterator[_Part]:
        for bundle in order.bundles:
            yield _Part(bundle.key, *bundle.now())
        assert order.private is not None
        tensors, extras = encoded(order.private)
        layout = Layout.of(entry(name, tensor) for name, tensor in tensors)
        yield _Part(private_bundle(self._rank).key, layout, [local(tensor) for _, tensor in tensors], extras)

    def _own_copies(self, order: _Order) -> tuple[OwnCopy, ...]:
        keys = tuple([bundle.key for bundle in order.bundles])
        footing, known, copies = self._plan
        if footing is not order.footing or known != keys:
            assert order.footing.ground is not None
            holds = [*(bundle.described for bundle in order.bundles), private_bundle(self._rank)]
            copies = copies_of(self._rank, holds, order.footing.ground)
            self._plan = (order.footing, keys, copies)
        return copies

    def _connected(self, order: _Order) -> SlotsLink:
        if self._link is None:
            assert order.footing.ground is not None
            node = order.footing.ground.places[self._rank]
            made = SlotsLink(order.footing.slots, self._job, node)
            made.generation = order.footing.generation
            with self._changed:
                self._link = made
        order.check()
        return self._link

    def _drop_link(self) -> None:
        with self._changed:
            slots, self._link = self._link, None
        if slots is not None:
            slots.close()

    def forked(self) -> None:
        """In a child that the script forked: it must not keep the connection open when this process is gone."""
        if self._link is not None:
            self._link.close()


@dataclass(frozen=True, slots=True)
class _Part:
    """A bundle as it goes into a slot."""

    key: str
    layout: Layout
    tensors: Sequence[torch.Tensor]
    extras: bytes = b""


_copiers: Final[weakref.WeakSet[Copier]] = weakref.WeakSet()


def _forked() -> None:
    for copier in list(_copiers):
        copier.forked()


os.register_at_fork(after_in_child=_forked)
