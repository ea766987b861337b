"""The user's terminal: workers' lines as they come from the bus, and our own lines between them, each whole.

Threads: one, `Console._run`. Its one job is to write: a terminal that stands still (Ctrl-S, a full pipe) stops this
thread and nothing else; the workers then block on their pipes, as with `cat`, when the queues between are full.
"""

from __future__ import annotations

import errno
import os
import queue
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import zmq

from phoenix_launch.job.last_output import StreamKey
from phoenix_launch.output_messages import FromOutput, OutputChunk, OutputEnd
from phoenix_launch.wire import NO_GENERATION, Generation

_STDOUT, _STDERR = 1, 2
KEPT: Final = 16 << 10  # bytes of what was shown last; a worker's last words are no longer
TURN: Final = 32  # messages that are shown before our own lines get their turn
END_SECONDS: Final = 1.0  # for the thread to end once a terminal was given up
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def with_prefix(data: bytes, prefix: str) -> bytes:
    """Each line of `data` (whole lines) with the prefix before it."""
    if not prefix:
        return data
    head = prefix.encode()
    return b"".join(head + line + b"\n" for line in data.removesuffix(b"\n").split(b"\n"))


@dataclass(frozen=True, slots=True)
class LastShown:
    """What one worker wrote to stderr, as far as no other has written to the same screen since."""

    writer: tuple[int, Generation]  # its rank
    data: bytes

    def followed_by(self, writer: tuple[int, Generation], data: bytes) -> LastShown:
        return LastShown(writer, (self.data + data if writer == self.writer else data)[-KEPT:])

    def of(self, rank: int, generation: Generation) -> str:
        return self.data.decode(errors="replace") if self.writer == (rank, generation) else ""


NOTHING_SHOWN: Final = LastShown((-1, NO_GENERATION), b"")


@dataclass
class Console:
    """Owns the output socket of the bus from `start` on. `labels`: put `node:rank| ` before workers' lines."""

    socket: zmq.Socket[bytes]
    decode: Callable[[bytes], FromOutput | None]
    labels: bool
    out: int = _STDOUT
    err: int = _STDERR
    ended: dict[StreamKey, None] = field(default_factory=dict)  # shown to the end; the thread adds, anybody looks
    written: int = 0  # bytes, the same
    stuck: bool = False  # nothing more can be written at the moment, the same
    last: LastShown = NOTHING_SHOWN  # the same
    _own: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    _broken: set[int] = field(default_factory=set)
    _full: set[int] = field(default_factory=set)  # descriptors whose disk took the last write not, or not whole
    _said_full: set[int] = field(default_factory=set)
    _going: bool = True
    _give_up: bool = False

    def start(self) -> None:
        self._bell_in, self._bell_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._apart = _distinct(self.out, self.err)
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """One or more lines of our own, on stderr."""
        self._own.put(text if text.endswith("\n") else text + "\n")
        self._ring()

    def finish(self, seconds: float) -> None:
        """Write what is still there and end; a terminal that stands still is given up after `seconds`."""
        self._own.put(None)
        self._ring()
        self._thread.join(seconds)
        self._give_up = True
        self._ring()
        self._thread.join(END_SECONDS)
        if not self._thread.is_alive():
            os.close(self._bell_in)
            os.close(self._bell_out)

    def _ring(self) -> None:
        try:
            os.write(self._bell_out, b"!")
        except BlockingIOError:
            return  # it rings already

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._bell_in, zmq.POLLIN)
        while self._going:
            poller.poll()
            self._take_output(TURN)
            self._take_own()
        while self._take_output(TURN):
            pass
        self.socket.close(0)

    def _take_output(self, most: int) -> bool:
        """Show up to `most` messages; False when there was none left."""
        for _ in range(most):
            try:
                message = self.decode(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return False
            match message:
                case OutputChunk():
                    self._write_chunk(message)
                case OutputEnd():
                    self.ended[message.rank, message.generation, message.stream] = None
        return True

    def _write_chunk(self, chunk: OutputChunk) -> None:
        prefix = chunk.prefix
        if not prefix and self.labels:
            prefix = f"{chunk.node}:{chunk.rank}| "
        self._write(self.err if chunk.stream == _STDERR else self.out, with_prefix(chunk.data, prefix))
        if chunk.stream == _STDERR and self.err not in self._broken:
            self.last = self.last.followed_by((chunk.rank, chunk.generation), chunk.data)
        elif not self._apart and self.last is not NOTHING_SHOWN:
            self.last = NOTHING_SHOWN

    def _take_own(self) -> None:
        self._hush()
        while True:
            try:
                text = self._own.get_nowait()
            except queue.Empty:
                return
            if text is None:
                self._going = False
            else:
                self._write(self.err, text.encode(errors="replace"))

    def _write(self, descriptor: int, data: bytes) -> None:
        """Whoever read our output may be gone (`| head`): the job goes on, its logs are complete."""
        view = memoryview(b"\n" + data if descriptor in self._full else data)
        while view and descriptor not in self._broken and self._wait_writable(descriptor):
            try:
                count = os.write(descriptor, view[: select.PIPE_BUF])  # what fits wherever there is room
            except BlockingIOError:
                continue  # whoever gave it to us made it so
            except OSError as error:
                self._failed(descriptor, error)
                return
            self._full.discard(descriptor)
            self.written += count
            view = view[count:]

    def _failed(self, descriptor: int, error: OSError) -> None:
        if error.errno not in _DISK_FULL:
            self._broken.add(descriptor)
            return
        self._full.add(descriptor)
        if descriptor not in self._said_full and descriptor != self.err:
            self._said_full.add(descriptor)
            text = f"phoenix-run: stdout cannot be written ({error.strerror}): what is lost there stands in the logs\n"
            self._write(self.err, text.encode())

    def _wait_writable(self, descriptor: int) -> bool:
        """False when it was given up. What we say ourselves does not wait for a reader of the workers' lines."""
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if poll.poll(0):
            return True
        poll.register(self._bell_in, select.POLLIN)
        self.stuck = True
        while not self._give_up:
            if any(ready == descriptor for ready, _ in poll.poll()):
                self.stuck = False
                return True
            if self._apart and descriptor == self.out:
                self._take_own()
            else:
                self._hush()  # our own lines have their turn right after this one
        self.stuck = False
        self._broken.add(descriptor)
        return False

    def _hush(self) -> None:
        try:
            os.read(self._bell_in, 4096)
        except BlockingIOError:
            return  # it did not ring


def _distinct(one: int, other: int) -> bool:
    """Whether lines of one can never stand within lines of the other."""
    try:
        first, second = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return (first.st_dev, first.st_ino) != (second.st_dev, second.st_ino)
