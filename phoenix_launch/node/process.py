"""The operating system's side of one process of a node: descriptors, output, what it left behind when it ended."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from phoenix_launch.messages import Standstill
from phoenix_launch.node.poll_loop import PollLoop
from phoenix_launch.node.trees import Claim
from phoenix_launch.process_table import STOPPED, kernel_says
from phoenix_launch.progress import CopyFigures, PaceFigures, Progress, ProgressPage
from phoenix_launch.wire import Generation

ERROR_FILE_BYTES: Final = 64 << 10
STILL_SECONDS: Final = 2.0  # from here on it is said that a worker stands still


def read_error_file(path: Path | None) -> str:
    """What @record left there: JSON of at most 64 KiB, else nothing."""
    if path is None:
        return ""
    try:
        with open(path, "rb") as file:
            data = file.read(ERROR_FILE_BYTES + 1)
        if len(data) > ERROR_FILE_BYTES:
            return ""
        json.loads(data)
        return data.decode()
    except (OSError, ValueError, RecursionError):
        return ""


class Service(Protocol):
    """Who looks after a process of the agent's own: the fork server, the checkpoint server."""

    def ended(self, process: NodeProcess, code: int) -> None:
        """Its exit code was collected."""

    def overdue(self, process: NodeProcess) -> None:
        """Its deadline has passed."""


@dataclass(slots=True)
class NodeProcess:
    """Everything of a process that must be closed again. `key` is its name in the node's state and at the pump."""

    key: int
    service: Service | None = None  # None: it is one of the node's state, a worker or what can become one
    pid: int = 0
    pidfd: int = -1
    control: socket.socket | None = None
    popen: subprocess.Popen[bytes] | None = None
    output: tuple[int, ...] = ()  # read ends that the pump has not taken over yet
    deadline: float | None = None  # until when it must have said that it is ready
    page: ProgressPage | None = None
    page_fd: int = -1
    last: Progress = field(default_factory=Progress)  # what its page said when that was closed
    last_copies: CopyFigures = field(default_factory=CopyFigures)
    marker: bytes = b""
    error_file: Path | None = None
    error: str = ""
    tail: str = ""
    oom_killed: bool = False
    drain_until: float | None = None  # set when it has ended and its output is still read
    drained: bool = False
    code: int | None = None  # of its exit, once collected
    verdict: int | None = None  # reported instead of the code: it was ended because it could not be set up
    hosting: Generation | None = None  # as a store
    moved: tuple[float, ...] = ()  # what its page said when it was looked at last
    moved_at: float | None = None  # when that was new

    @property
    def claim(self) -> Claim:
        return Claim(self.key, self.pid, self.marker)

    def watch_exit(self, loop: PollLoop, callback: Callable[[], None]) -> None:
        """Raises ProcessLookupError when it is gone and collected already."""
        self.pidfd = os.pidfd_open(self.pid)
        loop.watch(self.pidfd, callback)

    def make_page(self) -> str:
        """A fresh progress page; returns the path by which the worker maps it."""
        self.page_fd, self.page = ProgressPage.create()
        path = f"/proc/{os.getpid()}/fd/{self.page_fd}"
        self.marker = f"PHOENIX_PROGRESS={path}".encode()
        return path

    def step(self) -> int:
        return self._progress().step

    def complete(self) -> int:
        return self._progress().complete

    def inside(self) -> int:
        return self._progress().inside

    def standstill(self, now: float) -> Standstill | None:
        """Since when nothing has moved on its page; None: it moved a short time ago, or never said anything."""
        if self.page is None:
            return None
        said, at = self.page.read(), self.page.read_position()
        moved = (said.step, said.inside, said.reports, at.operations, at.allowed)
        if moved != self.moved or self.moved_at is None:
            self.moved, self.moved_at = moved, now
        age = now - self.moved_at
        if age < STILL_SECONDS:
            return None
        counts, stopped = self.page.read_counts(), bool(kernel_says(self.pid, STOPPED))
        return Standstill(age, at.typical, at.allowed, at.waits_for, counts, stopped)

    def copies(self) -> CopyFigures:
        return self.last_copies if self.page is None else self.page.read_copies()

    def pace(self) -> PaceFigures | None:
        """None: it has ended, or nothing is known."""
        pace = None if self.page is None else self.page.read_pace()
        return pace if pace is not None and pace.compute > 0 and math.isfinite(pace.compute) else None

    def _progress(self) -> Progress:
        return self.last if self.page is None else self.page.read()

    def hang_up(self, loop: PollLoop) -> None:
        """A parked process or a store host that hears this ends itself."""
        if self.control is not None:
            loop.forget(self.control.fileno())
            self.control.close()
            self.control = None

    def ended(self, loop: PollLoop, code: int) -> None:
        """Its exit code has been collected: the pid may belong to anybody from now on."""
        self.code = code
        if self.pidfd >= 0:
            loop.forget(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1
        if self.popen is not None:
            self.popen.returncode = code  # collected here, so that nobody waits for it again

    def close(self, loop: PollLoop) -> None:
        self.hang_up(loop)
        if self.pidfd >= 0:
            loop.forget(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1
        for descriptor in self.output:
            os.close(descriptor)
        self.output = ()
        if self.page is not None:
            self.last, self.last_copies = self.page.read(), self.page.read_copies()
            self.page.close()
            os.close(self.page_fd)
            self.page = None
