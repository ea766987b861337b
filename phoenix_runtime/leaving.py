"""Ranks leave together: a worker whose script ended well waits until all have, since until then its memory may be needed.

A failed script never waits. How it ended is known by python's own traces: what `sys.exit` was called with, and the exception
that nobody caught.

An interpreter that shuts down ends each thread that comes back to it, and such an end in the middle of C++ ends the whole
process by SIGABRT. Threads of ours (and those that old communicators have left) are in C++ nearly always, so the worker is
over as soon as all exit handlers were called: its exit code is the script's, whatever those threads do.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NoReturn

FAILED: Final = 1  # python's own exit code for an exception that nobody caught
_ended: list[Any] = []  # what the script gave to sys.exit last
_exit: Final = sys.exit
_together: list[bool] = []  # this process waits for others at its end
os.register_at_fork(after_in_child=_together.clear)  # what a script forks has no say in the job, but has our sockets


def note(status: object) -> None:
    """The script ends with this status, as SystemExit carries it."""
    _ended[:] = [status]


def ended_well() -> bool:
    """Asked when the interpreter shuts down."""
    if getattr(sys, "last_value", None) is not None:  # an exception that nobody caught
        return False
    return not _ended or _ended[0] in (None, 0)


def at_the_end(wait: Callable[[], None], stop: Callable[[], None]) -> None:
    """Call `wait` when the script has ended well, before its process goes, and `stop`, which ends what our threads do, else."""
    _together[:] = [True]
    sys.exit = _noting_exit
    sys.excepthook = _ending_hook(sys.excepthook)
    atexit.register(lambda: _at_exit(wait, stop))


def _at_exit(wait: Callable[[], None], stop: Callable[[], None]) -> None:
    if _together:
        (wait if ended_well() else stop)()


def exit_code(status: object) -> int:
    """Python's own for what SystemExit carries."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else FAILED


def script_over(code: int) -> None:
    """The script's outermost frame was left, and nothing can change the exit code any more."""
    if _together:
        atexit.unregister(_end)
        atexit.register(_end, code)  # the last to be registered is the first to be called


def _end(code: int) -> None:
    """Call all other exit handlers, and end without python's shutdown."""
    atexit.unregister(_end)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _ending_hook(show: Callable[[type[BaseException], BaseException, TracebackType | None], Any]) -> Any:
    """Whatever started the script: when this hook is called, nobody has caught its exception."""

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):  # python lets the process die by the signal itself
            script_over(FAILED)
        show(kind, value, trace)

    return hook


def _noting_exit(status: Any = None, /) -> NoReturn:
    note(status)
    _exit(status)
