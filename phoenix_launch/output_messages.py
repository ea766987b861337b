"""Workers' output from an agent to the console: a socket of its own, so that a slow terminal never delays the bus."""

from __future__ import annotations

import msgspec

from phoenix_launch.errors import ProtocolError
from phoenix_launch.wire import PROTOCOL, Generation, Message, checked


class OutputChunk(Message, frozen=True):
    """Whole lines of one stream of one worker. `prefix`: what --tee asks for before each line, as torchrun writes it."""

    node: str
    rank: int
    generation: Generation
    stream: int  # 1 stdout, 2 stderr
    data: bytes
    prefix: str = ""


class OutputEnd(Message, frozen=True):
    """Everything that this worker wrote to this stream has been sent."""

    node: str
    rank: int
    generation: Generation
    stream: int


FromOutput = OutputChunk | OutputEnd


class OutputEnvelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    protocol: int
    job: str
    body: FromOutput


_outputs = msgspec.msgpack.Decoder(OutputEnvelope)


def decode_output(data: bytes, job: str) -> FromOutput:
    """Raises ProtocolError as `wire.opened` does."""
    try:
        envelope = _outputs.decode(checked(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed output message: {error}") from None
    if (envelope.protocol, envelope.job) != (PROTOCOL, job):
        raise ProtocolError(f"output of protocol {envelope.protocol}, job {envelope.job!r}")
    return envelope.body
