"""A host that cannot join is told why while somebody still looks at its screen."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from phoenix_launch.bus.client import ClientLink
from phoenix_launch.bus.keys import derived_key_pair
from phoenix_launch.bus.supervisor import Peer, PeerKind, SupervisorBus
from phoenix_launch.errors import StartError
from phoenix_launch.messages import ENVELOPES, JobEnded, JoinRequest
from phoenix_launch.settings import RunSettings
from phoenix_launch.supervision.doorstep import Doorstep
from phoenix_launch.supervision.guests import Guests
from phoenix_launch.supervision.joining import Joiner
from phoenix_launch.wire import JOINING

RIGHT, WRONG = "a key that all hosts have, long enough", "another key, which is long enough as well"
PATIENCE = 0.3
JOIN = derived_key_pair(RIGHT, "join")
ASKED = JoinRequest("h2", -1, "i", 1, "python", "/", {}, "")

Eventually = Callable[..., object]


@pytest.fixture
def bus() -> Iterator[SupervisorBus]:
    allowed = {JOIN.public: Peer(PeerKind.JOINER)}
    bus = SupervisorBus("job-1", derived_key_pair(RIGHT, "supervisor"), "127.0.0.1", allowed=allowed)
    yield bus
    bus.close()


def joiner(endpoint: str, key: str, patience: float = PATIENCE, join_timeout: float = 60.0) -> Joiner:
    settings = RunSettings(script="train.py", nnodes=(2, 2), join_timeout=join_timeout)
    supervisor, join = derived_key_pair(key, "supervisor"), derived_key_pair(key, "join")
    return Joiner(settings, os.environ, endpoint, supervisor.public, join, 1, patience)


def test_a_wrong_key_is_told_long_before_the_join_timeout(bus: SupervisorBus) -> None:
    began = time.monotonic()
    with pytest.raises(StartError, match=r"somebody listens at .* but does not know this key") as told:
        joiner(bus.control_endpoint, WRONG).run()
    assert "is PHOENIX_JOB_KEY the same on every host?" in told.value.hint
    assert PATIENCE <= time.monotonic() - began < 10


def test_a_program_that_takes_connections_and_says_nothing_is_told_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(StartError, match="somebody listens at"):
            joiner(endpoint, RIGHT).run()


def test_where_nobody_listens_it_is_waited_for_as_long_as_was_asked() -> None:
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(StartError, match=r"nobody answers at .* since 0.5 s"):
            joiner(endpoint, RIGHT, patience=0.1, join_timeout=0.5).run()


def test_a_supervisor_that_knows_the_key_may_take_its_time(bus: SupervisorBus) -> None:
    with pytest.raises(StartError, match=r"nobody answers at .* since 1 s"):
        joiner(bus.control_endpoint, RIGHT, patience=0.2, join_timeout=1.0).run()


def test_a_port_that_closes_in_between_begins_the_patience_anew() -> None:
    doorstep = Doorstep()
    doorstep.take(zmq.Event.CONNECTED, 1.0)
    doorstep.take(zmq.Event.CONNECTED, 5.0)
    assert not doorstep.shut_out(10.9, 10.0)
    assert doorstep.shut_out(11.0, 10.0)
    doorstep.take(zmq.Event.CLOSED, 11.0)
    assert not doorstep.shut_out(20.0, 10.0)
    doorstep.take(zmq.Event.CONNECTED, 21.0)
    doorstep.take(zmq.Event.HANDSHAKE_SUCCEEDED, 22.0)
    doorstep.take(zmq.Event.CONNECTED, 23.0)
    assert not doorstep.shut_out(99.0, 10.0)


def test_a_host_that_asks_after_the_start_was_refused_is_told_so(
    bus: SupervisorBus, capsys: pytest.CaptureFixture[str]
) -> None:
    last = JobEnded(1, "phoenix-run: nothing was started")
    late = threading.Thread(target=Guests(bus).tell_late, args=(last, 1, 20.0, lambda: False))
    late.start()
    assert joiner(bus.control_endpoint, RIGHT).run() == 1
    late.join(20)
    assert not late.is_alive(), "nobody else is expected"
    assert capsys.readouterr().err == "phoenix-run: nothing was started\n"


def test_telling_late_hosts_ends_with_a_signal_or_after_its_time(bus: SupervisorBus) -> None:
    began = time.monotonic()
    Guests(bus).tell_late(JobEnded(1), 1, 60.0, lambda: True)
    Guests(bus).tell_late(JobEnded(1), 1, 0.2, lambda: False)
    assert time.monotonic() - began < 10


def test_a_host_that_turns_out_unfit_is_told_why(bus: SupervisorBus, eventually: Eventually, tmp_path: Path) -> None:
    from phoenix_launch.messages import JoinReply
    from tests.bootstraps import bootstrap

    guests = Guests(bus, lambda request, now: JoinReply(bootstrap()))
    server = derived_key_pair(RIGHT, "supervisor").public
    with closing(ClientLink(JOINING, bus.control_endpoint, server, JOIN, 5.0, ENVELOPES)) as link:
        link.say(ASKED)
        received = eventually(bus.receive)
        guests.ask(received.route, ASKED, 0.0)  # type: ignore[attr-defined]
        reply = link.listen(5.0)
        assert isinstance(reply, JoinReply) and reply.bootstrap
        guests.turn_away("another", "no")
        guests.turn_away(reply.bootstrap.incarnation, "its disk is full")
        assert link.listen(5.0) == JoinReply(None, "its disk is full")
