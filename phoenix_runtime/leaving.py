"""Ranks leave together: a worker whose script ended well waits until all have, since until then its memory may be needed.

A failed script never waits. How it ended is known by python's own traces: what `sys.exit` was called with, and the exception
that nobody caught.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn

_ended: list[Any] = []  # what the script gave to sys.exit last
_exit: Final = sys.exit


def note(status: object) -> None:
    """The script ends with this status, as SystemExit carries it."""
    _ended[:] = [status]


def ended_well() -> bool:
    """Asked when the interpreter shuts down."""
    if getattr(sys, "last_value", None) is not None:  # an exception that nobody caught
        return False
    return not _ended or _ended[0] in (None, 0)


def at_the_end(wait: Callable[[], None]) -> None:
    """Call `wait` when the script has ended well, before its process goes."""
    sys.exit = _noting_exit
    atexit.register(lambda: wait() if ended_well() else None)


def _noting_exit(status: Any = None, /) -> NoReturn:
    note(status)
    _exit(status)
