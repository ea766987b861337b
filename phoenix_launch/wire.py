"""What all messages have in common: their root, the generation they are of, the envelope on the bus, and the encoding.

Messages are frozen msgspec structs over msgpack, tagged by their class name, with unknown fields refused. Which there are:
`messages.py` (supervisor and agents), `command_messages.py`, `output_messages.py`, and within a node `local_messages.py`.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

from phoenix_launch.errors import ProtocolError

PROTOCOL: Final = 1
MAX_MESSAGE_BYTES: Final = 8 << 20
JOINING: Final = "joining"  # in place of the job's id, from and to hosts that do not know it yet


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The root of all messages; its tag is the class name."""


class Generation(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """(term, n): n grows at every change of the map rank -> process, term at every change of supervisor."""

    term: int
    n: int

    def following(self) -> Generation:
        return Generation(self.term, self.n + 1)

    def __str__(self) -> str:
        return f"g{self.n}" if self.term == 1 else f"t{self.term}g{self.n}"


NO_GENERATION: Final = Generation(0, 0)

BodyT = TypeVar("BodyT")


class Envelope(msgspec.Struct, Generic[BodyT], frozen=True, forbid_unknown_fields=True):
    """What travels on the control bus; each end decodes the bodies that it may get."""

    protocol: int
    job: str
    generation: Generation
    body: BodyT


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def checked(data: bytes) -> bytes:
    """The data, if it is not larger than anything we send. Raises ProtocolError."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes (at most {MAX_MESSAGE_BYTES} are taken)")
    return data


def opened(data: bytes, envelopes: msgspec.msgpack.Decoder[Envelope[BodyT]], job: str) -> Envelope[BodyT]:
    """Raises ProtocolError for anything that is not a well-formed message of this protocol and job."""
    try:
        envelope = envelopes.decode(checked(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from None
    if envelope.protocol != PROTOCOL:
        raise ProtocolError(f"message of protocol {envelope.protocol}, this is {PROTOCOL}")
    if envelope.job != job:
        raise ProtocolError(f"message of job {envelope.job!r}, this is {job!r}")
    return envelope
