"""The pipes that the output pump reads: what belongs to each, which of them are read now, and how long to wait."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from phoenix_launch.node.lines import CHUNK_BYTES, LineAssembler
from phoenix_launch.node.log_files import Disk, LogFile
from phoenix_launch.node.routes import Label, Route
from phoenix_launch.output_messages import FromOutput

READ_BYTES: Final = CHUNK_BYTES
BATCH_SECONDS: Final = 0.005  # the longest pause after a read; it saves a wakeup per line and grows from none ...
FIRST_PAUSE: Final = 0.0005  # ... over this, doubling, whenever a read finds a pipe half full
BLOCKED_SECONDS: Final = 0.01  # between two attempts to hand on what a slow console did not take
IDLE_SECONDS: Final = 5.0  # the longest wait; the doorbell ends it


@dataclass(frozen=True, slots=True)
class StreamFiles:
    """What all files of a node share: the health of their folders and the size at which logs are rotated."""

    log_disk: Disk
    copy_disk: Disk
    size_limit: int


@dataclass(eq=False, slots=True)
class Stream:
    """One pipe of one process. `label` is the agent's word, the rest belongs to the pump's thread."""

    fd: int
    number: int  # STDOUT or STDERR
    label: Label
    applied: Label | None = None  # the label that `route` and the files were made from
    route: Route = field(default_factory=lambda: Route(log=None))
    log: LogFile | None = None
    copy: LogFile | None = None
    filtered: LogFile | None = None
    assembler: LineAssembler = field(default_factory=LineAssembler)
    outbox: deque[FromOutput] = field(default_factory=deque)
    tail: bytes = b""
    ended: bool = False  # nothing more is read
    done: bool = False  # and everything was handed on
    abandoned: bool = False

    def open_route(self, label: Label, where: Route, files: StreamFiles, now: float) -> None:
        """From now on the stream is this process's."""
        self.close_files()
        self.applied, self.route = label, where
        self.log = LogFile(where.log, files.log_disk, files.size_limit) if where.log else None
        self.copy = LogFile(where.copy, files.copy_disk) if where.copy else None
        self.filtered = LogFile(where.filtered, files.copy_disk) if where.filtered else None
        for file in (self.copy, self.filtered):
            if file is not None:  # as torchrun: asked for by name, so they are there even when empty
                file.create(now)

    def keep(self, data: bytes, now: float) -> None:
        """Write the bytes to the files, as they came."""
        for file in (self.log, self.copy):
            if file is not None:
                file.write(data, now)

    def close_files(self) -> None:
        for file in (self.log, self.copy, self.filtered):
            if file is not None:
                file.close()


class ReadingLoop:
    """Which streams there are, which of them are read, and how long to wait."""

    def __init__(self, doorbell: int) -> None:
        self.streams: set[Stream] = set()
        self.blocked = False
        self._reading: set[Stream] = set()
        self._doorbell = doorbell
        self._selector = selectors.DefaultSelector()
        self._selector.register(doorbell, selectors.EVENT_READ)
        self._pause = select.poll()
        self._pause.register(doorbell, select.POLLIN)
        self._read_at = 0.0
        self._pause_seconds = BATCH_SECONDS
        self._most = 0  # the biggest read of this round

    def add(self, stream: Stream) -> None:
        self.streams.add(stream)
        self.read_from(stream, True)

    def read_from(self, stream: Stream, wanted: bool) -> None:
        if wanted and stream not in self._reading:
            self._selector.register(stream.fd, selectors.EVENT_READ, stream)
            self._reading.add(stream)
        elif not wanted and stream in self._reading:
            self._selector.unregister(stream.fd)
            self._reading.discard(stream)

    def have_read(self, count: int, now: float) -> None:
        self._read_at = now
        self._most = max(self._most, count)

    def due(self, now: float) -> list[Stream]:
        """Streams with a progress bar to show."""
        return [s for s in self.streams if s.assembler.due is not None and now >= s.assembler.due]

    def wait(self, close_at: float | None) -> list[Stream]:
        """Streams that can be read; returns early when the doorbell rings."""
        if self._most > READ_BYTES // 2:
            self._pause_seconds = 0.0
        elif self._most:
            self._pause_seconds = min(BATCH_SECONDS, self._pause_seconds * 2 or FIRST_PAUSE)
        self._most = 0
        now = time.monotonic()
        rest = self._read_at + self._pause_seconds - now
        if rest > 0:
            self._pause.poll(rest * 1000)
            now = time.monotonic()
        times = [now + IDLE_SECONDS]
        if self.blocked:
            times.append(now + BLOCKED_SECONDS)
        if close_at is not None:
            times.append(close_at)
        times += [s.assembler.due for s in self.streams if s.assembler.due is not None]
        ready = []
        for key, _ in self._selector.select(max(0.0, min(times) - now)):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._doorbell)
            else:
                ready.append(key.data)
        return ready

    def close(self) -> None:
        self._selector.close()
