"""Before a job stops, or leaves a node: all ranks come to one version, see that it is complete, and change nothing more.

Threads: the one that brings notices asks; the copier's tells all others in its round, and stays in the step's copy; the main
thread, which waits for that copy, lets a script go on that handles the signal itself.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from phoenix_launch.copies import Stamp
from phoenix_launch.processes import POLITE_SIGNALS

_LOOK_UP: Final = 0.05  # seconds


class Halt:
    """One a process. `report`: says that it has come to this version."""

    def __init__(self, report: Callable[[Stamp], None] = lambda _: None) -> None:
        self._report = report
        self._asked, self._released = threading.Event(), threading.Event()
        self._kept, self._here = False, threading.Event()  # a version; and the main thread waits for its copy
        self._own: dict[int, Any] = {}  # the script's handlers, by signal

    @property
    def asked(self) -> bool:
        return self._asked.is_set() and not self._released.is_set()

    def ask(self, wanted: bool) -> None:
        """Whether all ranks are to halt, as far as this one has heard."""
        if wanted:
            self._asked.set()
        else:
            self._asked.clear()

    def keep(self, stamp: Stamp, left: threading.Event) -> None:
        """On the copier's thread: this version is complete. Returns when the step is aborted, or the script goes on.

        Nobody is told before the main thread waits: the signal that follows would find handlers that do not let it go on.
        """
        self._here.clear()
        self._kept, said = True, False
        asked = self.asked  # if not, another rank was, and this one will be
        while not left.wait(_LOOK_UP) and not self._released.is_set():
            asked = asked or self.asked
            if asked and not self.asked:  # it has come to nothing
                break
            if not said and self._here.is_set():
                said = True
                self._report(stamp)
        self._kept = False

    def look(self) -> None:
        """On the main thread, while it waits: who handles the signal of the end wants to come to the end of its step."""
        if not self._kept or self._here.is_set():
            return
        if threading.current_thread() is threading.main_thread():
            for number in POLITE_SIGNALS:
                own = signal.getsignal(number)
                if callable(own) and own not in (signal.default_int_handler, self._handle):
                    self._own[number] = own
                    signal.signal(number, self._handle)
        self._here.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._released.set()
        self._own[number](number, frame)
