"""The worker's end of its node's checkpoint server. Belongs to one thread (the copier's); others may `interrupt` it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from typing import Final, TypeAlias

from phoenix_launch import channel
from phoenix_launch.checkpoint.pairs import NoRoomError, SlotRefusedError
from phoenix_launch.checkpoint.slots import SlotReader, SlotWriter
from phoenix_launch.checkpoint.streams import StreamReader
from phoenix_launch.copies import Stamp
from phoenix_launch.errors import ProtocolError
from phoenix_launch.local_messages import (
    CopySealed,
    Demands,
    FillSlot,
    FromCheckpoint,
    ReadSlot,
    SlotDamaged,
    SlotHeld,
    SlotRefused,
    SlotSealed,
    SlotStream,
    SlotStreamed,
    SlotToFill,
    SlotToRead,
)
from phoenix_launch.messages import NoRoom
from phoenix_launch.timeouts import timeout
from phoenix_launch.wire import Generation

REQUEST_SECONDS: Final = timeout("slot_request")
_Answer: TypeAlias = SlotToFill | SlotHeld | SlotToRead | SlotStream | SlotStreamed


class SlotsLink:
    """One connection. All methods raise OSError when the server is gone, SlotRefusedError when it says no."""

    def __init__(self, path: str, job: str, node: int, seconds: float = REQUEST_SECONDS) -> None:
        self.generation = Generation(0, 0)  # that this worker runs in; set when it changes
        self.complete = -1  # the newest version that is known to be complete
        self._job = job
        self._node = node
        self._seconds = seconds
        self._writers: dict[tuple[str, int], tuple[int, SlotWriter]] = {}
        self._copies: dict[tuple[str, Stamp, int], SlotRefusedError | None] = {}
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(seconds)
        try:
            self._sock.connect(path)
        except BaseException:
            self._sock.close()
            raise

    def fill(
        self, bundle: str, stamp: Stamp, size: int, expected: int = 0, part: int = 0, parts: int = 1
    ) -> SlotWriter | None:
        """Mapped memory of `size` bytes (`slots.slot_size`) for this copy; None when the node keeps it already.

        `expected`: bytes that later versions will need; `part` of `parts`: which slice of it this worker fills. Raises
        NoRoomError when it does not fit into the node's memory.
        """
        channel.send(self._sock, FillSlot(self.generation, bundle, stamp, self.complete, size, expected, part, parts))
        answer, descriptors = self._answer(bundle, stamp)
        try:
            if isinstance(answer, SlotToFill):
                return self._mapped((bundle, answer.index), answer.serial, descriptors[0])
            return None
        finally:
            _close(descriptors)

    def announce(self, copies: Iterable[tuple[str, int, int]]) -> None:
        """What this worker is going to fill: bundle, bytes of a copy, replicas on other nodes."""
        channel.send(self._sock, Demands(tuple(copies)))

    def sealed(self, bundle: str, stamp: Stamp, replicas: tuple[int, ...] = ()) -> None:
        """Say that the copy is whole, and to which other nodes it has to go; `copied` waits for that."""
        for node in (self._node, *replicas):
            self._copies.pop((bundle, stamp, node), None)
        channel.send(self._sock, SlotSealed(self.generation, bundle, stamp, self.complete, replicas))

    def copied(self, bundle: str, stamp: Stamp, nodes: Iterable[int]) -> dict[int, SlotRefusedError]:
        """When the copies on all of these nodes are sealed or failed: what went wrong, by node (empty: nothing)."""
        wanted = {(bundle, stamp, node) for node in nodes}
        deadline = time.monotonic() + self._seconds
        while not wanted <= self._copies.keys():
            self._hear(deadline)
        results = {key[2]: self._copies.pop(key) for key in wanted}
        return {node: error for node, error in results.items() if error is not None}

    def read(self, bundle: str, stamp: Stamp, node: int = -1, *, keep: bool = False) -> SlotReader | StreamReader:
        """From this node's slot, or, if it has none, what comes from that of `node`: the caller's to close, before anything
        else is asked for. `keep`: bring it into a slot of this node first, for its other workers, too."""
        channel.send(self._sock, ReadSlot(self.generation, bundle, stamp, self.complete, node, keep))
        answer, descriptors = self._answer(bundle, stamp)
        if isinstance(answer, SlotStream):
            return StreamReader(descriptors[0], answer, self._seconds, lambda: self._streamed(bundle, stamp))
        try:
            reader = SlotReader.attach(descriptors[0], self._job, bundle, stamp)
        finally:
            _close(descriptors)
        if reader is None:
            raise SlotRefusedError(f"version {stamp.version} of bundle {bundle!r} is damaged")
        return reader

    def damaged(self, bundle: str, stamp: Stamp) -> None:
        """What this node keeps as this copy is not what was written: nobody shall have it."""
        channel.send(self._sock, SlotDamaged(bundle, stamp))

    def interrupt(self) -> None:
        """From any thread: whoever waits in this link gets an OSError, and it is of no use any more."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
        for _, writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _mapped(self, place: tuple[str, int], serial: int, descriptor: int) -> SlotWriter:
        known = self._writers.get(place)
        if known is not None and known[0] == serial:
            return known[1]
        if known is not None:
            del self._writers[place]
            known[1].close()
        writer = SlotWriter(descriptor)
        self._writers[place] = (serial, writer)
        return writer

    def _streamed(self, bundle: str, stamp: Stamp) -> SlotStreamed:
        said, _ = self._answer(bundle, stamp)
        if not isinstance(said, SlotStreamed):
            raise ProtocolError(f"a checkpoint server sent a {type(said).__name__} after a copy")
        return said

    def _answer(self, bundle: str, stamp: Stamp) -> tuple[_Answer, tuple[int, ...]]:
        """The answer about this copy; what is said of copies that were sealed meanwhile is kept for `copied`."""
        deadline = time.monotonic() + self._seconds
        while True:
            message, descriptors = self._hear(deadline)
            if not isinstance(message, CopySealed) and (message.bundle, message.stamp) == (bundle, stamp):
                if isinstance(message, SlotRefused):
                    raise _refusal(message.why, message.no_room)
                return message, descriptors
            _close(descriptors)  # of a request that was given up after too long

    def _hear(self, deadline: float) -> tuple[FromCheckpoint, tuple[int, ...]]:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the node's checkpoint server does not answer")
        self._sock.settimeout(left)
        received = channel.receive(self._sock)
        self._sock.settimeout(self._seconds)
        if received is None:
            raise ConnectionResetError("the node's checkpoint server is gone")
        message, descriptors = received
        if isinstance(message, CopySealed):
            error = _refusal(message.error, message.no_room) if message.error else None
            self._copies[message.bundle, message.stamp, message.node] = error
        elif not isinstance(message, _Answer | SlotRefused):
            _close(descriptors)
            raise ProtocolError(f"a checkpoint server sent a {type(message).__name__} to a worker")
        return message, descriptors


def _refusal(why: str, short: NoRoom | None) -> SlotRefusedError:
    if short is None:
        return SlotRefusedError(why)
    return NoRoomError(short.why, short.need, limited=short.limited, replicas=short.replicas)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
