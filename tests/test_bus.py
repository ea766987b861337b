"""The bus hears exactly those whose keys it knows, and nothing that others send does any harm."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import pytest
import zmq

from phoenix_launch.bus.client import ClientLink
from phoenix_launch.bus.keys import KeyPair, derived_key_pair, new_key_pair
from phoenix_launch.bus.supervisor import Peer, PeerKind, Received, SupervisorBus
from phoenix_launch.command_messages import Answer, DrillKind, FaultRequest, StatusReply, StatusRequest
from phoenix_launch.errors import PhoenixError, StartError, UsageError
from phoenix_launch.messages import ENVELOPES, Body
from phoenix_launch.wire import Generation

Eventually = Callable[..., Received]


@pytest.fixture
def bus() -> Iterator[SupervisorBus]:
    bus = SupervisorBus("job-1", new_key_pair(), "127.0.0.1")
    yield bus
    bus.close()


def client(bus: SupervisorBus, keys: KeyPair, job: str = "job-1", server_key: str = "") -> ClientLink[Body]:
    return ClientLink(job, bus.control_endpoint, server_key or bus.keys.public, keys, 0.5, ENVELOPES)


def test_a_message_arrives_with_the_name_its_key_has(bus: SupervisorBus, eventually: Eventually) -> None:
    keys = new_key_pair()
    bus.allow(keys.public, Peer(PeerKind.CONTROL))
    link = client(bus, keys)
    link.say(FaultRequest(DrillKind.KILL_NODE, node="1"))
    received = eventually(bus.receive)
    assert received.peer == Peer(PeerKind.CONTROL)
    assert received.envelope.body == FaultRequest(DrillKind.KILL_NODE, node="1")
    bus.answer(received.route, Answer(True, "done"))
    assert link.listen(5) == Answer(True, "done")
    link.close()


def test_a_routing_id_of_another_peer_changes_nothing(bus: SupervisorBus, eventually: Eventually) -> None:
    keys = {name: new_key_pair() for name in ("node0", "node1")}
    for name, pair in keys.items():
        bus.allow(pair.public, Peer(PeerKind.AGENT, name))
    links = {name: client(bus, pair) for name, pair in keys.items()}
    swapped = {"node0": b"node1", "node1": b"node0"}  # not the same twice: ROUTER ignores the second peer of a name
    for name, link in links.items():
        link.socket.disconnect(bus.control_endpoint)
        link.socket.routing_id = swapped[name]
        link.socket.connect(bus.control_endpoint)
        link.say(StatusRequest())
        assert eventually(bus.receive).peer.name == name
    for link in links.values():
        link.close()


def test_an_unknown_key_is_counted_and_not_heard(bus: SupervisorBus, eventually: Eventually) -> None:
    link = client(bus, new_key_pair())
    link.say(StatusRequest())
    eventually(lambda: bus.drain_monitor() or bus.counters.strangers)
    assert bus.receive() is None
    link.close()


def test_a_client_without_curve_is_counted_and_not_heard(bus: SupervisorBus, eventually: Eventually) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(bus.control_endpoint)
    dealer.send(b"hello")
    eventually(lambda: bus.drain_monitor() or bus.counters.strangers)
    assert bus.receive() is None
    dealer.close(0)
    context.term()


def test_random_bytes_on_the_port_are_counted_and_do_no_harm(bus: SupervisorBus, eventually: Eventually) -> None:
    host, port = bus.control_endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(os.urandom(4096))
        eventually(lambda: bus.drain_monitor() or bus.counters.strangers)
    keys = new_key_pair()
    bus.allow(keys.public, Peer(PeerKind.STATUS))
    link = client(bus, keys)
    link.say(StatusRequest())
    assert eventually(bus.receive).envelope.body == StatusRequest()
    link.close()


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x93" * 500, b"x" * 100], ids=repr)
def test_a_malformed_message_is_counted_and_dropped(bus: SupervisorBus, eventually: Eventually, data: bytes) -> None:
    keys = new_key_pair()
    bus.allow(keys.public, Peer(PeerKind.AGENT, "node0"))
    link = client(bus, keys)
    link.socket.send(data)
    link.say(StatusRequest())
    assert eventually(bus.receive).envelope.body == StatusRequest()
    assert bus.counters.malformed == 1
    assert bus.counters.first_malformed
    link.close()


def test_a_message_of_another_job_is_dropped(bus: SupervisorBus, eventually: Eventually) -> None:
    keys = new_key_pair()
    bus.allow(keys.public, Peer(PeerKind.AGENT, "node0"))
    link = client(bus, keys, job="job-2")
    link.say(StatusRequest())
    eventually(lambda: bus.receive() or bus.counters.malformed)
    assert "job-2" in bus.counters.first_malformed
    link.close()


def test_a_forbidden_agent_is_not_heard_on_its_open_connection(bus: SupervisorBus, eventually: Eventually) -> None:
    keys = new_key_pair()
    bus.allow(keys.public, Peer(PeerKind.AGENT, "node0"))
    link = client(bus, keys)
    link.say(StatusRequest())
    eventually(bus.receive)
    bus.forbid("node0")
    link.say(StatusRequest())
    eventually(lambda: bus.receive() or bus.counters.unauthorised)
    assert not bus.send("node0", StatusReply("{}"), Generation(1, 1))
    link.close()


def test_a_command_gets_one_clear_line_when_nobody_answers(bus: SupervisorBus) -> None:
    keys = new_key_pair()
    bus.allow(keys.public, Peer(PeerKind.STATUS))
    link = client(bus, keys)
    with pytest.raises(PhoenixError, match="does not answer"):
        link.ask(StatusRequest())
    link.close()


def test_a_port_in_use_is_named(bus: SupervisorBus) -> None:
    port = int(bus.control_endpoint.rsplit(":", 1)[1])
    with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 is in use"):
        SupervisorBus("job-2", new_key_pair(), "127.0.0.1", port=port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(StartError, match=r"192\.0\.2\.1"):
        SupervisorBus("job-2", new_key_pair(), "192.0.2.1")


def test_ports_come_from_the_range(bus: SupervisorBus) -> None:
    port = int(bus.control_endpoint.rsplit(":", 1)[1])
    with pytest.raises(StartError, match="no free port"):
        SupervisorBus("job-2", new_key_pair(), "127.0.0.1", ports=(port, port))


def test_hosts_with_the_same_job_key_derive_the_same_pairs_and_others_do_not() -> None:
    key = "k" * 40
    assert derived_key_pair(key, "join") == derived_key_pair(key, "join")
    assert derived_key_pair(key, "join") != derived_key_pair(key, "supervisor")
    assert derived_key_pair(key, "join") != derived_key_pair("l" * 40, "join")
    with pytest.raises(UsageError, match="too short"):
        derived_key_pair("short", "join")


def test_a_client_that_was_refused_is_heard_when_its_key_is_allowed(
    bus: SupervisorBus, eventually: Callable[..., Received | bool]
) -> None:
    keys = new_key_pair()
    link = client(bus, keys)

    def refused() -> bool:
        link.say(StatusRequest())
        bus.drain_monitor()
        return bus.counters.strangers > 1

    eventually(refused)
    bus.allow(keys.public, Peer(PeerKind.STATUS))

    def heard() -> Received | None:
        link.say(StatusRequest())
        return bus.receive()

    assert eventually(heard)
    link.close()


def test_whoever_waits_for_the_port_to_open_is_allowed_from_the_first_moment(eventually: Eventually) -> None:
    keys, waiting = new_key_pair(), new_key_pair()
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    link = ClientLink("job-1", f"tcp://127.0.0.1:{port}", keys.public, waiting, 0.5, ENVELOPES)
    link.say(StatusRequest())
    bus = SupervisorBus("job-1", keys, "127.0.0.1", port=port, allowed={waiting.public: Peer(PeerKind.STATUS)})
    assert eventually(bus.receive).peer == Peer(PeerKind.STATUS)
    assert bus.counters.strangers == 0
    link.close()
    bus.close()
