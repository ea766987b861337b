"""A stream within a node takes messages in whatever pieces they come, and never waits for its other end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from fake_supervisor import G1, G2

from phoenix_launch import channel
from phoenix_launch.copies import Stamp
from phoenix_launch.local_messages import NodeLocal, SlotRules, SlotsKept
from phoenix_launch.node.local_stream import LocalStream
from phoenix_launch.node.poll_loop import PollLoop
from phoenix_launch.wire import MAX_MESSAGE_BYTES, Generation


class Ends:
    """A stream, what came of it, and the socket at its other end."""

    def __init__(self) -> None:
        self.loop = PollLoop()
        ours, self.peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.peer.settimeout(10)
        self.heard: list[NodeLocal] = []
        self.ended: list[str] = []
        self.stream = LocalStream(self.loop, ours, self.heard.append, self.ended.append)

    def turn(self) -> bool:
        """Whether anything was ready."""
        ready = self.loop.wait(0)
        self.loop.dispatch(ready)
        return bool(ready)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.stream.close()
    ends.peer.close()


def kept(n: int) -> SlotsKept:
    return SlotsKept(Generation(1, n), ())


def frame(message: SlotsKept) -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel.send(ours, message)
        return theirs.recv(1 << 16)


def test_messages_are_heard_in_whatever_pieces_they_come(ends: Ends) -> None:
    data = frame(kept(1)) + frame(kept(2)) + frame(kept(3))
    for start in range(len(data)):
        ends.peer.sendall(data[start : start + 1])
        ends.turn()
    ends.peer.sendall(data)
    ends.turn()
    assert ends.heard == [kept(1), kept(2), kept(3)] * 2


def test_what_is_said_arrives(ends: Ends) -> None:
    ends.stream.say(kept(1))
    ends.stream.say(kept(2))
    assert [channel.receive(ends.peer), channel.receive(ends.peer)] == [(kept(1), ()), (kept(2), ())]
    assert not ends.turn(), "nothing is waited for"


def test_of_what_the_other_end_does_not_read_only_the_newest_waits(ends: Ends) -> None:
    def rules(n: int) -> SlotRules:
        return SlotRules(G1, n, tuple(Stamp(G2, 1 << 40) for _ in range(20_000)), (), ())

    for n in range(50):
        ends.stream.say(rules(n))
    assert not ends.turn(), "while it does not read, nothing keeps the loop busy"
    resumes: list[int] = []
    while not resumes or resumes[-1] < 49:
        ends.peer.setblocking(False)
        received = b""
        while True:
            ends.turn()
            try:
                received += ends.peer.recv(1 << 20)
            except BlockingIOError:
                break
        resumes += [message.resume for message in decoded(received) if isinstance(message, SlotRules)]
    assert resumes == sorted(resumes) and len(resumes) < 10
    assert not ends.turn()


def decoded(data: bytes) -> list[NodeLocal]:
    loop, (ours, theirs), heard = PollLoop(), socket.socketpair(), list[NodeLocal]()
    stream = LocalStream(loop, ours, heard.append, lambda reason: None)
    with theirs:
        view = memoryview(data)
        while view:
            view = view[theirs.send(view[: 1 << 15]) :]
            loop.dispatch(loop.wait(0))
    stream.close()
    return heard


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\0\0\0\4nope", "malformed"),
        ((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"), "a frame of 8388609 bytes"),
        (b"", ""),
        (frame(kept(2))[:-1], ""),
    ],
)
def test_it_ends_once_with_what_was_wrong_and_after_what_was_right(ends: Ends, data: bytes, words: str) -> None:
    ends.peer.sendall(frame(kept(1)) + data)
    ends.peer.close()
    while not ends.ended:
        assert ends.turn()
    assert ends.heard == [kept(1)]
    assert len(ends.ended) == 1 and ends.ended[0].find(words) >= 0 and bool(ends.ended[0]) == bool(words)
    assert ends.stream.closed and not ends.turn()
    ends.stream.say(kept(3))
    ends.stream.close()
    assert len(ends.ended) == 1


def test_last_words_are_heard_when_the_other_end_is_gone_before_we_write(ends: Ends) -> None:
    ends.peer.sendall(frame(kept(1)))
    ends.peer.close()
    ends.stream.say(kept(2))
    assert (ends.heard, ends.ended) == ([kept(1)], [""])


def test_descriptors_that_come_along_are_not_taken_in(ends: Ends) -> None:
    before = len(os.listdir("/proc/self/fd"))
    channel.send(ends.peer, kept(1), (0, 1))
    ends.turn()
    assert ends.heard == [kept(1)]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_stream_may_be_closed_by_who_hears_it(ends: Ends) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        heard: list[NodeLocal] = []

        def hear(message: NodeLocal) -> None:
            heard.append(message)
            stream.close()

        stream = LocalStream(ends.loop, ours, hear, ends.ended.append)
        theirs.sendall(frame(kept(1)) + frame(kept(2)))
        ends.turn()
    assert heard == [kept(1)] and ends.ended == []
