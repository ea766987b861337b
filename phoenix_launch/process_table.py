"""Which processes there are, and exactly one of them: to ask, to signal, to wait for.

A process is named by pid and start time together, and signals go through a pidfd: a number that was given to somebody
else in the meantime is never hit. Only light modules of the standard library are imported: the guardian and every
command use this.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple


class ProcessStat(NamedTuple):
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


STOPPED: Final = {"T": "it is stopped (as by SIGSTOP)", "t": "a debugger holds it"}
UNABLE: Final = {**STOPPED, "D": "it waits in the kernel"}  # states in which a process answers no signal


def kernel_says(pid: int, states: Mapping[str, str] = UNABLE) -> str:
    """Why it does nothing, as far as its state in the process table tells; else empty."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return states.get(file.read().rpartition(") ")[2][:1], "")
    except OSError:
        return ""
