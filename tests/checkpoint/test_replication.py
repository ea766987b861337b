"""Copies between two nodes' checkpoint servers: whole or not at all, from those who know the job's key and nobody else."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from checkpoint_nodes import G1, G2, SECONDS, CheckpointNode, copy, read
from two_ends import ME, SECRET, SIZE, Host, PeerAt, Relay, empty_pairs, extent_in, sealed_pairs

from phoenix_launch.checkpoint import cipher, header, peer_link, replication
from phoenix_launch.checkpoint.pace import Pace
from phoenix_launch.checkpoint.pairs import SlotPairs, SlotRefusedError, Standing, Wish
from phoenix_launch.checkpoint.peer_link import Identity, Memory, PeerLink
from phoenix_launch.checkpoint.replication import Errand, Partner
from phoenix_launch.copies import SlotPeer, Stamp
from phoenix_launch.errors import ProtocolError


def test_a_replica_is_sealed_on_the_partner_before_it_is_acknowledged(nodes: list[CheckpointNode]) -> None:
    link = nodes[0].link()
    assert copy(link, 3, size=SIZE, replicas=(1,)) == {}
    assert read(nodes[1].link(), 3) > SIZE
    kept = nodes[1].until_kept(("b", 3))
    assert kept.kept == nodes[0].until_kept(("b", 3)).kept


def test_versions_follow_each_other_in_the_partners_pair(nodes: list[CheckpointNode]) -> None:
    link = nodes[0].link()
    for version in range(6):
        assert copy(link, version, size=SIZE, replicas=(1,)) == {}
        link.complete = version
    nodes[1].until_kept(("b", 4), ("b", 5))
    assert read(nodes[1].link(), 5) and read(nodes[1].link(), 4)


def test_a_replica_is_not_written_over_a_version_that_is_still_needed(nodes: list[CheckpointNode]) -> None:
    link = nodes[0].link()
    for version in (0, 1):
        assert copy(link, version, replicas=(1,)) == {}
    link.complete = 1
    assert copy(link, 2) == {}
    link.complete = -1
    link.sealed("b", Stamp(G1, 2), (1,))
    assert "still needed" in link.copied("b", Stamp(G1, 2), [1])[1].message
    nodes[1].until_kept(("b", 0), ("b", 1))


def test_what_several_workers_of_a_node_want_from_another_is_brought_once_and_kept(nodes: list[CheckpointNode]) -> None:
    assert copy(nodes[0].link(), 3, size=SIZE) == {}
    with Relay(nodes[0].port) as relay:
        nodes[1].follow(G2, [PeerAt(relay.port)], resume=3, lineage=(Stamp(G2, 3),))
        nodes[1].until_generation(G2)
        links = [nodes[1].link(G2) for _ in range(3)]
        with ThreadPoolExecutor(len(links)) as pool:
            sizes = list(pool.map(lambda link: read(link, 3, node=0, keep=True), links))
        assert min(sizes) > SIZE and relay.calls == 1
    nodes[1].until_kept(("b", 3))
    nodes[0].kill()
    assert read(links[0], 3, node=0) > SIZE
    with pytest.raises(SlotRefusedError):
        read(links[0], 2, node=0, keep=True)
    assert copy(links[0], 4) == {}


def test_a_new_generation_brings_an_older_ones_copy_to_another_partner(nodes: list[CheckpointNode]) -> None:
    link = nodes[0].link()
    assert copy(link, 3) == {}
    for node in nodes:
        node.follow(G2, nodes, resume=3, lineage=(Stamp(G2, 3),))
    link.generation = G2
    link.sealed("b", Stamp(G1, 3), (1,))
    assert link.copied("b", Stamp(G1, 3), [0, 1]) == {}
    assert read(nodes[1].link(G2), 3)


def test_the_partner_may_hear_of_a_generation_later_than_the_sender(nodes: list[CheckpointNode]) -> None:
    nodes[0].follow(G2, nodes)
    nodes[0].until_generation(G2)
    link = nodes[0].link(G2)
    assert copy(link, 0) == {}
    link.sealed("b", Stamp(G2, 0), (1,))
    assert link.copied("b", Stamp(G2, 0), [0]) == {}, "the own copy does not wait for the partner"
    nodes[1].follow(G2, nodes)
    assert link.copied("b", Stamp(G2, 0), [1]) == {}


def test_an_unreachable_partner_is_said_and_the_own_copy_is_kept(nodes: list[CheckpointNode]) -> None:
    link = nodes[0].link()
    nodes[1].kill()
    failed = copy(link, 0, replicas=(1, 7))
    assert "refused" in failed[1] and "no checkpoint server" in failed[7] and 0 not in failed
    assert read(link, 0)


# --- the two ends in one process, so that what is between them can be changed -----------------------------------------


def send(host: Host, pairs: SlotPairs, identity: Identity = ME, version: int = 3) -> None:
    link = peer_link.call("127.0.0.1", host.port, identity, SECONDS, SECONDS)
    with contextlib.closing(link):
        replication.replicate(link, pairs, "b", Stamp(G1, version), -1)


def test_a_replica_is_the_same_in_every_byte() -> None:
    source, target = sealed_pairs(), empty_pairs()
    with Host(target, ME) as host:
        send(host, source)
    with source.reading("b", Stamp(G1, 3)) as one, target.reading("b", Stamp(G1, 3)) as other:
        assert one is not None and other is not None
        ours, theirs = one.header(), other.header()
        assert ours is not None and theirs is not None and ours.extent == theirs.extent
        assert one.view[4096 : ours.extent.total] == other.view[4096 : ours.extent.total]
        assert theirs.label.data_crc >= 0 > ours.label.data_crc


def test_a_partner_that_stands_still_is_given_up_at_once_when_it_is_no_partner_any_more() -> None:
    source: SlotPairs = sealed_pairs()
    results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as door:
        partner = Partner(SlotPeer(1, "127.0.0.1", int(door.getsockname()[1])), source, lambda: ME, Pace(0))
        partner.send(Errand(G1, "b", Stamp(G1, 3), -1, results.put))
        sock, _ = door.accept()
        with contextlib.closing(peer_link.answer(sock, ME, SECONDS, SECONDS)) as link:
            replication._hear(link, replication.Offer)
            replication._say(link, replication.Take())
            partner.close()
            assert results.get(timeout=replication.PATIENCE_SECONDS / 2)


@pytest.mark.parametrize(
    "stranger",
    [replace(ME, key=b"another key"), replace(ME, job="job-2")],
    ids=["another key", "another job"],
)
@pytest.mark.parametrize("who", ["caller", "host"])
def test_who_does_not_know_the_key_is_refused_by_either_end(stranger: Identity, who: str) -> None:
    target = empty_pairs()
    with Host(target, stranger if who == "host" else ME) as host, pytest.raises((ProtocolError, OSError)):
        send(host, sealed_pairs(), stranger if who == "caller" else ME)
    assert host.error is not None and target.kept()[1] == ()


def test_a_sender_of_an_older_generation_is_refused_and_may_still_fetch() -> None:
    target = empty_pairs(G2)
    with Host(target, ME) as host, pytest.raises(SlotRefusedError, match="may not write"):
        send(host, sealed_pairs())
    assert target.kept()[1] == ()
    target, source = empty_pairs(), sealed_pairs()
    source.follow(Standing(G2, 3))
    with Host(source, replace(ME, generation=G2)) as host:
        fetch(host, target)
    assert target.kept()[1] == source.kept()[1]


def fetch(host: Host, pairs: SlotPairs, identity: Identity = ME, version: int = 3) -> None:
    link = peer_link.call("127.0.0.1", host.port, identity, SECONDS, SECONDS)
    wish = Wish(writer="f", generation=G1, bundle="b", stamp=Stamp(G1, version), complete=-1, size=0)
    with contextlib.closing(link):
        replication.fetch(link, pairs, wish)


@pytest.mark.parametrize("place", ["table", "extras", "data"])
def test_bits_that_flip_on_the_way_are_never_sealed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = sealed_pairs(), empty_pairs()
    extent = extent_in(source)
    flipped = {"table": 4096, "extras": extent.extras_offset, "data": extent.total - 1}[place]
    send_from = PeerLink.send_from

    def flip(link: PeerLink, memory: Memory, start: int, end: int, pace: Pace | None = None) -> None:
        if start <= flipped < end:
            send_from(link, memory, start, flipped)
            peer_link._send(link._sock, bytes([memory.view[flipped] ^ 4]), SECONDS)
            start = flipped + 1
        send_from(link, memory, start, end)

    monkeypatch.setattr(PeerLink, "send_from", flip)
    with Host(target, ME) as host, pytest.raises(SlotRefusedError, match="changed in memory or on its way"):
        send(host, source)
    assert isinstance(host.error, ProtocolError) and target.kept()[1] == ()


def test_a_frame_that_is_changed_or_comes_twice_ends_the_connection() -> None:
    spoils: list[Callable[[bytes], bytes]] = [
        lambda frame: frame[:5] + bytes([frame[5] ^ 1]) + frame[6:],
        lambda frame: frame + frame,
    ]
    for spoil in spoils:
        ours, theirs = socket.socketpair()
        one, other = (
            PeerLink(sock, b"key", calling=calling, node=0, generation=G1, patience=SECONDS)
            for sock, calling in ((ours, True), (theirs, False))
        )
        middle, far = socket.socketpair()
        one._sock = middle
        one.send(b"an offer")
        ours.sendall(spoil(far.recv(1000)))
        with pytest.raises(ProtocolError, match="changed"):
            other.receive()
            other.receive()
        for sock in (ours, theirs, middle, far):
            sock.close()


def test_bits_that_flipped_in_a_replicas_memory_are_found_when_it_is_fetched() -> None:
    replica, target = empty_pairs(), empty_pairs()
    with Host(replica, ME) as host:
        send(host, sealed_pairs())
    with replica.reading("b", Stamp(G1, 3)) as memory:
        assert memory is not None
        memory.view[extent_in(replica).data_offset + 100] ^= 1
    with Host(replica, ME) as host, pytest.raises(ProtocolError, match="changed"):
        fetch(host, target)
    assert target.kept()[1] == ()


@pytest.mark.parametrize("after", [0, 1, 1 << 20, 2 << 20])
def test_a_sender_that_breaks_off_leaves_the_older_replica_as_it_was(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = empty_pairs()
    with Host(target, ME) as host:
        send(host, sealed_pairs(3))
    send_from = PeerLink.send_from

    def part(link: PeerLink, memory: Memory, start: int, end: int, pace: Pace | None = None) -> None:
        if end > after:
            send_from(link, memory, start, max(start, after))
            raise ConnectionAbortedError("killed")
        send_from(link, memory, start, end)

    monkeypatch.setattr(PeerLink, "send_from", part)
    with Host(target, ME) as host, pytest.raises(ConnectionAbortedError):
        send(host, sealed_pairs(4), version=4)
    monkeypatch.undo()
    assert isinstance(host.error, OSError)
    assert [kept.slot.stamp.version for kept in target.kept()[1]] == [3]
    with Host(target, ME) as host:
        send(host, sealed_pairs(4), version=4)
    assert [kept.slot.stamp.version for kept in target.kept()[1]] == [3, 4]


@pytest.mark.parametrize("moment", ["greeting", "proof", "frame"])
def test_random_bytes_crash_nothing_and_leave_nothing_behind(
    nodes: list[CheckpointNode], moment: str, eventually: Callable[..., object]
) -> None:
    link = nodes[0].link()
    copy(link, 0)
    before = nodes[0].threads()
    for number in range(20):
        with socket.create_connection(("127.0.0.1", nodes[0].port), SECONDS) as sock:
            if moment == "frame":
                peer = peer_link.call("127.0.0.1", nodes[0].port, ME, SECONDS, SECONDS)
                peer.send(os.urandom(number))
                with pytest.raises((OSError, ProtocolError)):
                    peer.receive()
                peer.close()
                continue
            start = peer_link._GREETING if moment == "proof" else b""
            with contextlib.suppress(OSError):
                sock.sendall(start + os.urandom(500 + number))
                while sock.recv(4096):
                    pass
    eventually(lambda: nodes[0].threads() <= before, 10)
    assert read(link, 0)
    assert copy(link, 1, replicas=(1,)) == {}


# --- encrypted -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("identity", [ME, SECRET], ids=["plain", "encrypted"])
def test_an_encrypted_copy_is_the_same_and_nothing_of_it_is_seen_on_the_way(identity: Identity) -> None:
    source, target = sealed_pairs(), empty_pairs()
    with Host(target, identity) as host, Relay(host.port) as relay:
        link = peer_link.call("127.0.0.1", relay.port, identity, SECONDS, SECONDS)
        with contextlib.closing(link):
            replication.replicate(link, source, "b", Stamp(G1, 3), -1)
    with source.reading("b", Stamp(G1, 3)) as one, target.reading("b", Stamp(G1, 3)) as other:
        assert one is not None and other is not None
        end = extent_in(source).total
        assert one.view[4096:end] == other.view[4096:end]
        piece = bytes(one.view[end - 4096 : end - 4064])
    assert len(relay.seen) > SIZE
    assert (piece in relay.seen) is (identity is ME)
    assert (b"extras" in relay.seen) is (identity is ME)


def test_who_sits_between_two_ends_and_speaks_tls_with_both_is_found_out_by_them() -> None:
    target = empty_pairs()

    def wrap(sock: socket.socket, calling: bool) -> socket.socket:
        return cipher.wrapped(sock, calling=calling, seconds=SECONDS)[0]

    found: list[str] = []
    for _ in range(20):  # its two threads share a TLS connection, so that it may hang up before anybody has found out
        refused = pytest.raises((ProtocolError, OSError))
        with Host(target, SECRET) as host, Relay(host.port, wrap) as relay, refused as caller:
            peer_link.call("127.0.0.1", relay.port, SECRET, SECONDS, SECONDS)
        assert host.error is not None and target.kept()[1] == ()
        found += [str(error) for error in (caller.value, host.error) if isinstance(error, ProtocolError)]
        if found:
            break
    assert any("does not know the job's key" in why for why in found)


@pytest.mark.parametrize("plain", ["caller", "host"])
def test_an_end_that_does_not_encrypt_is_refused(plain: str) -> None:
    target = empty_pairs()
    with Host(target, ME if plain == "host" else SECRET) as host, pytest.raises((ProtocolError, OSError)):
        link = peer_link.call("127.0.0.1", host.port, ME if plain == "caller" else SECRET, 1.0, 1.0)
        link.close()
    assert host.error is not None and target.kept()[1] == ()


def test_an_encrypted_copy_is_fetched_too() -> None:
    target, source = empty_pairs(), sealed_pairs()
    with Host(source, SECRET) as host:
        fetch(host, target, SECRET)
    assert target.kept()[1] == source.kept()[1]


# --- pace ------------------------------------------------------------------------------------------------------------


def test_a_node_sends_no_faster_than_it_may_whoever_it_sends_to() -> None:
    now = [100.0]
    pace = Pace(1000, lambda: now[0])
    assert [pace.sent(500), pace.sent(500)] == [0.5, 1.0]
    now[0] += 10
    assert pace.sent(100) == pytest.approx(0.1), "time that was not used is no credit"
    assert Pace(0).sent(1 << 40) == 0.0


def test_a_paced_copy_takes_its_time_and_is_whole() -> None:
    source, target, pace = sealed_pairs(), empty_pairs(), Pace(10 * SIZE)
    began = time.monotonic()
    with Host(target, ME) as host:
        link = peer_link.call("127.0.0.1", host.port, ME, SECONDS, SECONDS)
        with contextlib.closing(link):
            replication.replicate(link, source, "b", Stamp(G1, 3), -1, pace)
    assert 0.1 <= time.monotonic() - began < 1.0
    assert target.kept()[1] == source.kept()[1]
    with source.reading("b", Stamp(G1, 3)) as memory:
        assert memory is not None and (found := header.read(memory.view)) is not None
        assert pace.total == found.extent.total - header.PAGE_BYTES, "table, extras and data, once"


def test_a_paced_sender_leaves_at_once_when_the_link_is_shut() -> None:
    link, far = socket.socketpair()
    sender = PeerLink(link, b"key", calling=True, node=0, generation=G1, patience=SECONDS)
    source = sealed_pairs()
    with source.reading("b", Stamp(G1, 3)) as memory, far:
        assert memory is not None
        threading.Timer(0.2, sender.shut).start()
        began = time.monotonic()
        with pytest.raises(OSError):
            sender.send_from(memory, 0, 4096, Pace(100))
        assert time.monotonic() - began < 5.0
    sender.close()
