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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final, Protocol

import torch
import torch.distributed as dist

from phoenix_launch.copies import Stamp
from phoenix_launch.job import commit
from phoenix_launch.messages import NoRoom
from phoenix_launch.timeouts import timeout
from phoenix_launch.wording import ranks_named
from phoenix_runtime import link
from phoenix_runtime.checkpoint import fingerprints, verification
from phoenix_runtime.checkpoint.bundles import Bundle
from phoenix_runtime.checkpoint.cadence import Cadence
from phoenix_runtime.checkpoint.filling import CopyFailedError, Filler, Footing, Left, Order
from phoenix_runtime.checkpoint.fingerprints import Rows
from phoenix_runtime.checkpoint.halting import Halt
from phoenix_runtime.checkpoint.memory import marks
from phoenix_runtime.checkpoint.private import Private
from phoenix_runtime.checkpoint.verification import Finding, Verdict
from phoenix_runtime.communicators.gate import Gate, StepAborted
from phoenix_runtime.fault_points import FAULT_POINTS

_LOOK_UP: Final = 0.05  # seconds; the gate may be closed by who does not know of us
_LEAVE: Final = timeout("abort")
_NOTICE: Final = timeout("notice")


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
        no_room: Callable[[NoRoom], None] = lambda _: None,
        degraded: Callable[[str], None] = lambda _: None,
        to_disk: ToDisk | None = None,
        halt: Halt | None = None,
        found: Callable[[Sequence[Finding], Stamp], None] = lambda *_: None,
    ) -> None:
        """`seconds`: for how long a server that does not keep a copy is asked again. Called by the thread: `no_room`, when a
        node's memory is too small, which ends the copying; `degraded`, when a node takes no replicas, empty: it does again;
        `found`, when not all holders of a bundle have the same bits."""
        self.complete = commit.NO_VERSION  # the newest version that is known to be complete, in this generation
        self.stalled = 0.0  # seconds that the main thread waited, all together
        self.error: BaseException | None = None  # why a version could not be copied; the gate was closed with it
        self._gate, self._group = gate, group
        self._filler = Filler(job, rank, seconds, no_room, degraded)
        self._to_disk, self._halt, self._found = to_disk, halt or Halt(), found
        self._changed = threading.Condition()
        self._footing: Footing | None = None
        self._order: Order | None = None  # the last one
        self._stopped = self._ended = False
        # The thread's own.
        self._sealed = commit.NO_VERSION
        self._cadence, self._copied_at = Cadence(1), 0.0
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
            self._filler.drop()

    def resume(self, footing: Footing) -> None:
        """Before the first step, and in a swap before the communicators are adopted (what the thread still does for the
        generation before must not meet the new ones): `complete` begins anew. Raises TimeoutError."""
        self.release()
        with self._changed:
            self._order, self._footing, self.error, self._stopped = None, footing, None, False
            self._sealed = self.complete = commit.NO_VERSION
            self._copied_at = 0.0
            if self._cadence.asked != footing.ground.interval:
                self._cadence = Cadence(footing.ground.interval)

    def begin(
        self,
        stamp: Stamp,
        bundles: Sequence[Bundle],
        private: Private,
        withdraw: Callable[[Mapping[str, tuple[str, ...]]], Sequence[Bundle]] | None = None,
    ) -> None:
        """At a step's entry. Of `bundles` nothing may change until `wait` has returned. Said again it is the same copy.

        `withdraw`: called by the thread with tensors, by bundle, that are not equal on its holders; gives the bundles anew.
        After a step without an optimizer (a scaler has skipped it) it waits for that step's copy itself.
        """
        began, blocked = time.monotonic(), self._gate.blocked.begins()
        with self._changed:
            assert self._footing is not None, "resume() comes first"
            before = self._order
            if before is not None and before.stamp == stamp and not before.left.is_set():
                return
            while before is not None and not before.over:
                self._changed.wait(_LOOK_UP)
            self.stalled += time.monotonic() - began
            self._gate.blocked.ends(blocked)
            self._order = order = Order(self._footing, stamp, bundles, private, marks(), withdraw)
            if self._stopped:
                order.left.set()
            self._changed.notify_all()

    def wait(self, check: Callable[[], None]) -> None:
        """Before the step's first optimizer: return when it may step. `check` is LOOP.check: raises when the gate is closed.

        The copying thread has deadlines of its own for all that it does, and closes the gate when one has passed.
        """
        began, blocked = time.monotonic(), self._gate.blocked.begins()
        with self._changed:
            order, void_since = self._order, 0.0
            assert order is not None, "begin() comes first"
            order.waited_from = began
            while not order.whole:
                self._changed.wait(_LOOK_UP)
                self._halt.look()
                check()
                if order.over and not order.whole:
                    void_since = void_since or time.monotonic()
                    if time.monotonic() > void_since + _LEAVE:
                        raise self.error or RuntimeError("the copying was stopped, but the step was not aborted")
        self.stalled += time.monotonic() - began
        self._gate.blocked.ends(blocked)

    def end(self) -> None:
        """The process leaves; the thread ends."""
        with self._changed:
            self._ended = True
        self.stop()
        self._thread.join(_LEAVE)
        self._filler.drop()

    # --- any thread --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The step under way is aborted: returns at once, what is open is void, until the next `resume`. Any thread."""
        with self._changed:
            self._stopped = True
            if self._order is not None:
                self._order.left.set()
            self._filler.interrupt()
            self._changed.notify_all()

    # --- the copying thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._gate.ours.add(threading.get_ident())
        while (order := self._next()) is not None:
            try:
                self._carry_out(order)
                order.whole = True
            except (Left, StepAborted):
                pass
            except BaseException as error:
                if not order.left.is_set():
                    self.error = error
                    self._gate.close(error)
            with self._changed:
                order.over, order.bundles, order.private = True, (), None
                self._changed.notify_all()

    def _next(self) -> Order | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or (self._order is not None and not self._order.over))
            return None if self._ended else self._order

    def _carry_out(self, order: Order) -> None:
        FAULT_POINTS.reached("voting")
        version, disk = order.stamp.version, self._to_disk
        due = disk is not None and disk.due(version)
        decided, writes = self._round(order, writes=due and disk is not None and disk.idle())
        FAULT_POINTS.reached("agreed")
        self._know_complete(decided.complete)
        in_memory = order.footing.ground.interval != 0
        verdict = Verdict()
        if self._group is not None and order.withdraw is not None:
            if self._verifies(order):
                verdict = self._verify(order, order.withdraw)
            elif fingerprints.is_due(version):
                self._compare(order, order.withdraw)
        if decided.copy and in_memory:
            began = time.monotonic()
            self._filler.fill(order, self.complete)
            self._sealed = version
            self._took(order, began)
        if (decided.first or decided.halt or order.odd) and in_memory:  # no other to fall back on: complete everywhere
            self._know_complete(self._round(order)[0].complete)
            if self.complete < order.stamp.version:
                raise CopyFailedError(f"version {order.stamp.version} is not complete on all nodes")
        if verdict.findings:
            self._found(verdict.findings, Stamp(order.footing.generation, version))
        if decided.halt and in_memory:
            self._halt.keep(Stamp(order.footing.generation, version), order.left)
            order.check()
        elif order.odd:
            self._await_replacement(order)
        if disk is not None and writes:
            order.check()
            assert order.private is not None
            disk.take(Stamp(order.footing.generation, version), order.bundles, order.private, order.ready, order.check)
        elif disk is not None and due:
            disk.missed(version)

    def _took(self, order: Order, began: float) -> None:
        """The copy that began then is there: what of it the main thread has waited for, and how long after the last."""
        now = time.monotonic()
        waited = now - max(began, order.waited_from) if order.waited_from else 0.0
        if self._copied_at:
            self._cadence.copied(waited, now - self._copied_at)
        self._copied_at = now

    def _know_complete(self, version: int) -> None:
        if version != self.complete:
            self.complete = version
            page = link.progress_page()
            if page is not None:
                page.write_complete(version)

    def _compare(self, order: Order, withdraw: Callable[[Mapping[str, tuple[str, ...]]], Sequence[Bundle]]) -> None:
        """Whether what is held by several ranks is the same on all of them."""
        for event in order.ready:
            event.synchronize()
        found = fingerprints.differing(order.bundles, lambda rows: self._exchanged(order, rows))
        if found:
            self._withdraw(order, withdraw, found)

    def _withdraw(
        self,
        order: Order,
        withdraw: Callable[[Mapping[str, tuple[str, ...]]], Sequence[Bundle]],
        found: Mapping[str, tuple[str, ...]],
    ) -> None:
        order.bundles = withdraw(found)
        if order.private is not None:
            names = {*order.private.withdrawn, *chain.from_iterable(found.values())}
            order.private = replace(order.private, withdrawn=tuple(sorted(names)))

    def _verifies(self, order: Order) -> bool:
        return verification.is_due(order.stamp.version, order.footing.ground.verify)

    def _verify(self, order: Order, withdraw: Callable[[Mapping[str, tuple[str, ...]]], Sequence[Bundle]]) -> Verdict:
        """Whether that is still so. Who has other bits than most fills nothing that others hold: the copies are intact."""
        for event in order.ready:
            event.synchronize()
        verdict = verification.verified(order.bundles, lambda rows: self._exchanged(order, rows))
        order.odd = verdict.blamed
        if verdict.unclear:
            self._withdraw(order, withdraw, verdict.unclear)
        return verdict

    def _await_replacement(self, order: Order) -> None:
        """The first optimizer waits meanwhile: what has come from a rank with other bits counts for nothing."""
        if not order.left.wait(_NOTICE):
            ranks = ranks_named(sorted(order.odd))
            raise CopyFailedError(
                f"{ranks} had other bits than the other holders and were not replaced in {_NOTICE:g} s"
            )
        raise Left

    def _exchanged(self, order: Order, rows: Rows) -> list[Rows]:
        """All ranks' rows. Void when the gate closes meanwhile."""
        order.check()
        group, epoch = self._group, self._gate.epoch
        assert group is not None
        most = torch.tensor([-len(rows)])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        group.allreduce([most], options).wait()
        mine = torch.zeros(-int(most), 2, dtype=torch.int64)
        mine[: len(rows)] = torch.tensor(list(rows), dtype=torch.int64).view(-1, 2)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
        every = [torch.empty_like(mine) for _ in range(group.size())]
        group.allgather([lengths], [torch.tensor([len(rows)])]).wait()
        if len(mine):
            group.allgather([every], [mine]).wait()
        if self._gate.closed or self._gate.epoch != epoch:
            raise Left
        return [[(int(what), int(value)) for what, value in each[: int(length)].tolist()] for each, length in
                zip(every, lengths, strict=True)]  # fmt: skip

    def _round(self, order: Order, *, writes: bool = False) -> tuple[commit.Round, bool]:
        """What all ranks agree upon, and whether all were ready to write this version to disk. Void when the gate closes
        meanwhile: then nobody knows what was said."""
        version, sealed = order.stamp.version, self._sealed
        order.check()
        ready, halt = (
            self._cadence.ready(version) or self._verifies(order),
            self._halt.asked,
        )  # what was compared is copied
        votes = [commit.Vote(version, sealed, ready, halt)]
        if self._group is not None:
            epoch = self._gate.epoch
            lowest = torch.tensor([version, -version, sealed, int(ready), int(writes), -int(halt)])
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]  # as torch itself sets it
            self._group.allreduce([lowest], options).wait()
            if self._gate.closed or self._gate.epoch != epoch:
                raise Left
            first, last, sealed, copies, all_write, halts = lowest.tolist()
            writes = bool(all_write)
            votes = [commit.Vote(each, sealed, bool(copies), bool(halts)) for each in (first, -last)]
        order.check()
        return commit.agreed(votes, order.footing.resume), writes

    def forked(self) -> None:
        """In a child that the script forked."""
        self._filler.forked()


_copiers: Final[weakref.WeakSet[Copier]] = weakref.WeakSet()


def _forked() -> None:
    for copier in list(_copiers):
        copier.forked()


os.register_at_fork(after_in_child=_forked)
