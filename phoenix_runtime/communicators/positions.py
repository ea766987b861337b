"""How far this rank is in what it exchanges with others, on its progress page: who hangs is found by comparing all ranks.

An operation counts as begun when it is handed to the communicators. What a group's members have begun is the same on all of
them in the end, since they call the same operations in the same order; sends and receives count for their two ranks alone.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Final

from phoenix_launch.progress import ProgressPage
from phoenix_runtime import link

NOWHERE: Final = (0, 0)
_Direction = tuple[str, int, int]  # group, sender and receiver (ranks in the group); -1: all take part


class Positions:
    """One a process. Any thread may begin an operation; only waits of the main thread are noted."""

    def __init__(self) -> None:
        self._page: ProgressPage | None = None
        self._asked = False
        self._places: dict[_Direction, tuple[int, int]] = {}  # -> key, place on the page
        self._main = threading.main_thread().ident
        self._counting = threading.Lock()
        self.stages: set[int] = set()  # this rank's places in the groups in which it sends to one rank, or hears one

    def begun(self, operation: str, group: str, rank: int, arguments: tuple[object, ...]) -> tuple[int, int]:
        """The key of the operation and its number, for `waiting`."""
        page = self._page if self._asked else self._look()
        if page is None:
            return NOWHERE
        sender = receiver = -1
        if operation == "send":
            sender, receiver = rank, int(arguments[1])  # type: ignore[call-overload]
        elif operation == "recv":
            sender, receiver = int(arguments[1]), rank  # type: ignore[call-overload]
        elif operation == "recv_anysource":
            return NOWHERE
        if sender >= 0:
            self.stages.add(rank)
        with self._counting:
            key, place = self._place(page, (group, sender, receiver))
            return (key, page.count(place)) if place else NOWHERE

    def waiting(self, position: tuple[int, int]) -> bool:
        """The main thread begins to wait for this operation. Returns whether that was noted: `over` has to follow then."""
        if self._page is None or not position[0] or threading.get_ident() != self._main:
            return False
        self._page.write_waiting(*position)
        return True

    def over(self) -> None:
        if self._page is not None:
            self._page.write_waiting(*NOWHERE)

    def begin_anew(self) -> None:
        """All groups have new communicators."""
        if self._page is not None:
            with self._counting:
                self._page.begin_anew()

    def _look(self) -> ProgressPage | None:
        self._asked, self._page = True, link.progress_page()
        return self._page

    def _place(self, page: ProgressPage, direction: _Direction) -> tuple[int, int]:
        found = self._places.get(direction)
        if found is None:
            digest = hashlib.blake2b(repr(direction).encode(), digest_size=8).digest()
            odd = direction[1] >= 0
            key = int.from_bytes(digest, "little") >> 2 << 1 | odd or 2
            found = self._places[direction] = (key, page.place_of(len(self._places), key))
        return found
