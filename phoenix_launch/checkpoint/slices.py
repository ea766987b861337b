"""Ranks of one node that hold the same bundle fill its slot together, a slice each: who has joined, who is done.

The first one gets the memory, the others join it. The slot is sealed, by the server, when all slices are there. Whatever goes
wrong with one of them (a worker dies, a retry, a new generation) makes the whole void, and whoever waits for it hears that.

All methods may be called from any thread; callbacks run in the thread of the last slice, or of whoever cancels.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from phoenix_launch.checkpoint import header
from phoenix_launch.checkpoint.pairs import Grant, SlotPairs, SlotRefusedError, Wish

Done = Callable[[SlotRefusedError | None], None]
_CANCELLED: Final = "the slices of this copy do not come together: it has to be written anew"


class Slices:
    """One copy that several workers fill. It is the writer, as far as the pair is concerned."""

    def __init__(self, wish: Wish, parts: int) -> None:
        self.wish, self.parts = wish, parts
        self._changed = threading.Condition()
        self._settled = self._over = False
        self._grant: Grant | None = None
        self._refusal: SlotRefusedError | None = None
        self._done: dict[int, Done] = {}

    def matches(self, wish: Wish, parts: int) -> bool:
        mine = (self.wish.generation, self.wish.stamp, self.wish.size, self.parts)
        return mine == (wish.generation, wish.stamp, wish.size, parts)

    def settle(self, grant: Grant | None, refusal: SlotRefusedError | None = None) -> bool:
        """What the pair has answered the first one. False when nobody wants it any more."""
        with self._changed:
            self._grant, self._refusal, self._settled = grant, refusal, True
            self._changed.notify_all()
            return not self._over

    def grant(self, seconds: float) -> Grant | None:
        """The memory for all; None when the copy is kept already. Raises SlotRefusedError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._settled, seconds):
                raise SlotRefusedError(
                    f"the slot of bundle {self.wish.bundle!r} is not given to the first of its writers"
                )
            if self._refusal is not None:
                raise type(self._refusal)(self._refusal.message)
            return self._grant

    def finished(self, part: int, done: Done, pairs: SlotPairs) -> None:
        """This slice is stored. `done` is called when the whole slot is sealed, or is not going to be."""
        with self._changed:
            self._done[part] = done
            if self._over:
                refusal: SlotRefusedError | None = SlotRefusedError(_CANCELLED)
            elif len(self._done) < self.parts:
                return
            else:
                self._over, refusal = True, self._sealed(pairs)
            waiting = list(self._done.values())
            self._done.clear()
        for each in waiting:
            each(refusal)

    def cancel(self, pairs: SlotPairs) -> None:
        with self._changed:
            if self._over:
                return
            self._over = True
            waiting = list(self._done.values())
            self._done.clear()
            grant = self._grant
        if grant is not None:
            pairs.discard(grant)
        for each in waiting:
            each(SlotRefusedError(_CANCELLED))

    def _sealed(self, pairs: SlotPairs) -> SlotRefusedError | None:
        if self._grant is None:
            return None
        try:
            with contextlib.suppress(ValueError):  # a first writer that wrote no head: it is no whole copy then
                header.seal(self._grant.memory.view)
            pairs.seal(self._grant)
        except SlotRefusedError as error:
            return error
        return None


class SlicedFills:
    """Of one server: the copies that are being filled in slices now."""

    def __init__(self, pairs: SlotPairs) -> None:
        self._pairs = pairs
        self._lock = threading.Lock()
        self._under_way: dict[str, Slices] = {}

    def join(self, wish: Wish, parts: int, seconds: float) -> tuple[Slices, Grant | None]:
        """Memory that all writers of this copy fill together. Raises SlotRefusedError."""
        with self._lock:
            slices = self._under_way.get(wish.bundle)
            stale = self._pairs.generation > wish.generation  # the pair is to say so
            first = slices is None or stale or not slices.matches(wish, parts)
            if first:
                older, slices = slices, Slices(wish, parts)
                slices.wish = replace(wish, writer=slices)
                self._under_way[wish.bundle] = slices
        assert slices is not None
        if first:
            if older is not None:
                older.cancel(self._pairs)
            self._ask(slices, seconds)
        return slices, slices.grant(seconds)

    def leave(self, bundle: str) -> None:
        """Somebody is going to write the whole copy by himself, or one of the writers is gone."""
        with self._lock:
            slices = self._under_way.pop(bundle, None)
        if slices is not None:
            slices.cancel(self._pairs)

    def _ask(self, slices: Slices, seconds: float) -> None:
        try:
            grant = self._pairs.begin(slices.wish, seconds)
        except SlotRefusedError as error:
            slices.settle(None, error)
        else:
            if grant is not None:
                header.void(grant.memory.view)  # before anybody stores a byte
            if not slices.settle(grant) and grant is not None:
                self._pairs.discard(grant)
