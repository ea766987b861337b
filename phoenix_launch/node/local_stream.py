"""Framed messages (`channel.py`) over a socket that never holds up the agent's loop, however its other end behaves."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Final

import msgspec

from phoenix_launch.errors import ProtocolError
from phoenix_launch.local_messages import NodeLocal, decode_local
from phoenix_launch.node.poll_loop import PollLoop
from phoenix_launch.wire import MAX_MESSAGE_BYTES, encode

_HEADER: Final = struct.Struct("!I")
_PIECE_BYTES: Final = 1 << 16
_PIECES_A_TURN: Final = 64  # then others have their turn: who floods us must not have us to itself


class LocalStream:
    """One connection. Callbacks run in the loop's thread: `on_message` for each, `on_end` once, when the stream has ended.

    What is sent is the whole of what there is to say each time: of messages that wait because the other end does not read, the
    newest replaces the others. So a process that is stopped costs one message's memory, and hears what counts
    when it goes on.
    """

    def __init__(
        self,
        loop: PollLoop,
        sock: socket.socket,
        on_message: Callable[[NodeLocal], None],
        on_end: Callable[[str], None],
    ) -> None:
        """`on_end` gets what was wrong with a message, empty when the other end is gone.

        Descriptors that come along are dropped.
        """
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._on_message = on_message
        self._on_end = on_end
        self._heard = bytearray()
        self._sending = memoryview(b"")  # what is left of the frame that is on its way
        self._next = b""
        self._stuck = False  # the other end does not read
        self._closed = False
        loop.watch(sock.fileno(), self._ready)

    @property
    def closed(self) -> bool:
        return self._closed

    def say(self, message: msgspec.Struct) -> None:
        if self._closed:
            return
        data = encode(message)
        self._next = _HEADER.pack(len(data)) + data
        self._write()

    def read(self) -> None:
        """Take in what has arrived. The loop does it by itself; a process that has just ended may have left something."""
        for _ in range(_PIECES_A_TURN):
            if self._closed:
                return
            try:
                part = self._sock.recv(_PIECE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            if not part:  # in the middle of a message or not: it was killed, say
                self._end("")
                return
            self._heard += part
            self._take()

    def close(self) -> None:
        """Without a word; `on_end` is not called."""
        if not self._closed:
            self._closed = True
            self._loop.forget(self._sock.fileno())
            self._sock.close()

    def _ready(self) -> None:
        self._write()
        self.read()

    def _take(self) -> None:
        start = 0
        while not self._closed and len(self._heard) - start >= _HEADER.size:
            length = _HEADER.unpack_from(self._heard, start)[0]
            if length > MAX_MESSAGE_BYTES:
                self._end(f"a frame of {length} bytes on a local socket")
                return
            end = start + _HEADER.size + length
            if len(self._heard) < end:
                break
            try:
                message = decode_local(bytes(self._heard[start + _HEADER.size : end]))
            except ProtocolError as error:
                self._end(error.message)
                return
            start = end
            self._on_message(message)
        del self._heard[:start]

    def _write(self) -> None:
        while not self._closed and (self._sending or self._next):
            if not self._sending:
                self._sending, self._next = memoryview(self._next), b""
            try:
                sent = self._sock.send(self._sending)
            except BlockingIOError:
                self._wait_to_write(True)
                return
            except OSError:
                self.read()  # its last words may still be there
                self._end("")
                return
            self._sending = self._sending[sent:]
        self._wait_to_write(False)

    def _wait_to_write(self, wait: bool) -> None:
        if wait != self._stuck and not self._closed:
            self._stuck = wait
            self._loop.watch(self._sock.fileno(), self._ready, writable=wait)

    def _end(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._on_end(reason)
