"""Dial-backs: an agent answers on its probe port with its name, and dials those of its neighbours."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from phoenix_launch.messages import PeerProbe
from phoenix_launch.node.poll_loop import PollLoop

_BACKLOG: Final = 256
_GREETING_BYTES: Final = 1024


class ProbeListener:
    """Says "phoenix JOB NODE" to whoever connects, and hands the caller on."""

    def __init__(
        self,
        loop: PollLoop,
        address: str,
        ports: tuple[int, int],
        job: str,
        node: str,
        receive: Callable[[socket.socket], None] = socket.socket.close,
    ) -> None:
        """On `address`, on one of `ports` (low, high) or any when they are 0. Raises OSError. `receive`: a caller who was
        greeted is its own from then on."""
        self._loop = loop
        self._receive = receive
        self._greeting = greeting(job, node)
        self._socket = _listen(address, ports)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        loop.watch(self._socket.fileno(), self._answer)

    def _answer(self) -> None:
        try:
            while True:
                caller, _ = self._socket.accept()
                try:
                    caller.setblocking(False)
                    caller.send(self._greeting)
                except OSError:
                    caller.close()
                    raise
                self._receive(caller)
        except OSError:  # nobody left to accept, or one that went away at once
            return

    def close(self) -> None:
        self._loop.forget(self._socket.fileno())
        self._socket.close()


def greeting(job: str, node: str) -> bytes:
    return f"phoenix {job} {node}\n".encode()


def _listen(address: str, ports: tuple[int, int]) -> socket.socket:
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    last: OSError | None = None
    for port in range(ports[0], ports[1] + 1) if ports[0] else (0,):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.bind((address, port))
            sock.listen(_BACKLOG)
            return sock
        except OSError as error:
            sock.close()
            last = error
            if error.errno != errno.EADDRINUSE:
                break
    raise last or OSError(errno.EADDRINUSE, f"no port of {ports} is free")


@dataclass(slots=True)
class _Dial:
    peer: PeerProbe
    sock: socket.socket | None = None
    heard: bytes = b""
    error: str | None = None  # set when it is over; empty: all is well


class Dialer:
    """Dials several addresses at once, without waiting for any of them."""

    def __init__(
        self,
        loop: PollLoop,
        peers: tuple[PeerProbe, ...],
        job: str,
        deadline: float,
        on_done: Callable[[tuple[PeerProbe, ...]], None],
        *,
        greeted: bool = True,
    ) -> None:
        """`on_done` gets the peers with their errors, once. `greeted` False: a connection is all that is wanted."""
        self._loop = loop
        self._job = job
        self._deadline = deadline
        self._on_done = on_done
        self._greeted = greeted
        self.over = False
        self._dials = [_Dial(peer) for peer in peers]
        for dial in self._dials:
            self._begin(dial)

    def advance(self, now: float) -> None:
        """To be called now and then: ends what took too long, and reports when all is over."""
        if self.over:
            return
        for dial in self._dials:
            if dial.error is None and now >= self._deadline:
                connected = dial.sock is not None and _is_connected(dial.sock)
                self._finish(dial, "connected, but nothing answers" if connected else "no answer")
        if all(dial.error is not None for dial in self._dials):
            self.over = True
            self._on_done(
                tuple(PeerProbe(d.peer.node, d.peer.address, d.peer.port, d.error or "") for d in self._dials)
            )

    def _begin(self, dial: _Dial) -> None:
        try:
            family, _, _, _, where = socket.getaddrinfo(
                dial.peer.address, dial.peer.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            dial.sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            code = dial.sock.connect_ex(where)
        except OSError as error:
            self._finish(dial, error.strerror or str(error))
            return
        if code not in (0, errno.EINPROGRESS):
            self._finish(dial, os.strerror(code))
            return
        self._loop.watch(dial.sock.fileno(), partial(self._connected, dial), readable=False, writable=True)

    def _connected(self, dial: _Dial) -> None:
        if dial.sock is None:
            return
        code = dial.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code or not self._greeted:
            self._finish(dial, os.strerror(code) if code else "")
            return
        self._loop.watch(dial.sock.fileno(), partial(self._hear, dial))

    def _hear(self, dial: _Dial) -> None:
        if dial.sock is None:
            return
        try:
            part = dial.sock.recv(_GREETING_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._finish(dial, error.strerror or str(error))
            return
        dial.heard += part
        if part and not dial.heard.endswith(b"\n") and len(dial.heard) < _GREETING_BYTES:
            return
        expected = greeting(self._job, dial.peer.node)
        self._finish(dial, "" if dial.heard == expected else "somebody else answers there")

    def _finish(self, dial: _Dial, error: str) -> None:
        dial.error = error
        if dial.sock is not None:
            self._loop.forget(dial.sock.fileno())
            dial.sock.close()
            dial.sock = None


def _is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True
