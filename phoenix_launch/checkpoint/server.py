"""`python -m phoenix_launch.checkpoint.server FD`: one process a node that owns the slots, for as long as its agent lives.

Threads: the main one hears the agent on FD until that closes; one tells the agent what is kept when that has changed; one
takes in workers and one takes in other nodes' servers, each of which gets a thread of its own; one for each node that we
send to. All but the main one end with the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from phoenix_launch import channel
from phoenix_launch.checkpoint import replication
from phoenix_launch.checkpoint.pace import Pace
from phoenix_launch.checkpoint.pairs import SlotPairs, Standing
from phoenix_launch.checkpoint.peer_link import Identity
from phoenix_launch.checkpoint.replication import Partner
from phoenix_launch.checkpoint.saved import save
from phoenix_launch.checkpoint.slices import SlicedFills
from phoenix_launch.checkpoint.worker_connection import WorkerConnection
from phoenix_launch.copies import SlotPeer
from phoenix_launch.errors import PhoenixError, ProtocolError
from phoenix_launch.job.commit import Lineage
from phoenix_launch.local_messages import (
    CheckpointSettings,
    CheckpointUp,
    CutOff,
    NodeLocal,
    SaveSlots,
    SlotRules,
    SlotsKept,
    SlotsSaved,
)
from phoenix_launch.node.cgroup import ControlGroup, memory_free
from phoenix_launch.processes import die_with_parent
from phoenix_launch.wire import NO_GENERATION

_BACKLOG: Final = 128
_MOST_CALLERS: Final = 128  # other nodes' servers, and strangers until their handshake fails
_PAUSE_SECONDS: Final = 0.1  # after a failed accept: descriptors have run out, say
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_ADMISSION_SECONDS: Final = 1.0  # the agent announces a worker before it starts it, but that comes on another socket


class Server:
    """The doors, and what the agent said last."""

    def __init__(self, agent: socket.socket, settings: CheckpointSettings) -> None:
        """Listens. Raises OSError when it cannot."""
        self._agent = agent
        self._settings = settings
        self._key = bytes.fromhex(settings.key)
        self._pace = Pace(settings.bandwidth)
        self._changed = threading.Condition()
        self._saying = threading.Lock()
        self._stale = True  # the agent does not know yet what is kept
        self._rules = SlotRules(NO_GENERATION, 0, (), (), ())
        self._partners: dict[SlotPeer, Partner] = {}
        self._callers = threading.BoundedSemaphore(_MOST_CALLERS)
        self._told_of_strangers = False
        self._cut_until = 0.0  # by a drill
        groups = ControlGroup()
        self.pairs = SlotPairs(settings.job, self._wake_reporter, lambda: memory_free(groups), settings.memory)
        self.fills = SlicedFills(self.pairs)
        self.fetching: dict[str, threading.Lock] = {}
        self._workers_door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._workers_door.bind(settings.socket)
        self._workers_door.listen(_BACKLOG)
        self._nodes_door = listen(settings.address, settings.port_low, settings.port_high)

    @property
    def port(self) -> int:
        return int(self._nodes_door.getsockname()[1])

    def run(self) -> None:
        """Until the agent goes. Raises ProtocolError for what an agent never sends."""
        channel.send(self._agent, CheckpointUp(self.port))
        threading.Thread(target=self._report, name="reports", daemon=True).start()
        for door, serve in ((self._workers_door, self._serve_worker), (self._nodes_door, self._serve_node)):
            threading.Thread(target=self._take_in, args=(door, serve), daemon=True).start()
        while (received := self._hear()) is not None:
            message, descriptors = received
            if isinstance(message, SaveSlots):
                self._save(message)
                continue
            if isinstance(message, CutOff):
                self._cut_until = time.monotonic() + message.seconds
                continue
            if not isinstance(message, SlotRules) or descriptors:
                raise ProtocolError(f"an agent sent a {type(message).__name__} to its checkpoint server")
            self._follow(message)

    def identity(self) -> Identity:
        settings = self._settings
        return Identity(settings.job, self._key, settings.node, self.pairs.generation, settings.encrypt)

    def partner(self, node: int) -> Partner | None:
        with self._changed:
            peer = next((peer for peer in self._rules.peers if peer.node == node), None)
            if peer is None or self._cut_off:
                return None
            if peer not in self._partners:
                self._partners[peer] = Partner(peer, self.pairs, self.identity, self._pace)
            return self._partners[peer]

    @property
    def _cut_off(self) -> bool:
        return time.monotonic() < self._cut_until

    # --- the agent ---

    def _hear(self) -> tuple[NodeLocal, tuple[int, ...]] | None:
        try:
            return channel.receive(self._agent)
        except OSError:  # it went without having read what we said last
            return None

    def _follow(self, rules: SlotRules) -> None:
        if rules.generation < self._rules.generation:
            return
        with self._changed:
            self._rules = rules
            for peer in self._partners.keys() - set(rules.peers):
                self._partners.pop(peer).close()
            self._changed.notify_all()
        self.pairs.workers = len(rules.workers)
        self.pairs.follow(Standing(rules.generation, rules.resume, Lineage(rules.lineage)))

    def _save(self, wanted: SaveSlots) -> None:
        """The job ends: nothing else is of importance any more."""
        try:
            saved = SlotsSaved(str(save(self.pairs, Path(wanted.folder), self._settings.node, wanted.world)))
        except OSError as error:
            saved = SlotsSaved("", str(error))
        self._say(saved)

    def _say(self, message: NodeLocal) -> None:
        """To the agent; the main thread sees it when that is gone."""
        with self._saying, contextlib.suppress(OSError):
            channel.send(self._agent, message)

    def _wake_reporter(self) -> None:
        with self._changed:
            self._stale = True
            self._changed.notify_all()

    def _report(self) -> None:
        told = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stale)
                self._stale = False
            kept = self.pairs.kept()
            if kept != told:
                told = kept
                self._say(SlotsKept(*kept, self._pace.total))

    # --- the doors ---

    def _take_in(self, door: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        pause = threading.Event()
        while True:
            try:
                sock, _ = door.accept()
            except OSError:
                pause.wait(_PAUSE_SECONDS)
                continue
            threading.Thread(target=self._serve, args=(sock, serve), daemon=True).start()

    def _serve(self, sock: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        """Whatever comes in on a connection ends at most that connection."""
        try:
            serve(sock)
        except (OSError, PhoenixError) as error:
            if isinstance(error, ProtocolError) and not self._told_of_strangers:
                self._told_of_strangers = True
                print(f"phoenix-run: checkpoint server: {error.message} (said once)", file=sys.stderr, flush=True)
        finally:
            sock.close()

    def _serve_worker(self, sock: socket.socket) -> None:
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        with self._changed:
            known = self._changed.wait_for(lambda: pid in self._rules.workers, _ADMISSION_SECONDS)
        if not known or uid != os.getuid():
            raise ProtocolError(f"process {pid}, which is none of the job's workers, asked for slots")
        WorkerConnection(sock, self).serve()

    def _serve_node(self, sock: socket.socket) -> None:
        if self._cut_off or not self._callers.acquire(blocking=False):
            return
        try:
            replication.serve(sock, self.pairs, self.identity)
        finally:
            self._callers.release()


def listen(address: str, low: int, high: int) -> socket.socket:
    """On a port of the range, or on any when `low` is 0. Raises OSError."""
    family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    for port in range(low, high + 1) if low else (0,):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((where[0], port, *where[2:]))
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE or port in (0, high):
                raise
        else:
            return sock
    raise OSError(errno.EADDRINUSE, f"no port of {low}-{high} is free")


def main(descriptor: int) -> NoReturn:
    agent = socket.socket(fileno=descriptor)
    agent.setblocking(True)
    received = channel.receive(agent)
    if received is None:
        os._exit(0)
    settings = received[0]
    if not isinstance(settings, CheckpointSettings):
        raise ProtocolError(f"a checkpoint server's first message is its settings, not {type(settings).__name__}")
    die_with_parent(settings.agent_pid)
    try:
        server = Server(agent, settings)
    except (OSError, ValueError) as error:
        channel.send(agent, CheckpointUp(0, str(error)))
        os._exit(1)
    try:
        server.run()
    finally:
        with contextlib.suppress(OSError):
            os.unlink(settings.socket)
    os._exit(0)  # threads that serve somebody end here, wherever they are


if __name__ == "__main__":
    main(int(sys.argv[1]))
