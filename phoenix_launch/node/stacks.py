"""Where this node's workers are: each is asked by a signal, and writes its stacks to a file beside the agent's socket.

One that is stopped, or is in the kernel for good, writes nothing: then what the kernel says of it has to do.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from phoenix_launch import stack_files
from phoenix_launch.messages import RuntimeReport, StackTrace
from phoenix_launch.node.actions import Member
from phoenix_launch.node.owned_processes import OwnedProcesses
from phoenix_launch.process_table import kernel_says
from phoenix_launch.timeouts import timeout
from phoenix_launch.wire import Generation

LOOK_SECONDS: Final = 0.05  # between two looks at a file: whole when it has not grown
TEXT_BYTES: Final = 64 << 10
_FRAME: Final = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_NOT_THE_SCRIPTS: Final = ("/site-packages/", "/dist-packages/", "/phoenix_runtime/", "/phoenix_launch/", "<frozen")


@dataclass(frozen=True, slots=True)
class Asked:
    """One worker. `able`: it writes stacks when the signal comes; else the signal would end it."""

    rank: int
    generation: Generation
    pid: int
    pidfd: int
    able: bool


def asked(
    members: Iterable[Member], processes: OwnedProcesses, said: Callable[[int], RuntimeReport | None]
) -> list[Asked]:
    """Those of these workers that live."""
    return [
        Asked(member.order.rank, member.generation, member.pid, processes[member.key].pidfd, bool(said(member.key)))
        for member in members
        if member.order is not None and member.alive and member.pid > 0
    ]


@dataclass(slots=True)
class _Open:
    asked: Asked
    path: str
    start: int  # where in its file what it writes now begins
    size: int = 0


class StackCollector:
    """One round at a time: `begin`, then `advance` until it returns all that was asked for."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._open: list[_Open] = []
        self._until = self._next = 0.0

    @property
    def under_way(self) -> bool:
        return bool(self._open)

    def begin(self, workers: Sequence[Asked], now: float) -> None:
        if self._open:
            return
        self._until, self._next = now + timeout("stacks"), now + LOOK_SECONDS
        for asked in workers:
            path = stack_files.path_of(self._socket_path, asked.pid)
            self._open.append(_Open(asked, path, _size(path)))
            if asked.able and asked.pidfd >= 0:
                try:
                    signal.pidfd_send_signal(asked.pidfd, stack_files.SIGNAL)
                except ProcessLookupError:
                    continue

    def advance(self, now: float) -> list[StackTrace]:
        """Empty as long as somebody may still write."""
        if not self._open or now < self._next:
            return []
        self._next = now + LOOK_SECONDS
        growing = False
        for each in self._open:
            size = _size(each.path) - each.start
            silent = not each.asked.able or kernel_says(each.asked.pid)
            growing |= not silent and (size == 0 or size != each.size)
            each.size = size
        if growing and now < self._until:
            return []
        done, self._open = self._open, []
        return [_trace(each, last=each is done[-1]) for each in done]


def _trace(each: _Open, *, last: bool) -> StackTrace:
    text = _read(each.path, each.start)
    kernel, line = kernel_says(each.asked.pid), scripts_line(text)
    where = kernel or (f"it is at {line}" if line else "")
    return StackTrace(each.asked.rank, each.asked.generation, f"{text}\n{kernel}\n".lstrip(), where, last)


def scripts_line(text: str) -> str:
    """The innermost line of the script's own in its main thread: of what faulthandler wrote, the last thread."""
    frames = [found for line in text.rpartition("hread 0x")[2].splitlines() if (found := _FRAME.match(line))]
    own = [frame for frame in frames if not any(part in frame["file"] for part in _NOT_THE_SCRIPTS)]
    outside_libraries = [f for f in own if not f["file"].startswith(os.path.dirname(os.__file__))]
    for frame in outside_libraries or own or frames:
        return f"{os.path.basename(frame['file'])}:{frame['line']} in {frame['name']}"
    return ""


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read(path: str, start: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(TEXT_BYTES).decode(errors="replace")
    except OSError:
        return ""
