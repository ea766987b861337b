"""A link that a drill makes lose or delay what goes through it: both ways, in order, and for a while."""

from __future__ import annotations

from typing import Any, cast

import pytest

from phoenix_launch.bus.agent import AgentLink
from phoenix_launch.bus.rough_link import RoughLink
from phoenix_launch.clock import OwnClock
from phoenix_launch.messages import ReportAck
from phoenix_launch.wire import PROTOCOL, Envelope, Generation

G1 = Generation(1, 1)


class Wire:
    """In place of AgentLink, and of the clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sent: list[int] = []
        self.coming: list[int] = []

    def send(self, body: ReportAck, generation: Generation) -> None:
        self.sent.append(body.seq)

    def receive(self) -> Envelope[Any] | None:
        return Envelope(PROTOCOL, "j", G1, ReportAck(self.coming.pop(0))) if self.coming else None


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def link(wire: Wire) -> RoughLink:
    return RoughLink(cast(AgentLink, wire), cast(OwnClock, wire))


def said(link: RoughLink, *numbers: int) -> None:
    for number in numbers:
        link.send(ReportAck(number), G1)


def heard(link: RoughLink) -> list[int]:
    found = []
    while (envelope := link.receive()) is not None:
        found.append(cast(ReportAck, envelope.body).seq)
    return found


def test_without_a_drill_everything_goes_straight_through(link: RoughLink, wire: Wire) -> None:
    said(link, 1, 2)
    wire.coming = [3, 4]
    assert (wire.sent, heard(link), link.due()) == ([1, 2], [3, 4], None)


def test_what_is_dropped_never_comes_and_afterwards_all_does(link: RoughLink, wire: Wire) -> None:
    link.drop(5.0)
    said(link, 1)
    wire.coming = [2]
    assert (wire.sent, heard(link)) == ([], [])
    wire.now += 5.1
    said(link, 3)
    wire.coming = [4]
    assert (wire.sent, heard(link)) == ([3], [4])


def test_what_is_delayed_comes_so_much_later_in_its_order(link: RoughLink, wire: Wire) -> None:
    link.delay(0.5, 2.0)
    said(link, 1)
    wire.coming = [2]
    assert (wire.sent, heard(link), link.due()) == ([], [], 100.5)
    wire.now += 0.6
    assert heard(link) == [2]
    assert wire.sent == [1]
    wire.now = 101.9
    said(link, 3)
    wire.now = 102.1  # it is over, but what is on its way comes first
    said(link, 4)
    assert wire.sent == [1]
    wire.now = 102.5
    assert heard(link) == []
    assert wire.sent == [1, 3, 4]
    said(link, 5)
    assert wire.sent[-1] == 5 and link.due() is None
