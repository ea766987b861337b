"""Whether collectives go through: one switch for all groups of this process, and what failed first.

Any thread may meet the gate: the script's, autograd's, the one that brings the notice of a failure.

An error knows the frames that it went through, so whoever of these keeps it in a variable makes a ring, which holds the old
communicators, with their threads and sockets, until the garbage collector comes by. Hence the `del` where errors are raised.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NoReturn, Protocol

from phoenix_runtime.communicators.blocked import Blocked
from phoenix_runtime.communicators.positions import Positions


class Waiting(Protocol):
    """An operation that somebody waits for."""

    def give_up(self) -> None:
        """Let all that wait go, as if the operation had failed."""


class StepAborted(BaseException):
    """The step under way cannot be finished: a process of the job failed. The step is going to be run again.

    It derives from BaseException so that a script's `except Exception` does not take it for an error of its own.
    """


class Gate:
    """Open: collectives run. Closed: they do nothing, since the step that they belong to is going to be repeated.

    A failed collective that raised in the middle of a step would leave DDP, FSDP2 and pipelines in pieces (measured: crashes,
    unusable parameters, hangs), so inside a step the first error is kept and the step runs to its next safe point with
    operations that do nothing. Outside of a step (`keeps` is False) errors are raised as torch raises them.

    `epoch` counts the sets of communicators: what an operation of a replaced communicator has to say is ignored.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.keeps = False
        self.skipped = 0  # operations that did nothing since the gate was closed
        self.failures = 0  # operations that failed since the gate was opened
        self.positions = Positions()
        self.blocked = Blocked()
        self.between = 0  # operations that began outside of steps
        self.reason: BaseException | None = None
        # What becomes of whoever is in a collective outside of a step when that fails: it comes back only to raise the error.
        self.outside: Callable[[BaseException], None] | None = None
        self.ours: set[int] = set()  # threads that know what to do by themselves
        self._lock = threading.Lock()
        self._left = threading.Condition()
        self._inside: dict[object, Waiting] = {}  # what waits in a communicator; each access is atomic
        self._issued: list[weakref.ref[object]] = []

    @property
    def closed(self) -> bool:
        return self.reason is not None

    def close(self, reason: BaseException) -> None:
        """The first reason stays."""
        with self._lock:
            if self.reason is None:
                self.reason = reason

    def reopen(self) -> None:
        """All groups have new communicators."""
        with self._lock:
            self.epoch += 1
            self.reason, self.skipped, self.failures = None, 0, 0
        self.positions.begin_anew()
        self.blocked.disturbed = True

    def failed(self, error: Exception, epoch: int) -> None:
        """An operation of this epoch failed. Returns when that is to be kept; raises the error when it is not."""
        if epoch != self.epoch:
            return
        if threading.get_ident() not in self.ours:  # what is ours is no part of a step
            self.failures += 1
        if self.keeps:
            self.close(error)
            return
        try:
            self.refuse(error)
        finally:
            del error

    def refuse(self, error: BaseException) -> NoReturn:
        """A collective outside of a step cannot be carried: nobody would run it again."""
        try:
            if self.outside is not None and threading.get_ident() not in self.ours:
                self.outside(error)
            raise error
        finally:
            del error

    def issued(self, work: object) -> None:
        """An operation began: the step ends when all of its operations have."""
        if self.keeps and threading.get_ident() not in self.ours:
            self._issued.append(weakref.ref(work))

    def take_issued(self) -> list[object]:
        """Those that somebody still holds, since this was asked last; whoever dropped one has waited or never will."""
        issued, self._issued = self._issued, []
        return [work for reference in issued if (work := reference()) is not None]

    # --- who is inside -----------------------------------------------------------------------------------------------

    def enter(self, waiting: Waiting) -> object:
        """Somebody begins to wait for an operation. Returns what `leave` wants to have."""
        token = object()
        self._inside[token] = waiting
        return token

    def leave(self, token: object) -> None:
        self._inside.pop(token, None)
        if self.closed:
            with self._left:
                self._left.notify_all()

    def wait_until_empty(self, seconds: float) -> bool:
        """Whether nobody waits for an operation any more, within this time."""
        with self._left:
            return self._left.wait_for(lambda: not self._inside, seconds)

    def give_up(self) -> None:
        """Whoever still waits is not going to be told by the communicators: it comes back empty-handed."""
        for waiting in list(self._inside.values()):
            waiting.give_up()
