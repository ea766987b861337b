"""The system's side of owning processes: who they are, signals that hit nobody else, kills that leave nobody.

A process is named by pid and start time together, and signals go through a pidfd: a number that was given to somebody
else in the meantime is never hit. Only light modules of the standard library are imported: the guardian uses this.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_libc = ctypes.CDLL(None, use_errno=True)

POLITE_SIGNALS: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
KILL_ROUND_SECONDS: Final = 0.05  # the longest wait before the process table is read again


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One line of the process table. `start_time` in clock ticks since boot; `state` one letter, as in proc(5)."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    start_time: int

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


Table = Mapping[int, ProcessStat]


def parse_stat(text: str) -> ProcessStat:
    """A line of /proc/PID/stat; the name may hold blanks and brackets. Raises ValueError for anything else."""
    head, _, rest = text.rpartition(")")
    pid, _, name = head.partition(" (")
    fields = rest.split()
    if len(fields) < 20:
        raise ValueError(f"no line of /proc/PID/stat: {text[:80]!r}")
    return ProcessStat(int(pid), name, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def look_up(pid: int) -> ProcessStat | None:
    """None when there is no such process (a zombie still is one)."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return parse_stat(file.read())
    except (OSError, ValueError):
        return None


def start_time(pid: int) -> int | None:
    """Together with the pid, the name of a process for as long as the machine runs."""
    found = look_up(pid)
    return found.start_time if found else None


def process_table() -> dict[int, ProcessStat]:
    """All processes of this machine, zombies included."""
    found = (look_up(int(name)) for name in os.listdir("/proc") if name.isdecimal())
    return {entry.pid: entry for entry in found if entry is not None}


def descendants(table: Table, root: int) -> set[int]:
    """All pids below `root`, which is not among them."""
    children: dict[int, list[int]] = {}
    for entry in table.values():
        children.setdefault(entry.parent, []).append(entry.pid)
    found: set[int] = set()
    pending = list(children.get(root, ()))
    while pending:
        pid = pending.pop()
        if pid not in found and pid != root:
            found.add(pid)
            pending += children.get(pid, ())
    return found


def living_descendants(root: int) -> list[ProcessStat]:
    table = process_table()
    return [table[pid] for pid in descendants(table, root) if table[pid].alive]


def environment_bytes(pid: int) -> bytes:
    """What the process was started with (not what it has set since); empty when it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return b""


def is_running(pid: int, started: int) -> bool:
    """Whether this very process still runs (a zombie does not)."""
    found = look_up(pid)
    return found is not None and found.start_time == started and found.alive


def send_signal(process: ProcessStat, number: int) -> bool:
    """To exactly this process; False when it is gone already. A signal of 0 only asks."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if start_time(process.pid) != process.start_time:  # somebody else has the number now
            return False
        signal.pidfd_send_signal(pidfd, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(pidfd)
    return True


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


def wait_for_exit(processes: Iterable[ProcessStat], seconds: float) -> None:
    """Until the first of them ends, or `seconds` have passed."""
    poll = select.poll()
    pidfds = []
    try:
        for process in processes:
            try:
                pidfds.append(os.pidfd_open(process.pid))
            except OSError:
                return
            poll.register(pidfds[-1], select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


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
