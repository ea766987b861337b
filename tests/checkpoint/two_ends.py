"""The two ends of a copy between nodes, in this process, and what may sit between them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from checkpoint_nodes import G1, JOB, KEY, SECONDS, content, layout

from phoenix_launch.checkpoint import replication
from phoenix_launch.checkpoint.header import Extent
from phoenix_launch.checkpoint.pairs import SlotPairs, Standing, Wish
from phoenix_launch.checkpoint.peer_link import Identity
from phoenix_launch.checkpoint.slots import SlotWriter, slot_size
from phoenix_launch.copies import SlotPeer, Stamp
from phoenix_launch.errors import PhoenixError, ProtocolError
from phoenix_launch.wire import Generation

ME = Identity(JOB, bytes.fromhex(KEY), 0, G1)
SECRET = replace(ME, encrypt=True)
SIZE = 3 << 20  # more than one piece


def sealed_pairs(version: int = 3, generation: Generation = G1) -> SlotPairs:
    """One bundle at one version, in memory of this process."""
    pairs = SlotPairs(JOB)
    pairs.follow(Standing(generation))
    table, stamp = layout(SIZE), Stamp(generation, version)
    wish = Wish(
        writer="w", generation=generation, bundle="b", stamp=stamp, complete=-1, size=slot_size(table, len(b"extras"))
    )
    grant = pairs.begin(wish, 0)
    assert grant is not None
    writer = SlotWriter(grant.memory.descriptor)
    data = writer.begin(JOB, "b", stamp, table, b"extras")
    for row in table.tensors:
        data[row.offset : row.offset + row.size] = content(version, row.size)
    writer.seal()
    pairs.seal(grant)
    return pairs


class Host:
    """A server's door, in a thread, that serves one connection; `error` is how it ended."""

    def __init__(self, pairs: SlotPairs, identity: Identity) -> None:
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.door.getsockname()[1])
        self.pairs = pairs
        self.identity = identity
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        sock, _ = self.door.accept()
        try:
            replication.serve(sock, self.pairs, lambda: self.identity)
        except (OSError, PhoenixError) as error:
            self.error = error
        finally:
            sock.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join(SECONDS)
        self.door.close()
        assert not self.thread.is_alive()


def empty_pairs(generation: Generation = G1) -> SlotPairs:
    pairs = SlotPairs(JOB)
    pairs.follow(Standing(generation))
    return pairs


def extent_in(pairs: SlotPairs) -> Extent:
    with pairs.reading("b", Stamp(G1, 3)) as memory:
        assert memory is not None
        found = memory.header()
        assert found is not None
        return found.extent


class Relay:
    """Sits between callers and a host, and keeps what goes through, and what the host has said of it.

    `wrap`: what it makes of its two sockets first; `change`: what the callers hear instead of some bytes that the host says,
    which begin at this place of what it says on a connection; None: no more.
    """

    def __init__(
        self,
        port: int,
        wrap: Callable[[socket.socket, bool], socket.socket] = lambda sock, _: sock,
        change: Callable[[int, bytes], bytes | None] = lambda _, data: data,
    ) -> None:
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.door.getsockname()[1])
        self.seen, self.said = bytearray(), bytearray()
        self.calls = 0
        self._far, self._wrap, self._change = port, wrap, change
        self._sockets: list[socket.socket] = []
        self.threads = [threading.Thread(target=self._run)]
        self.threads[0].start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the door was closed
            while True:
                near, _ = self.door.accept()
                self.calls += 1
                try:
                    far = socket.create_connection(("127.0.0.1", self._far))
                except OSError:
                    near.close()
                    continue
                with contextlib.suppress(OSError, ProtocolError):
                    near, far = self._wrap(near, False), self._wrap(far, True)
                self._sockets += [near, far]
                for one, other, change in ((near, far, lambda _, data: data), (far, near, self._answers)):
                    self.threads.append(threading.Thread(target=self._pump, args=(one, other, change)))
                    self.threads[-1].start()

    def _answers(self, place: int, data: bytes) -> bytes | None:
        self.said += data
        return self._change(place, data)

    def _pump(self, one: socket.socket, other: socket.socket, change: Callable[[int, bytes], bytes | None]) -> None:
        place = 0
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self.seen += data
                changed = change(place, data)
                if changed is None:
                    break
                other.sendall(changed)
                place += len(data)
        for sock in (one, other):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.door.shutdown(socket.SHUT_RDWR)
        self.door.close()
        for thread in self.threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        for sock in self._sockets:
            sock.close()


def breaks_off(after: int) -> Callable[[int, bytes], bytes | None]:
    """For a `Relay`."""
    return lambda place, data: data if place + len(data) <= after else None


def flips(where: int) -> Callable[[int, bytes], bytes | None]:
    """For a `Relay`: one bit of this byte."""

    def change(place: int, data: bytes) -> bytes:
        at = where - place
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] if 0 <= at < len(data) else data

    return change


@dataclass(frozen=True)
class PeerAt:
    """As a node that others are told of: at another port than its own."""

    port: int
    index: int = 0

    @property
    def peer(self) -> SlotPeer:
        return SlotPeer(self.index, "127.0.0.1", self.port)
