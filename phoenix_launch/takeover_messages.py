"""What a new supervisor and the agents of a job say to each other before it is one, each on a line of its own."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from phoenix_launch.messages import NodePlan, NodeReport
from phoenix_launch.wire import Message

_PERSON: Final = b"phoenix-takeover"


class Claim(Message, frozen=True):
    """`take` False: is a supervisor of this term granted? True: most nodes have said so, follow it."""

    term: int
    take: bool
    control_endpoint: str
    output_endpoint: str
    server_key: str


class Granted(Message, frozen=True):
    """The answer, granted or not. `promised`: the highest term that this agent has granted; `follows`: that of the supervisor
    it obeys; `supervised`: which it hears."""

    granted: bool
    promised: int
    follows: int
    incarnation: str
    supervised: bool
    plan: NodePlan | None = None  # only from who follows now
    report: NodeReport | None = None


CLAIMS: Final = msgspec.msgpack.Decoder(Claim)
ANSWERS: Final = msgspec.msgpack.Decoder(Granted)


def takeover_key(slots_key: str) -> bytes:
    """By which both prove that they are of the job; made from the key of its checkpoint servers, and not the same."""
    return hashlib.blake2b(bytes.fromhex(slots_key), person=_PERSON, digest_size=32).digest()
