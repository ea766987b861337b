"""Whoever calls an agent outside of the bus: neighbours that try whether they reach it, and a supervisor that takes over.

Threads: `caller`, at most four: each hears one caller prove that it knows the job's key, hands its claim to the agent's loop,
and takes the answer back. It ends with its connection, after ten seconds at the latest.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from phoenix_launch.errors import ProtocolError
from phoenix_launch.node.poll_loop import PollLoop
from phoenix_launch.takeover_messages import CLAIMS, Claim, Granted
from phoenix_launch.wire import NO_GENERATION, encode

_LISTENED_TO: Final = 4  # callers at a time
_WAITING: Final = 64  # callers that have said nothing yet
_HANDSHAKE_SECONDS: Final = 5.0
_CLAIM_BYTES: Final = 4096

Judge = Callable[[Claim, str], Granted]


class Callers:
    """`judge` answers a claim that came from this address; called in the agent's loop."""

    def __init__(self, loop: PollLoop, job: str, key: bytes, judge: Judge) -> None:
        self._loop, self._job, self._key, self._judge = loop, job, key, judge
        self._silent: dict[int, socket.socket] = {}
        self._claims: queue.SimpleQueue[tuple[Claim, str, queue.SimpleQueue[Granted]]] = queue.SimpleQueue()
        self._slots = threading.Semaphore(_LISTENED_TO)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        loop.watch(self._bell, self._judge_all)

    def receive(self, caller: socket.socket) -> None:
        """One that was greeted. Neighbours have heard what they wanted and close; a supervisor goes on."""
        if len(self._silent) >= _WAITING:
            self._forget(next(iter(self._silent))).close()
        self._silent[caller.fileno()] = caller
        self._loop.watch(caller.fileno(), partial(self._begun, caller.fileno()))

    def close(self) -> None:
        for descriptor in list(self._silent):
            self._forget(descriptor).close()
        self._loop.forget(self._bell)

    def _forget(self, descriptor: int) -> socket.socket:
        self._loop.forget(descriptor)
        return self._silent.pop(descriptor)

    def _begun(self, descriptor: int) -> None:
        caller = self._forget(descriptor)
        try:
            goes_on = bool(caller.recv(1, socket.MSG_PEEK))
        except OSError:
            goes_on = False
        if not goes_on or not self._key or not self._slots.acquire(blocking=False):
            caller.close()
            return
        threading.Thread(target=self._listen, args=(caller,), name="caller", daemon=True).start()

    def _judge_all(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while not self._claims.empty():
            claim, address, answer = self._claims.get()
            answer.put(self._judge(claim, address))

    # --- the thread of a caller --------------------------------------------------------------------------------------

    def _listen(self, caller: socket.socket) -> None:
        from phoenix_launch.checkpoint import peer_link  # loads TLS, which no agent needs until then

        try:
            address = str(caller.getpeername()[0])
            identity = peer_link.Identity(self._job, self._key, -1, NO_GENERATION)
            link = peer_link.answer(caller, identity, _HANDSHAKE_SECONDS, _HANDSHAKE_SECONDS)
            with contextlib.closing(link):
                claim = CLAIMS.decode(link.receive_long(_CLAIM_BYTES))
                answers: queue.SimpleQueue[Granted] = queue.SimpleQueue()
                self._claims.put((claim, address, answers))
                os.eventfd_write(self._bell, 1)
                link.send_long(encode(answers.get(timeout=_HANDSHAKE_SECONDS)))
        except (OSError, ProtocolError, msgspec.MsgspecError, queue.Empty):
            caller.close()  # somebody else's business, or one that went away: it says so at its own end
        finally:
            self._slots.release()
