"""The supervisor's end of the bus: who is allowed to speak, what came from whom, and what was dropped.

Threads: the ZAP authenticator of pyzmq (one job: answer whether a key is on the allow-list).
"""

from __future__ import annotations

import enum
import ipaddress
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from phoenix_launch.bus.connection import CONTROL_QUEUE, OUTPUT_QUEUE
from phoenix_launch.bus.keys import KeyPair
from phoenix_launch.errors import PortInUseError, ProtocolError, StartError
from phoenix_launch.messages import Body, decode_envelope
from phoenix_launch.output_messages import FromOutput, decode_output
from phoenix_launch.wire import JOINING, MAX_MESSAGE_BYTES, NO_GENERATION, PROTOCOL, Envelope, Generation, encode

_CONNECTION_EVENTS = zmq.Event.ACCEPTED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


class PeerKind(enum.Enum):
    AGENT = "agent"
    STATUS = "status"  # may look
    CONTROL = "control"  # may look, inject faults, stop
    JOINER = "joiner"


@dataclass(frozen=True, slots=True)
class Peer:
    """Whom a key belongs to. `name` is the node's for an agent."""

    kind: PeerKind
    name: str = ""


@dataclass(frozen=True, slots=True)
class Received:
    peer: Peer
    route: bytes  # where an answer goes; says nothing about who the peer is
    envelope: Envelope[Body]


@dataclass(slots=True)
class BusCounters:
    """What was dropped since the start; `first_*` is kept for the one line that is logged about it."""

    unauthorised: int = 0  # messages under a key that is not allowed (any more)
    malformed: int = 0
    first_malformed: str = ""
    connections: Counter[zmq.Event] = field(default_factory=Counter)

    @property
    def dropped(self) -> int:
        return self.unauthorised + self.malformed

    @property
    def harm(self) -> str:
        """What came and should not have, in words for the user; empty when nothing did. `strangers` are not part of it."""
        if self.malformed:
            return f"a message was dropped: {self.first_malformed or 'one that its sender may not send'}"
        return "a message under a key that is not (or no longer) allowed was dropped" if self.unauthorised else ""

    @property
    def strangers(self) -> int:
        """Connections that went without having shown a key we know: wrong keys, and clients of no protocol at all.

        libzmq tells of both only by the handshake that never succeeded: one that is under way counts for a moment.
        """
        unproven = self.connections[zmq.Event.ACCEPTED] - self.connections[zmq.Event.HANDSHAKE_SUCCEEDED]
        return max(0, min(unproven, self.connections[zmq.Event.DISCONNECTED]))


@dataclass(slots=True)
class _AllowList:
    """The credentials provider of pyzmq's authenticator. Read from its thread; a dict's get is atomic."""

    peers: dict[str, Peer] = field(default_factory=dict)

    def callback(self, domain: str, key: bytes) -> bool:
        return key.decode() in self.peers  # pyzmq passes it as Z85


def bracketed(address: str) -> str:
    """As it stands in an endpoint: an IPv6 address in brackets."""
    try:
        return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    except ValueError:
        return address


class SupervisorBus:
    """The supervisor's end: a ROUTER for control, a PULL for worker output (owned by the console's thread after `start`)."""

    def __init__(
        self,
        job: str,
        keys: KeyPair,
        address: str,
        *,
        port: int = 0,
        ports: tuple[int, int] = (0, 0),
        allowed: Mapping[str, Peer] | None = None,
    ) -> None:
        """Bind on `address`. `port`: exactly this one for control; else one of `ports` (low, high), else any.

        `allowed`: who may already be waiting for this port to open, by key (libzmq never tries again once refused).
        Raises StartError when a port is in use or the address is not this machine's.
        """
        self.job = job
        self.keys = keys
        self.counters = BusCounters()
        self.context = zmq.Context()
        self._allowed = _AllowList(dict(allowed or {}))
        self._routes: dict[str, bytes] = {}  # agent's name -> newest route
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self._allowed)
        self.control: zmq.Socket[bytes] = self._server(zmq.ROUTER, CONTROL_QUEUE)
        self.output: zmq.Socket[bytes] = self._server(zmq.PULL, OUTPUT_QUEUE)
        self.monitor: zmq.Socket[bytes] = self.control.get_monitor_socket(int(_CONNECTION_EVENTS))
        try:
            self.control_endpoint = self._bind(self.control, address, port, ports)
            self.output_endpoint = self._bind(self.output, address, 0, ports)
        except BaseException:
            self.close()
            raise

    def _server(self, kind: int, queue: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.curve_server = True
        socket.curve_secretkey = self.keys.secret.encode()
        socket.curve_publickey = self.keys.public.encode()
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.linger = 0
        socket.set_hwm(queue)
        return socket

    @staticmethod
    def _bind(socket: zmq.Socket[bytes], address: str, port: int, ports: tuple[int, int]) -> str:
        host = bracketed(address)
        socket.ipv6 = host.startswith("[")
        try:
            if port:
                socket.bind(f"tcp://{host}:{port}")
                return f"tcp://{host}:{port}"
            if ports[0]:
                bound = socket.bind_to_random_port(f"tcp://{host}", ports[0], ports[1] + 1, max_tries=200)
                return f"tcp://{host}:{bound}"
            socket.bind(f"tcp://{host}:*")
            return str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")
        except zmq.ZMQBindError:
            raise StartError(
                f"no free port between {ports[0]} and {ports[1]} on {address}", hint="give a wider --port-range"
            ) from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise PortInUseError(
                    f"port {port} on {address} is in use", hint="choose another port, or leave it to phoenix-run"
                ) from None
            raise StartError(
                f"cannot listen on {address}: {error}", hint="is this address one of this machine's? (--interface)"
            ) from None

    def allow(self, public_key: str, peer: Peer) -> None:
        self._allowed.peers[public_key] = peer

    def forbid(self, name: str) -> None:
        """Nothing that an agent of this name says is heard any more (its open connection included)."""
        for key, peer in list(self._allowed.peers.items()):
            if peer == Peer(PeerKind.AGENT, name):
                del self._allowed.peers[key]
        self._routes.pop(name, None)

    def receive(self) -> Received | None:
        """The next good message without waiting; None when there is none. Bad ones are counted and dropped."""
        while True:
            try:
                frames = self.control.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            received = self._checked(frames)
            if received is not None:
                return received

    def _checked(self, frames: list[zmq.Frame]) -> Received | None:
        try:
            key = str(frames[-1].get("User-Id"))
        except zmq.ZMQError:
            key = ""
        peer = self._allowed.peers.get(key)
        if peer is None:
            self.counters.unauthorised += 1
            return None
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a message of {len(frames)} parts")
            job = JOINING if peer.kind is PeerKind.JOINER else self.job
            envelope = decode_envelope(frames[1].bytes, job)
        except ProtocolError as error:
            self.counters.malformed += 1
            self.counters.first_malformed = (
                self.counters.first_malformed or f"{error} (from {peer.kind.value} {peer.name})"
            )
            return None
        route = frames[0].bytes
        if peer.kind is PeerKind.AGENT:
            self._routes[peer.name] = route
        return Received(peer, route, envelope)

    def drain_monitor(self) -> None:
        """Take in what libzmq tells of connections that come and go."""
        while self.monitor.poll(0):
            self.counters.connections[zmq.Event(recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"])] += 1

    def send(self, node: str, body: Body, generation: Generation) -> bool:
        """To an agent. False when it was never heard of; a message may still get lost (wishes are repeated)."""
        route = self._routes.get(node)
        if route is None:
            return False
        self.answer(route, body, generation)
        return True

    def answer(self, route: bytes, body: Body, generation: Generation = NO_GENERATION, job: str = "") -> None:
        data = encode(Envelope(PROTOCOL, job or self.job, generation, body))
        try:
            self.control.send_multipart([route, data], zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # that peer's queue is full or it is gone: its heartbeat decides what that means

    def decode_output(self, data: bytes) -> FromOutput | None:
        try:
            return decode_output(data, self.job)
        except ProtocolError as error:
            self.counters.malformed += 1
            self.counters.first_malformed = self.counters.first_malformed or str(error)
            return None

    def close(self, linger: float = 0.0) -> None:
        """`linger`: seconds that what was said last may take to leave."""
        self.control.disable_monitor()
        self.control.close(round(linger * 1000))
        for socket in (self.monitor, self.output):
            socket.close(0)
        self._authenticator.stop()
        self.context.destroy(0)
