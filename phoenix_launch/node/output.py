"""The output pump: carries what a node's processes write to their files and to the supervisor's console.

Threads: one, `OutputPump._run`; its job is to read the pipes, write the files and talk to the sender. Public methods
are called by the agent's thread and only leave notes for it under the lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from phoenix_launch.bootstrap import OutputSettings
from phoenix_launch.node.lines import chunks, last_lines, matching, prefixed
from phoenix_launch.node.log_files import Disk
from phoenix_launch.node.routes import STDERR, STDOUT, Label, SpareLabel, WorkerLabel, route
from phoenix_launch.node.streams import READ_BYTES, ReadingLoop, Stream, StreamFiles
from phoenix_launch.output_messages import FromOutput, OutputChunk, OutputEnd

__all__ = ["OutputPump", "Sender", "SpareLabel", "WorkerLabel"]

TAIL_BYTES: Final = 8 << 10
LEFTOVER_READS: Final = 16  # how much of an abandoned pipe is still read, in reads
JOIN_SECONDS: Final = 2.0  # what the thread may take beyond the time `close` grants


class Sender(Protocol):
    """The end of the way to the console; used by the pump's thread only."""

    def send(self, body: FromOutput, timeout: float) -> bool:
        """False when it could not be taken within `timeout` seconds."""

    def close(self) -> None: ...


class OutputPump:
    """Owns the read ends of the output pipes of a node's processes.

    A console that is slow makes the pump stop reading the pipes that have something for it, so that their writers wait
    as they would for `cat`; nothing is lost while the supervisor lives. `remark` is called from the pump's thread.
    """

    def __init__(
        self,
        settings: OutputSettings,
        node: str,
        job: str,
        connect: Callable[[], Sender],
        remark: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._node = node
        self._connect = connect
        self._files = StreamFiles(
            Disk(Path(settings.folder), remark), Disk(Path(settings.torchrun_folder), remark), settings.size_limit
        )
        self._lock = threading.Lock()
        self._streams: dict[int, tuple[Stream, ...]] = {}
        self._fresh: list[Stream] = []
        self._close_at: float | None = None
        self._doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"output of {job}", daemon=True)
        self._thread.start()

    # --- the agent's side --------------------------------------------------------------------------------------------

    def attach(self, key: int, stdout_fd: int, stderr_fd: int, label: Label) -> None:
        """Take over the read ends of a process's output. `key` is the agent's name for it, used once."""
        pair = (Stream(stdout_fd, STDOUT, label), Stream(stderr_fd, STDERR, label))
        for stream in pair:
            os.set_blocking(stream.fd, False)
            os.set_inheritable(stream.fd, False)
        with self._lock:
            if self._closed:
                os.close(stdout_fd)
                os.close(stderr_fd)
                return
            self._streams[key] = pair
            self._fresh += pair
            self._ring()

    def relabel(self, key: int, label: Label) -> None:
        """The process is now this one: whatever it writes after this call goes there."""
        with self._lock:
            for stream in self._streams.get(key, ()):
                stream.label = label

    def tail(self, key: int) -> str:
        """The last lines of its stderr read so far, at most 8 KiB."""
        with self._lock:
            pair = self._streams.get(key)
            return last_lines(pair[1].tail, TAIL_BYTES) if pair else ""

    def finished(self, key: int) -> bool:
        """Whether both streams are at their end and everything has been handed on."""
        with self._lock:
            return self._closed or all(stream.done for stream in self._streams.get(key, ()))

    def abandon(self, key: int) -> None:
        """Read what is there and no more: something else holds the pipe open."""
        with self._lock:
            for stream in self._streams.get(key, ()):
                stream.abandoned = True
            self._ring()

    def forget(self, key: int) -> None:
        """The agent will not ask for it again."""
        with self._lock:
            self._streams.pop(key, None)

    def close(self, seconds: float) -> None:
        """Hand on what there is within `seconds`, then drop the rest (the files have it) and end the thread."""
        with self._lock:
            if not self._closed:
                self._close_at = time.monotonic() + seconds
                self._ring()
        self._thread.join(seconds + JOIN_SECONDS)

    def _ring(self) -> None:
        if not self._closed:
            os.eventfd_write(self._doorbell, 1)

    # --- the pump's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        loop = ReadingLoop(self._doorbell)
        try:
            with contextlib.closing(self._connect()) as sender:
                while not self._round(loop, sender):
                    pass
        finally:
            with self._lock:
                self._closed = True
                left = [*loop.streams, *self._fresh]
            for stream in left:
                self._shut(loop, stream)
            loop.close()
            os.close(self._doorbell)

    def _round(self, loop: ReadingLoop, sender: Sender) -> bool:
        """Read each pipe that has something once; True when the pump was closed and is done."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
            close_at = self._close_at
        for stream in fresh:
            loop.add(stream)
            self._bind(stream, time.monotonic())
        expired = close_at is not None and time.monotonic() >= close_at
        for stream in [s for s in loop.streams if not s.ended and (s.abandoned or expired)]:
            self._drain(loop, stream)
        self._flush(loop, sender)
        if expired or (close_at is not None and not loop.streams):
            return True
        for stream in loop.wait(close_at):
            self._read(loop, stream)
        now = time.monotonic()
        for stream in loop.due(now):
            self._lines(stream, stream.assembler.tick(now), now)
        return False

    def _read(self, loop: ReadingLoop, stream: Stream) -> int:
        """One read; the number of bytes, 0 when nothing is there or the stream has ended."""
        with self._lock:  # with the label, so that a process's first words as a worker never go to the spare's file
            label = stream.label
            try:
                data = os.read(stream.fd, READ_BYTES)
            except BlockingIOError:
                return 0
            except OSError:
                data = b""
            if stream.number == STDERR and data:
                stream.tail = (stream.tail + data)[-2 * TAIL_BYTES :]
        now = time.monotonic()
        if label is not stream.applied:
            self._bind(stream, now)
        if not data:
            self._end(loop, stream, now)
            return 0
        loop.have_read(len(data), now)
        stream.keep(data, now)
        if stream.route.console or stream.filtered is not None:
            self._lines(stream, stream.assembler.feed(data, now), now)
        return len(data)

    def _drain(self, loop: ReadingLoop, stream: Stream) -> None:
        for _ in range(LEFTOVER_READS):
            if not self._read(loop, stream):
                break
        if not stream.ended:
            self._end(loop, stream, time.monotonic())

    def _bind(self, stream: Stream, now: float) -> None:
        """Make route and files fit the label; an unfinished line still belongs to the old one."""
        with self._lock:
            label = stream.label
        self._lines(stream, stream.assembler.finish(), now)
        stream.open_route(label, route(self._settings, label, stream.number), self._files, now)

    def _lines(self, stream: Stream, lines: bytes, now: float) -> None:
        """Whole lines on their way to the console and to the filtered copy."""
        if not lines:
            return
        where, label = stream.route, stream.applied
        if stream.filtered is not None:
            chosen = prefixed(matching(lines, where.needles), where.prefix.encode())
            if chosen:
                stream.filtered.write(chosen, now)
        if where.console and isinstance(label, WorkerLabel):
            for piece in chunks(lines):
                stream.outbox.append(
                    OutputChunk(self._node, label.rank, label.generation, stream.number, piece, where.prefix)
                )

    def _end(self, loop: ReadingLoop, stream: Stream, now: float) -> None:
        if stream.label is not stream.applied:
            self._bind(stream, now)
        self._lines(stream, stream.assembler.finish(), now)
        label = stream.applied
        if isinstance(label, WorkerLabel):
            stream.outbox.append(OutputEnd(self._node, label.rank, label.generation, stream.number))
        self._shut(loop, stream)
        stream.ended = True

    def _flush(self, loop: ReadingLoop, sender: Sender) -> None:
        """Hand on what the console takes; a stream with something left is not read."""
        for stream in list(loop.streams):
            while stream.outbox and sender.send(stream.outbox[0], 0.0):
                stream.outbox.popleft()
            if stream.ended and not stream.outbox:
                loop.streams.discard(stream)
                stream.done = True
            elif not stream.ended:
                loop.read_from(stream, not stream.outbox)
        loop.blocked = any(stream.outbox for stream in loop.streams)

    def _shut(self, loop: ReadingLoop, stream: Stream) -> None:
        loop.read_from(stream, False)
        stream.close_files()
        if stream.fd >= 0:
            os.close(stream.fd)
            stream.fd = -1
