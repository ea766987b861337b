"""The system's side of owning processes: what a child is set up with, what is reaped, kills that leave nobody.

Only light modules of the standard library are imported: the guardian uses this.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Final

from phoenix_launch.process_table import ProcessStat, living_descendants, send_signal, wait_for_exit

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_libc = ctypes.CDLL(None, use_errno=True)

POLITE_SIGNALS: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
KILL_ROUND_SECONDS: Final = 0.05  # the longest wait before the process table is read again


def become_subreaper() -> None:
    """Orphans below this process become its children from now on."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot become a child subreaper")


def die_with_parent(parent: int) -> None:
    """Ask for SIGKILL when the thread that is this process's parent ends; at once when `parent` is gone already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(127)


def child_setup(parent: int) -> Callable[[], None]:
    """What a child runs between fork and exec: owned by `parent`, and with the signal state of a fresh process."""

    def setup() -> None:
        die_with_parent(parent)
        for number in POLITE_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return setup


def reap() -> dict[int, int]:
    """Collect all own children that have ended, without waiting: pid -> exit code, negative for a signal."""
    codes: dict[int, int] = {}
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return codes
        if ended is None:
            return codes
        signalled = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        codes[ended.si_pid] = -ended.si_status if signalled else ended.si_status


def kill_until_gone(find: Callable[[], list[ProcessStat]], seconds: float) -> list[ProcessStat]:
    """SIGKILL what `find` finds, and what that forked meanwhile, until it finds nothing; own children are reaped.

    Returns those that would not die within `seconds` (in the kernel's uninterruptible sleep, say).
    """
    deadline = time.monotonic() + seconds
    while True:
        reap()
        found = find()
        if not found:
            reap()
            return []
        for process in found:
            send_signal(process, signal.SIGKILL)
        left = deadline - time.monotonic()
        if left <= 0:
            return found
        wait_for_exit(found[:64], min(left, KILL_ROUND_SECONDS))


def kill_descendants(seconds: float) -> list[ProcessStat]:
    """`kill_until_gone` for everything below this process."""
    return kill_until_gone(lambda: living_descendants(os.getpid()), seconds)


def described(processes: Iterable[ProcessStat]) -> str:
    """For a line to the user: "pid 4711 (python, state D)"."""
    return ", ".join(f"pid {p.pid} ({p.name}, state {p.state})" for p in processes)
