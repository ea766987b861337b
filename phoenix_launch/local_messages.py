"""What an agent, its fork server and parked processes say to each other, over Unix sockets (`channel.py`)."""

from __future__ import annotations

import msgspec

from phoenix_launch.errors import ProtocolError
from phoenix_launch.messages import Command, Message, checked


class ForkServerSettings(Message, frozen=True):
    """First message to a fork server. Its process environment is already the workers'."""

    command: Command
    agent_pid: int


class ForkServerReady(Message, frozen=True):
    """Torch and the script's imports are loaded. `fork_unsafe`: why no fork is possible here (then workers are spawned)."""

    seconds: float
    loaded: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    fork_unsafe: str = ""


class Park(Message, frozen=True):
    """Fork a process that waits. Descriptors that come along: its control socket, its stdout, its stderr."""

    slot: int


class Parked(Message, frozen=True):
    """From the new process on its control socket: re-parented to the agent, death signal set, waiting."""

    pid: int


class Become(Message, frozen=True):
    """To a parked process: run the script as this worker."""

    environment: dict[str, str]
    args: tuple[str, ...]  # after ${local_rank} was put in


class BecomeStore(Message, frozen=True):
    """To a parked process: host the TCPStore of a generation on this address; answered by StoreUp."""

    address: str
    port: int
    port_low: int = 0
    port_high: int = 0


class StoreUp(Message, frozen=True):
    port: int
    error: str = ""


NodeLocal = ForkServerSettings | ForkServerReady | Park | Parked | Become | BecomeStore | StoreUp

_locals = msgspec.msgpack.Decoder(NodeLocal)


def decode_local(data: bytes) -> NodeLocal:
    try:
        return _locals.decode(checked(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message on a local socket: {error}") from None
