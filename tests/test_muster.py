"""Launches are started so many at a time, tried again for as long as it takes, watched again, and forgotten."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from typing import Any, cast

import pytest

from phoenix_launch.bus.supervisor import SupervisorBus
from phoenix_launch.errors import StartError
from phoenix_launch.hosts import remote
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.supervision.muster import AT_ONCE, DELAYS, Muster, Recruit
from phoenix_launch.timeouts import timeout
from tests.bootstraps import bootstrap
from tests.test_preflight import OWN, fact


class FakeHandle:
    """An ssh client that ends when the test says so."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host, self.python = name, host, "/x/python"
        self.last_lines: deque[str] = deque()
        self.said: list[str] = []
        self.code: int | None = None
        self.ended_by_us = False
        self.closed = False

    def end(self, code: int, *lines: str) -> None:
        self.code, self.said = code, list(lines)

    def read_lines(self) -> list[str]:
        lines, self.said = self.said, []
        self.last_lines += lines
        return lines

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.ended_by_us = self.code is None
        self.code = -9 if self.code is None else self.code

    def close(self) -> None:
        self.closed = True


class FakeBus:
    def allow(self, *_: object) -> None:
        pass

    def send(self, *_: object) -> None:
        pass


@pytest.fixture
def muster(monkeypatch: pytest.MonkeyPatch) -> Muster:
    def start_ssh(given: Any, host: str, *_: object) -> FakeHandle:
        return FakeHandle(given.node, host)

    def start_watch(name: str, _: int, host: str, *__: object) -> FakeHandle:
        return FakeHandle(name, host)

    monkeypatch.setattr(remote, "start_ssh", start_ssh)
    monkeypatch.setattr(remote, "start_watch", start_watch)
    return Muster(
        bus=cast(SupervisorBus, FakeBus()),
        expected=OWN,
        nproc="1",
        python="/x/python",
        ssh="ssh",
        control_folder=os.devnull,
        bootstrap=lambda spec, incarnation, keys: bootstrap(spec.name, index=spec.index),
    )


def hosts(count: int) -> list[NodeSpec]:
    return [NodeSpec(index=i, name=f"h{i}", host=f"h{i}") for i in range(count)]


def handle(recruit: Recruit) -> FakeHandle:
    return cast(FakeHandle, recruit.handle)


def begin(muster: Muster, specs: Iterable[NodeSpec], now: float = 0.0) -> list[Recruit]:
    muster.begin(specs, now)
    return muster.launch_more(now)


def come(muster: Muster, recruit: Recruit) -> None:
    """Its agent says hello and has dialled its neighbour."""
    address = f"10.0.0.{recruit.spec.index + 1}"
    muster.heard(recruit.incarnation, fact(hostname=recruit.spec.name, address=address))
    muster.probed(recruit.incarnation, ())


def started(muster: Muster, count: int) -> list[Recruit]:
    recruits = begin(muster, hosts(count))
    for recruit in recruits:
        come(muster, recruit)
    muster.settle(0.0)
    assert muster.complete
    return recruits


def lose(muster: Muster, recruit: Recruit, now: float) -> None:
    muster.dismiss(recruit.incarnation)
    muster.relaunch(recruit.spec.index, now)


def test_so_many_hosts_are_under_way_at_a_time_and_lost_ones_wait_their_turn(muster: Muster) -> None:
    first = begin(muster, hosts(AT_ONCE + 3))
    assert len(first) == AT_ONCE
    muster.relaunch(0, 1.0)
    assert muster.launch_more(1.0) == []
    for recruit in first[:4]:
        come(muster, recruit)
    assert [recruit.spec.index for recruit in muster.launch_more(2.0)] == [AT_ONCE, AT_ONCE + 1, AT_ONCE + 2, 0]


def test_a_lost_host_is_tried_again_for_as_long_as_the_job_lives(muster: Muster) -> None:
    (recruit,) = started(muster, 1)
    now = 10.0
    lose(muster, recruit, now)
    for delay in (*DELAYS, DELAYS[-1], DELAYS[-1]):
        if delay:
            assert muster.launch_more(now + delay - 0.1) == []
        now += delay
        (recruit,) = muster.launch_more(now)
        assert recruit.spec.spare
        handle(recruit).end(255, "ssh: connect to host h0 port 22: Connection refused")
        assert muster.listen(recruit)
        muster.settle(now)
    assert muster.is_gone(0)


def test_a_host_that_came_back_is_tried_at_once_when_it_is_lost_the_next_time(muster: Muster) -> None:
    (recruit,) = started(muster, 1)
    for now in (10.0, 20.0):
        lose(muster, recruit, now)
        (recruit,) = muster.launch_more(now)
        come(muster, recruit)
        (admitted,) = muster.settle(now)
        assert admitted.spare


def test_what_was_lost_is_forgotten_when_its_channel_has_closed(muster: Muster) -> None:
    recruit, _ = started(muster, 2)
    muster.dismiss(recruit.incarnation)
    assert handle(recruit).poll() == -9  # the client ended; the agent hears it on the bus
    assert muster.listen(recruit)
    assert recruit.incarnation not in muster.recruits
    assert handle(recruit).closed


def test_a_host_that_is_no_longer_fit_is_named_once_and_not_admitted(muster: Muster) -> None:
    (recruit,) = started(muster, 1)
    now = 10.0
    lose(muster, recruit, now)
    for attempt in range(3):
        (recruit,) = muster.launch_more(now + DELAYS[attempt])
        now += DELAYS[attempt]
        muster.heard(recruit.incarnation, fact(script_digest="edited"))
        assert muster.settle(now) == []
    assert muster.remarks == ["h0 cannot take part: the script there is not the same as here"]


def test_a_closed_channel_is_opened_again_while_the_agent_lives(muster: Muster) -> None:
    (recruit,) = started(muster, 1)
    first = handle(recruit)
    first.end(255)
    assert muster.listen(recruit)
    assert recruit.out_of_touch
    assert muster.watch_again(recruit, 5.0)  # it had been open: a reason to ask whether the node lives
    assert muster.launch_more(5.0) == []
    assert muster.launch_more(5.0 + timeout("probe")) == [recruit]
    assert first.closed
    handle(recruit).end(255, "ssh: connect to host h0 port 22: Connection refused")
    assert muster.listen(recruit)
    assert not muster.watch_again(recruit, 7.0)  # it never was open: nothing new is known of the node
    assert muster.launch_more(7.0 + DELAYS[1]) == [recruit]
    handle(recruit).end(0, remote.WATCHING)
    assert muster.listen(recruit)
    assert not recruit.out_of_touch
    assert not recruit.blind


def test_a_host_without_the_program_that_watches_is_left_alone(muster: Muster) -> None:
    (recruit,) = started(muster, 1)
    handle(recruit).end(255)
    muster.listen(recruit)
    muster.watch_again(recruit, 0.0)
    muster.launch_more(timeout("probe"))
    handle(recruit).end(1, remote.WATCHING, "tail: unrecognized option: pid")
    assert muster.listen(recruit)
    assert recruit.blind


def test_a_killed_ssh_client_says_as_little_about_the_node_as_a_failed_one(muster: Muster) -> None:
    recruit, other = started(muster, 2)
    handle(recruit).end(-9)
    handle(other).end(1)
    assert muster.listen(recruit) and muster.listen(other)
    assert recruit.out_of_touch
    assert not other.out_of_touch  # the guardian's own exit code


def test_a_host_that_says_nothing_is_given_up_with_the_reason_as_far_as_it_is_known(muster: Muster) -> None:
    recruit, other = begin(muster, hosts(2))
    come(muster, other)
    handle(recruit).said = ["cannot reach the supervisor at tcp://10.0.0.1:7: no answer"]
    muster.listen(recruit)
    assert muster.settle(timeout("preflight")) == []
    with pytest.raises(StartError) as refused:
        muster.settle(timeout("preflight") + 0.1)
    assert handle(recruit).ended_by_us
    table = " ".join(refused.value.details.split())
    assert "h0 cannot reach the supervisor at tcp://10.0.0.1:7: no answer" in table
    assert "--interface" in table
