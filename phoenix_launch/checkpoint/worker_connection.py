"""The checkpoint server's end of one worker: slots to fill, slots to read, and word of every copy that was sealed."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from phoenix_launch import channel
from phoenix_launch.checkpoint import replication
from phoenix_launch.checkpoint.header import Extent, Label
from phoenix_launch.checkpoint.pairs import Grant, NoRoomError, SlotPairs, SlotRefusedError, Wish
from phoenix_launch.checkpoint.peer_link import Identity, PeerLink
from phoenix_launch.checkpoint.replication import Errand, Partner
from phoenix_launch.checkpoint.slices import SlicedFills, Slices
from phoenix_launch.checkpoint.streams import StreamWriter
from phoenix_launch.errors import PhoenixError, ProtocolError
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

_PATIENCE_SECONDS: Final = timeout("slot_piece")
_TIMEVAL: Final = struct.Struct("@ll")


def no_room(error: Exception | None) -> NoRoom | None:
    """As it travels."""
    if not isinstance(error, NoRoomError):
        return None
    return NoRoom(error.message, need=error.need, limited=error.limited, replicas=error.replicas)


class Node(Protocol):
    """What a connection needs of its server."""

    pairs: SlotPairs
    fills: SlicedFills
    fetching: dict[
        str, threading.Lock
    ]  # by bundle: held by who brings a copy of it here, for all of this node's workers

    def identity(self) -> Identity: ...

    def partner(self, node: int) -> Partner | None:
        """Who sends to that node; None when it has no server that we know of."""


class WorkerConnection:
    """Belongs to the thread that calls `serve`; partners' threads send through it too."""

    def __init__(self, sock: socket.socket, node: Node) -> None:
        self._sock = sock
        # a worker that is stopped must not hold up who else is served: sends end after a while, receiving waits
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(round(_PATIENCE_SECONDS), 0))
        self._node = node
        self._pairs = node.pairs
        self._sending = threading.Lock()
        self._grants: dict[str, Grant] = {}
        self._slices: dict[str, tuple[Slices, int]] = {}

    def serve(self) -> None:
        """Until the worker goes. What it has begun and not sealed is void then. Raises ProtocolError, OSError."""
        try:
            while (received := channel.receive(self._sock)) is not None:
                message, descriptors = received
                for descriptor in descriptors:
                    os.close(descriptor)
                if isinstance(message, FillSlot):
                    self._fill(message)
                elif isinstance(message, SlotSealed):
                    self._sealed(message)
                elif isinstance(message, ReadSlot):
                    self._read(message)
                elif isinstance(message, SlotDamaged):
                    self._pairs.forget(message.bundle, message.stamp)
                elif isinstance(message, Demands):
                    self._pairs.announce(self, message.copies)
                else:
                    raise ProtocolError(f"a worker sent a {type(message).__name__} to its checkpoint server")
        finally:
            self._sock.close()
            self._pairs.forget_writer(self)
            for grant in self._grants.values():
                self._pairs.abandon(grant)
            for bundle in self._slices:
                self._node.fills.leave(bundle)

    def _fill(self, asked: FillSlot) -> None:
        wish = Wish(
            writer=self,
            generation=asked.generation,
            bundle=asked.bundle,
            stamp=asked.stamp,
            complete=asked.complete,
            size=asked.size,
            expected=asked.expected,
        )
        try:
            grant = self._granted(wish, asked)
        except SlotRefusedError as error:
            self._say(SlotRefused(asked.bundle, asked.stamp, error.message, no_room(error)))
            return
        if grant is None:
            self._say(SlotHeld(asked.bundle, asked.stamp))
            return
        if asked.parts == 1:
            self._grants[asked.bundle] = grant
        answer = SlotToFill(asked.bundle, asked.stamp, grant.index, grant.memory.serial)
        self._say(answer, grant.memory.descriptor)

    def _granted(self, wish: Wish, asked: FillSlot) -> Grant | None:
        if asked.parts == 1:
            self._node.fills.leave(asked.bundle)
            return self._pairs.begin(wish, _PATIENCE_SECONDS)
        slices, grant = self._node.fills.join(wish, asked.parts, _PATIENCE_SECONDS)
        if grant is not None:
            self._slices[asked.bundle] = (slices, asked.part)
        return grant

    def _sealed(self, said: SlotSealed) -> None:
        slices, part = self._slices.get(said.bundle, (None, 0))
        if slices is not None and slices.wish.stamp == said.stamp:
            del self._slices[said.bundle]
            slices.finished(part, partial(self._copied, said, self._node.identity().node), self._pairs)
            return
        error = self._seal(said)
        self._copied(said, self._node.identity().node, error)
        for node in said.replicas:
            partner = self._node.partner(node)
            if error or partner is None:
                self._copied(said, node, error or SlotRefusedError(f"no checkpoint server of node {node} is known"))
            else:
                done = partial(self._copied, said, node)
                partner.send(Errand(said.generation, said.bundle, said.stamp, said.complete, done))

    def _seal(self, said: SlotSealed) -> SlotRefusedError | None:
        """Why the copy is not kept here; None when it is."""
        grant = self._grants.get(said.bundle)
        if grant is not None and grant.wish.stamp == said.stamp:
            del self._grants[said.bundle]
            try:
                self._pairs.seal(grant)
            except SlotRefusedError as error:
                return error
        with self._pairs.reading(said.bundle, said.stamp) as memory:
            return None if memory is not None else SlotRefusedError("this node does not keep it")

    def _read(self, asked: ReadSlot) -> None:
        try:
            if self._hand_over(asked):
                return
            if asked.node >= 0:
                if not (asked.keep and self._brought(asked)):
                    self._stream(asked)
                return
            why = "this node does not keep it"
        except (OSError, PhoenixError) as error:
            why = str(error)
        self._say(SlotRefused(asked.bundle, asked.stamp, why))

    def _hand_over(self, asked: ReadSlot) -> bool:
        with self._pairs.reading(asked.bundle, asked.stamp) as memory:
            if memory is None:
                return False
            descriptor = memory.read_only()
            try:
                self._say(SlotToRead(asked.bundle, asked.stamp), descriptor)
            finally:
                os.close(descriptor)
            return True

    def _brought(self, asked: ReadSlot) -> bool:
        """Into a slot, by whoever of this node's workers asks first, and handed over from there. False: that takes too long."""
        turn = self._node.fetching.setdefault(asked.bundle, threading.Lock())
        if not turn.acquire(timeout=_PATIENCE_SECONDS):
            return False
        try:
            if self._hand_over(asked):
                return True
            self._fetch(asked)
        finally:
            turn.release()
        return self._hand_over(asked)

    def _fetch(self, asked: ReadSlot) -> None:
        """What is fetched is kept like any other copy. Raises OSError, PhoenixError."""
        wish = Wish(
            writer=self,
            generation=asked.generation,
            bundle=asked.bundle,
            stamp=asked.stamp,
            complete=asked.complete,
            size=0,
        )
        with contextlib.closing(self._call(asked)) as link:
            replication.fetch(link, self._pairs, wish)

    def _stream(self, asked: ReadSlot) -> None:
        """Straight to the worker. Raises OSError, PhoenixError."""

        def begin(label: Label, extent: Extent) -> StreamWriter:
            stream = StreamWriter(_PATIENCE_SECONDS)
            try:
                sizes = (extent.table, extent.extras, extent.data)
                self._say(SlotStream(asked.bundle, asked.stamp, label.layout, label.data_sum, *sizes), stream.far)
                stream.handed_over()
            except BaseException:
                stream.close()
                raise
            return stream

        with contextlib.closing(self._call(asked)) as link:
            head, crc = replication.relay(link, asked.bundle, asked.stamp, begin)
        self._say(SlotStreamed(asked.bundle, asked.stamp, head, crc))

    def _call(self, asked: ReadSlot) -> PeerLink:
        partner = self._node.partner(asked.node)
        if partner is None:
            raise SlotRefusedError(f"no checkpoint server of node {asked.node} is known")
        return replication.call(partner.peer, replace(self._node.identity(), generation=asked.generation))

    def _copied(self, said: SlotSealed, node: int, error: Exception | None) -> None:
        """Called by partners' threads as well: a worker that is gone by then does not matter."""
        words = "" if error is None else str(error) or type(error).__name__
        with contextlib.suppress(OSError):
            self._say(CopySealed(said.bundle, said.stamp, node, words, no_room(error)))

    def _say(self, message: FromCheckpoint, *descriptors: int) -> None:
        with self._sending:
            try:
                channel.send(self._sock, message, descriptors)
            except OSError:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)  # a part of a frame may be out: nothing can follow it
                raise
