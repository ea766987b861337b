"""A connection between the checkpoint servers of two nodes: both prove that they know the job's key, then frames and bytes.

    caller -> host    greeting, the caller's node and generation, a nonce
    host -> caller    a nonce, and the host's proof: keyed BLAKE2 over role, job, what the caller said, both nonces
    caller -> host    the caller's proof

Each frame carries a tag under a key that is made from both nonces, over its direction and number: nothing can be replayed,
left out or brought in. Before the proofs no more is read than their fixed sizes, and nothing is allocated. Payloads are not
tagged: what they are is said by tagged frames around them (`replication.py`). With --encrypt all of it runs within TLS
(`cipher.py`), and the proofs are over that connection, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from phoenix_launch.checkpoint import cipher
from phoenix_launch.checkpoint.pace import Pace
from phoenix_launch.errors import ProtocolError
from phoenix_launch.wire import Generation

_GREETING: Final = b"phoenix-slots-1\n"
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_TAG_BYTES: Final = 16
_CALLER: Final = struct.Struct("!iqq")  # node, term, n
_LENGTH: Final = struct.Struct("!I")
_SEQUENCE: Final = struct.Struct("!cQ")
MAX_FRAME_BYTES: Final = 64 << 10
PIECE_BYTES: Final = 1 << 20  # of a payload at a time; each has the whole patience


@dataclass(frozen=True, slots=True)
class Identity:
    """Who calls or is called: the job with its secret key, the node, and the newest generation it knows of."""

    job: str
    key: bytes  # at most 64 bytes
    node: int
    generation: Generation
    encrypt: bool = False


class Memory(Protocol):
    """What is sent from: a file, and the same bytes mapped."""

    descriptor: int
    view: memoryview


class Onward(Protocol):
    """What a payload is handed on to."""

    def write(self, data: memoryview) -> None: ...

    def take(self, descriptor: int, count: int) -> int:
        """Move some of what has come there, at most so many bytes; 0: nothing will come any more."""


class PeerLink:
    """One authenticated connection. `node` and `generation` are those of the caller.

    `patience`: seconds in which each frame, and each piece of a payload, has to make its way. All methods raise OSError
    (TimeoutError among them) when the other end breaks off, and ProtocolError for what it may not send.
    """

    def __init__(
        self, sock: socket.socket, key: bytes, *, calling: bool, node: int, generation: Generation, patience: float
    ) -> None:
        self.node = node
        self.generation = generation
        self.patience = patience
        self._sock = sock
        self._key = key
        self._directions = (b"c", b"h") if calling else (b"h", b"c")  # of what is sent, of what is received
        self._sent = self._received = 0
        self._shut = threading.Event()

    def send(self, body: bytes) -> None:
        tag = self._tag(self._directions[0], self._sent, body)
        self._sent += 1
        _send(self._sock, _LENGTH.pack(len(body)) + body + tag, self.patience)

    def receive(self) -> bytes:
        deadline = time.monotonic() + self.patience
        length = _LENGTH.unpack(_exactly(self._sock, _LENGTH.size, deadline))[0]
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {length} bytes between checkpoint servers")
        body = _exactly(self._sock, length, deadline)
        tag = _exactly(self._sock, _TAG_BYTES, deadline)
        if not hmac.compare_digest(tag, self._tag(self._directions[1], self._received, body)):
            raise ProtocolError("a frame between checkpoint servers was changed on its way")
        self._received += 1
        return body

    def send_long(self, data: bytes) -> None:
        """As many frames as it takes; the other end has `receive_long`."""
        for start in range(0, max(1, len(data)), MAX_FRAME_BYTES - 1):
            piece = data[start : start + MAX_FRAME_BYTES - 1]
            self.send((b"." if start + len(piece) == len(data) else b",") + piece)

    def receive_long(self, limit: int) -> bytes:
        """Raises ProtocolError for more bytes than `limit`."""
        parts = bytearray()
        while len(parts) <= limit:
            frame = self.receive()
            parts += frame[1:]
            if frame[:1] == b".":
                return bytes(parts)
        raise ProtocolError(f"more than {limit} bytes at once")

    def send_from(self, memory: Memory, start: int, end: int, pace: Pace | None = None) -> None:
        """Straight from the page cache, without a copy in this process; but where it is enciphered."""
        enciphered = isinstance(self._sock, ssl.SSLSocket)
        while start < end:
            count = min(PIECE_BYTES, end - start)
            if enciphered:
                _send(self._sock, memory.view[start : start + count], self.patience)
                sent = count
            else:
                _await(self._sock, select.POLLOUT, self.patience)
                try:
                    sent = os.sendfile(self._sock.fileno(), memory.descriptor, start, count)
                except BlockingIOError:
                    continue
                if not sent:
                    raise ConnectionResetError("a slot ended in the middle")
            start += sent
            if pace is not None and self._shut.wait(pace.sent(sent)):
                raise ConnectionAbortedError("the connection is not wanted any more")

    def receive_into(self, memory: memoryview) -> Iterator[memoryview]:
        """Fill the memory; gives each piece as soon as it is there, at most PIECE_BYTES."""
        start = 0
        while start < len(memory):
            piece = memory[start : start + PIECE_BYTES]
            filled = 0
            deadline = time.monotonic() + self.patience
            while filled < len(piece):
                with _patiently(self._sock, select.POLLIN, deadline):
                    got = self._sock.recv_into(piece[filled:])
                    if not got:
                        raise ConnectionResetError("the other checkpoint server closed the connection")
                    filled += got
                    deadline = time.monotonic() + self.patience
            yield piece
            start += len(piece)

    def pass_on(self, count: int, onward: Onward) -> None:
        """So many bytes, without a copy in this process; but where they are enciphered. They may lie in memory of the sender's
        until they are read at the other end."""
        if isinstance(self._sock, ssl.SSLSocket):
            memory = memoryview(bytearray(min(PIECE_BYTES, count)))
            for start in range(0, count, PIECE_BYTES):
                for piece in self.receive_into(memory[: count - start]):
                    onward.write(piece)
            return
        while count:
            _await(self._sock, select.POLLIN, self.patience)
            taken = onward.take(self._sock.fileno(), min(PIECE_BYTES, count))
            if not taken:
                raise ConnectionResetError("the other checkpoint server closed the connection")
            count -= taken

    def digest(self, memory: memoryview) -> bytes:
        """What proves to the other end that these bytes are the sender's."""
        return hashlib.blake2b(memory, key=self._key, digest_size=_PROOF_BYTES).digest()

    def shut(self) -> None:
        """From another thread: whoever waits here sees at once that it is over."""
        self._shut.set()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # an SSLSocket's own would have it go on in the clear

    def close(self) -> None:
        self._sock.close()

    def _tag(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hashlib.blake2b(_SEQUENCE.pack(direction, number) + body, key=self._key, digest_size=_TAG_BYTES).digest()


def call(address: str, port: int, identity: Identity, handshake: float, patience: float) -> PeerLink:
    """Raises OSError when nobody answers in time, ProtocolError when who answers is not of this job."""
    return introduce(socket.create_connection((address, port), timeout=handshake), identity, handshake, patience)


def introduce(sock: socket.socket, identity: Identity, handshake: float, patience: float) -> PeerLink:
    """The same over a connection that there is already. It is closed when this raises."""
    deadline = time.monotonic() + handshake
    try:
        sock, bound = _prepare(sock, identity, handshake, calling=True)
        generation = identity.generation
        said = _CALLER.pack(identity.node, generation.term, generation.n) + secrets.token_bytes(_NONCE_BYTES)
        _send(sock, _GREETING + said, handshake)
        answer = _exactly(sock, _NONCE_BYTES + _PROOF_BYTES, deadline)
        said += answer[:_NONCE_BYTES] + bound
        if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(identity, b"host", said)):
            raise ProtocolError("what answers there does not know the job's key")
        _send(sock, _proof(identity, b"caller", said), handshake)
    except BaseException:
        sock.close()
        raise
    key = _proof(identity, b"frames", said)
    return PeerLink(sock, key, calling=True, node=identity.node, generation=generation, patience=patience)


def answer(sock: socket.socket, identity: Identity, handshake: float, patience: float) -> PeerLink:
    """The other end of `call`, with the same errors. The socket is closed when there is one."""
    deadline = time.monotonic() + handshake
    try:
        sock, bound = _prepare(sock, identity, handshake, calling=False)
        if _exactly(sock, len(_GREETING), deadline) != _GREETING:
            raise ProtocolError("somebody who is no checkpoint server called")
        said = _exactly(sock, _CALLER.size + _NONCE_BYTES, deadline)
        node, term, n = _CALLER.unpack(said[: _CALLER.size])
        nonce = secrets.token_bytes(_NONCE_BYTES)
        said += nonce + bound
        _send(sock, nonce + _proof(identity, b"host", said), handshake)
        if not hmac.compare_digest(_exactly(sock, _PROOF_BYTES, deadline), _proof(identity, b"caller", said)):
            raise ProtocolError("somebody who does not know the job's key called")
    except BaseException:
        sock.close()
        raise
    key = _proof(identity, b"frames", said)
    return PeerLink(sock, key, calling=False, node=node, generation=Generation(term, n), patience=patience)


def _proof(identity: Identity, role: bytes, said: bytes) -> bytes:
    text = role + b"\0" + identity.job.encode() + b"\0" + said
    return hashlib.blake2b(text, key=identity.key, digest_size=_PROOF_BYTES).digest()


def _prepare(sock: socket.socket, identity: Identity, seconds: float, *, calling: bool) -> tuple[socket.socket, bytes]:
    """The socket to go on with, and what is unique to an enciphered connection."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bound = b""
    if identity.encrypt:
        sock, bound = cipher.wrapped(sock, calling=calling, seconds=seconds)
    sock.setblocking(False)
    return sock, bound


def _await(sock: socket.socket, event: int, seconds: float) -> None:
    poll = select.poll()
    poll.register(sock, event)
    if not poll.poll(max(0.0, seconds) * 1000):
        raise TimeoutError("the other checkpoint server stands still")


@contextlib.contextmanager
def _patiently(sock: socket.socket, event: int, deadline: float) -> Iterator[None]:
    """What it wraps is tried at once (TLS may have bytes that poll knows nothing of), and again when the socket is ready."""
    try:
        yield
    except ssl.SSLWantReadError:
        event = select.POLLIN
    except ssl.SSLWantWriteError:
        event = select.POLLOUT
    except BlockingIOError:
        pass
    except ssl.SSLEOFError:
        raise ConnectionResetError("the other checkpoint server closed the connection") from None
    else:
        return
    _await(sock, event, deadline - time.monotonic())


def _send(sock: socket.socket, data: bytes | memoryview, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    left = memoryview(data)
    while left:
        with _patiently(sock, select.POLLOUT, deadline):
            left = left[sock.send(left) :]


def _exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        with _patiently(sock, select.POLLIN, deadline):
            part = sock.recv(count - len(parts))
            if not part:
                raise ConnectionResetError("the other checkpoint server closed the connection")
            parts += part
    return bytes(parts)
