"""Copies of slots on other nodes: a server sends what was sealed to its partner's, and asks others' for what it needs.

One connection for each copy. The sender says what it offers; the receiver takes the table, the extras and the data
straight into a slot of its own, compares the keyed BLAKE2 of table and extras, seals, and only then says so. Whatever breaks
off before that leaves the slot unsealed and the other slot of the pair as it was. The data has a checksum of its writer's,
which is compared by who loads it; where it has none (what is not sent as a rule) the servers compare its CRC-32.
What a single worker asks for is passed on to it instead (`streams.py`), and the worker compares both.

Threads: each function runs in the thread of the connection it is about; `Partner` has one thread, which sends.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import socket
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeVar

import msgspec

from phoenix_launch.checkpoint import header, peer_link
from phoenix_launch.checkpoint.header import PAGE_BYTES, Extent, Header, Label
from phoenix_launch.checkpoint.layout import table_digest
from phoenix_launch.checkpoint.pace import Pace
from phoenix_launch.checkpoint.pairs import NoRoomError, SlotPairs, SlotRefusedError, Wish
from phoenix_launch.checkpoint.peer_link import PIECE_BYTES, Identity, PeerLink
from phoenix_launch.checkpoint.slots import SlotMemory
from phoenix_launch.checkpoint.streams import StreamWriter
from phoenix_launch.copies import SlotPeer, Stamp
from phoenix_launch.errors import PhoenixError, ProtocolError
from phoenix_launch.messages import NoRoom
from phoenix_launch.timeouts import timeout
from phoenix_launch.wire import Generation, Message, encode

HANDSHAKE_SECONDS: Final = timeout("slot_handshake")
PATIENCE_SECONDS: Final = timeout("slot_piece")
WAIT_SECONDS: Final = (
    PATIENCE_SECONDS / 4
)  # for what this server has to wait for while the other one waits for its answer


class Offer(Message, frozen=True):
    """This copy can be had, in that many bytes. `complete`: the newest complete version that the sender knows of; `expected`:
    bytes that later versions will need; `replica`: it is sent for safety, not because somebody asked for it."""

    label: Label
    table: int
    extras: int
    data: int
    complete: int
    expected: int = 0
    replica: bool = False


class Take(Message, frozen=True):
    """Yes: send it."""


class Held(Message, frozen=True):
    """This very copy is here: just received and sealed, or before."""


class Refusal(Message, frozen=True):
    why: str
    no_room: NoRoom | None = None


class Sums(Message, frozen=True):
    """After the bytes: what they must have been. `data_crc` is 0 where the label has a `data_sum`."""

    head: bytes
    data_crc: int


class Want(Message, frozen=True):
    """Offer this copy to me."""

    bundle: str
    stamp: Stamp


M = TypeVar("M", bound=Message)
PeerMessage: TypeAlias = Offer | Take | Held | Refusal | Sums | Want
_messages = msgspec.msgpack.Decoder(PeerMessage)
_RANGE: Final = 1 << 48  # bytes that a slot may have: what no memory holds is refused before it is asked for


def call(peer: SlotPeer, identity: Identity) -> PeerLink:
    return peer_link.call(peer.address, peer.port, identity, HANDSHAKE_SECONDS, PATIENCE_SECONDS)


def replicate(
    link: PeerLink, pairs: SlotPairs, bundle: str, stamp: Stamp, complete: int, pace: Pace | None = None
) -> None:
    """Until the other server has sealed this copy. Raises SlotRefusedError, ProtocolError, OSError."""
    with pairs.reading(bundle, stamp) as memory:
        if memory is None:
            raise SlotRefusedError(f"version {stamp.version} of bundle {bundle!r} is not here any more")
        _give(link, memory, complete, pairs.slot_bytes(bundle), pace)


def fetch(link: PeerLink, pairs: SlotPairs, wish: Wish) -> None:
    """Bring a copy that the other server keeps into a slot of ours. Raises as `replicate` does."""
    offer = _offered(link, wish.bundle, wish.stamp)
    _take(link, pairs, offer, replace(wish, size=_extent(offer).total))


def relay(
    link: PeerLink, bundle: str, stamp: Stamp, begin: Callable[[Label, Extent], StreamWriter]
) -> tuple[bytes, int]:
    """Pass a copy that the other server keeps on to who wants it. Raises as `replicate` does.

    `begin`: opens the stream, which is closed in any case. Returns the digest of table and extras, and the CRC-32 that
    the data must have, if it has no sum.
    """
    offer = _offered(link, bundle, stamp)
    extent = _extent(offer)
    _say(link, Take())
    try:
        head = memoryview(bytearray(extent.data_offset - PAGE_BYTES))
    except MemoryError:
        raise SlotRefusedError(f"no memory for {extent.table + extent.extras} bytes of bundle {bundle!r}") from None
    for _ in link.receive_into(head):
        pass
    if table_digest(head[: extent.table]) != offer.label.layout:
        raise _changed(bundle)
    with contextlib.closing(begin(offer.label, extent)) as stream:
        stream.write(head)
        link.pass_on(extent.data, stream)
        sums = _hear(link, Sums)
        if sums.head != link.digest(head):
            raise _changed(bundle)
        stream.until_taken()  # before its slot is overwritten, of which a part may be in the pipe
    with contextlib.suppress(OSError):
        _say(link, Held())
    return hashlib.blake2b(head).digest(), sums.data_crc


def _offered(link: PeerLink, bundle: str, stamp: Stamp) -> Offer:
    _say(link, Want(bundle, stamp))
    offer = _hear(link, Offer)
    if (offer.label.bundle, offer.label.stamp) != (bundle, stamp):
        raise ProtocolError("another copy was offered than the one that was asked for")
    return offer


def serve(sock: socket.socket, pairs: SlotPairs, identity: Callable[[], Identity]) -> None:
    """One connection of another server, from its greeting to its end. Raises as `replicate` does."""
    with contextlib.closing(peer_link.answer(sock, identity(), HANDSHAKE_SECONDS, PATIENCE_SECONDS)) as link:
        message: Message = _hear(link, Offer, Want)
        if isinstance(message, Want):
            with pairs.reading(message.bundle, message.stamp) as memory:
                if memory is None:
                    _say(link, Refusal("it is not here"))
                else:
                    _give(link, memory, -1)
        elif isinstance(message, Offer):
            label = message.label
            wish = Wish(
                writer=link,
                generation=link.generation,
                bundle=label.bundle,
                stamp=label.stamp,
                complete=message.complete,
                size=_extent(message).total,
                expected=message.expected,
                replica=message.replica,
            )
            _take(link, pairs, message, wish)


def _give(link: PeerLink, memory: SlotMemory, complete: int, expected: int = 0, pace: Pace | None = None) -> None:
    found = memory.header()
    if found is None:
        _say(link, Refusal("it is damaged"))
        raise SlotRefusedError("a slot was damaged in memory")
    extent = found.extent
    offer = Offer(found.label, extent.table, extent.extras, extent.data, complete, expected, replica=expected > 0)
    _say(link, offer)
    if isinstance(_hear(link, Take, Held), Held):
        return
    link.send_from(memory, PAGE_BYTES, extent.data_offset, pace)
    crc = _send_data(link, memory, found, pace)
    _say(link, Sums(link.digest(memory.view[PAGE_BYTES : extent.data_offset]), crc))
    _hear(link, Held)


def _send_data(link: PeerLink, memory: SlotMemory, found: Header, pace: Pace | None) -> int:
    """Its checksum: the one that came with a replica (so that bits that flip in memory are found too), else a new one."""
    known, crc = found.label.data_crc, 0
    if found.label.data_sum:
        known = 0
    for start in range(found.extent.data_offset, found.extent.total, PIECE_BYTES):
        end = min(start + PIECE_BYTES, found.extent.total)
        link.send_from(memory, start, end, pace)
        if known < 0:
            crc = zlib.crc32(memory.view[start:end], crc)
    return known if known >= 0 else crc


def _take(link: PeerLink, pairs: SlotPairs, offer: Offer, wish: Wish) -> None:
    try:
        grant = pairs.begin(wish, WAIT_SECONDS)
    except SlotRefusedError as error:
        short = error if isinstance(error, NoRoomError) else None
        found = (
            NoRoom(short.message, need=short.need, limited=short.limited, replicas=short.replicas) if short else None
        )
        _say(link, Refusal(error.message, found))
        raise
    if grant is None:
        _say(link, Held())
        return
    try:
        _receive(link, offer, grant.memory.view)
        pairs.seal(grant)
    except BaseException as error:
        header.void(grant.memory.view)
        pairs.abandon(grant)
        with contextlib.suppress(OSError):
            _say(link, Refusal(str(error)))
        raise
    _say(link, Held())


def _receive(link: PeerLink, offer: Offer, memory: memoryview) -> None:
    """Into memory that nobody can load before the last line. Raises ProtocolError when bits are not what was sent."""
    extent = _extent(offer)
    header.void(memory)
    _say(link, Take())
    head = memory[PAGE_BYTES : extent.data_offset]
    for _ in link.receive_into(head):
        pass
    crc = 0
    for piece in link.receive_into(memory[extent.data_offset : extent.total]):
        if not offer.label.data_sum:
            crc = zlib.crc32(piece, crc)
    sums = _hear(link, Sums)
    if sums.head != link.digest(head) or sums.data_crc != crc:
        raise _changed(offer.label.bundle)
    label = offer.label if offer.label.data_sum else msgspec.structs.replace(offer.label, data_crc=crc)
    header.relabel(memory, label, extent)
    header.seal(memory)


def _changed(bundle: str) -> ProtocolError:
    return ProtocolError(f"a copy of bundle {bundle!r} was changed in memory or on its way")


def _extent(offer: Offer) -> Extent:
    if not all(0 <= size < _RANGE for size in (offer.table, offer.extras, offer.data)):
        raise ProtocolError("a copy of an impossible size was offered")
    return Extent(offer.table, offer.extras, offer.data)


def _say(link: PeerLink, message: PeerMessage) -> None:
    link.send(encode(message))


def _hear(link: PeerLink, *kinds: type[M]) -> M:
    """The next message, which has to be of one of these kinds. Raises SlotRefusedError for a Refusal."""
    try:
        message = _messages.decode(link.receive())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message between checkpoint servers: {error}") from None
    if isinstance(message, Refusal):
        if (short := message.no_room) is not None:
            raise NoRoomError(short.why, short.need, limited=short.limited, replicas=short.replicas)
        raise SlotRefusedError(f"refused by the other node: {message.why}")
    if not isinstance(message, kinds):
        raise ProtocolError(f"a {type(message).__name__} came between checkpoint servers where none may come")
    return message


@dataclass(frozen=True, slots=True)
class Errand:
    """A copy that has to be sealed on another node. `done` gets what went wrong, or None."""

    generation: Generation
    bundle: str
    stamp: Stamp
    complete: int
    done: Callable[[Exception | None], None]


class Partner:
    """Sends to one other node, one copy after the other; its thread lives until `close`."""

    def __init__(self, peer: SlotPeer, pairs: SlotPairs, identity: Callable[[], Identity], pace: Pace) -> None:
        self.peer = peer
        self._pace = pace
        self._pairs = pairs
        self._identity = identity
        self._closed = False
        self._link: PeerLink | None = None
        self._errands: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"to-node-{peer.node}", daemon=True).start()

    def send(self, errand: Errand) -> None:
        self._errands.put(errand)

    def close(self) -> None:
        """Give up what is on its way, too: it keeps a slot from being overwritten."""
        self._closed = True
        self._errands.put(None)
        link = self._link
        if link is not None:
            link.shut()

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            try:
                self._carry(errand)
            except (OSError, PhoenixError) as error:
                errand.done(error)
            else:
                errand.done(None)

    def _carry(self, errand: Errand) -> None:
        link = call(self.peer, replace(self._identity(), generation=errand.generation))
        with contextlib.closing(link):
            self._link = link  # before the look at `_closed`: one of the two threads sees what the other has done
            if self._closed:
                raise ConnectionAbortedError(f"node {self.peer.node} is no partner any more")
            replicate(link, self._pairs, errand.bundle, errand.stamp, errand.complete, self._pace)
