"""The user's terminal: workers' lines as they come from the bus, and our own lines between them, each whole.

Threads: one, `Console._run`. Its one job is to write: a terminal that stands still (Ctrl-S, a full pipe) stops this
thread and nothing else; the workers then block on their pipes, as with `cat`, when the queues between are full.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from phoenix_launch.messages import FromOutput, Generation, OutputChunk, OutputEnd

StreamKey = tuple[int, Generation, int]  # rank, generation, stream
_STDOUT, _STDERR = 1, 2


def with_prefix(data: bytes, prefix: str) -> bytes:
    """Each line of `data` (whole lines) with the prefix before it."""
    if not prefix:
        return data
    head = prefix.encode()
    return b"".join(head + line + b"\n" for line in data.removesuffix(b"\n").split(b"\n"))


@dataclass
class Console:
    """Owns the output socket of the bus from `start` on. `labels`: put `node:rank| ` before workers' lines."""

    socket: zmq.Socket[bytes]
    decode: Callable[[bytes], FromOutput | None]
    labels: bool
    out: int = _STDOUT
    err: int = _STDERR
    ended: set[StreamKey] = field(default_factory=set)  # written by the thread, read by anybody
    _own: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    _broken: set[int] = field(default_factory=set)

    def start(self) -> None:
        self._bell_in, self._bell_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """One or more lines of our own, on stderr."""
        self._own.put(text if text.endswith("\n") else text + "\n")
        self._ring()

    def wait_for(self, streams: set[StreamKey], seconds: float) -> bool:
        """Wait until everything that these streams carried is written; False when that takes longer."""
        with self.changed:
            return self.changed.wait_for(lambda: streams <= self.ended, seconds)

    def finish(self, seconds: float) -> None:
        """Write what is still there and end; a terminal that stands still is given up after `seconds`."""
        self._own.put(None)
        self._ring()
        self._thread.join(seconds)
        if not self._thread.is_alive():
            os.close(self._bell_in)
            os.close(self._bell_out)

    def _ring(self) -> None:
        try:
            os.write(self._bell_out, b"!")
        except BlockingIOError:
            return  # it rings already

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._bell_in, zmq.POLLIN)
        going = True
        while going:
            poller.poll()
            try:
                os.read(self._bell_in, 4096)
            except BlockingIOError:
                pass  # it was the socket
            self._take_output()
            going = self._take_own()
        self._take_output()
        self.socket.close(0)

    def _take_output(self) -> None:
        while True:
            try:
                message = self.decode(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            match message:
                case OutputChunk():
                    self._write_chunk(message)
                case OutputEnd():
                    with self.changed:
                        self.ended.add((message.rank, message.generation, message.stream))
                        self.changed.notify_all()

    def _write_chunk(self, chunk: OutputChunk) -> None:
        prefix = chunk.prefix
        if not prefix and self.labels:
            prefix = f"{chunk.node}:{chunk.rank}| "
        self._write(self.err if chunk.stream == _STDERR else self.out, with_prefix(chunk.data, prefix))

    def _take_own(self) -> bool:
        while True:
            try:
                text = self._own.get_nowait()
            except queue.Empty:
                return True
            if text is None:
                return False
            self._write(self.err, text.encode(errors="replace"))

    def _write(self, descriptor: int, data: bytes) -> None:
        """Whoever read our output may be gone (`| head`): the job goes on, its logs are complete."""
        if descriptor in self._broken:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError:
            self._broken.add(descriptor)
