"""What a node passes on from another to a worker: whole or refused, and nothing of it is kept or left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from checkpoint_nodes import G1, G2, JOB, SECONDS, CheckpointNode, content, copy, layout, read
from two_ends import ME, SECRET, SIZE, Host, PeerAt, Relay, breaks_off, flips, sealed_pairs

from phoenix_launch.checkpoint import peer_link, replication
from phoenix_launch.checkpoint.client import SlotsLink
from phoenix_launch.checkpoint.header import Extent, Label
from phoenix_launch.checkpoint.layout import Layout
from phoenix_launch.checkpoint.pairs import SlotRefusedError
from phoenix_launch.checkpoint.peer_link import Identity
from phoenix_launch.checkpoint.slots import slot_size
from phoenix_launch.checkpoint.streams import StreamReader, StreamWriter
from phoenix_launch.copies import Stamp
from phoenix_launch.errors import ProtocolError
from phoenix_launch.local_messages import SlotStream, SlotStreamed

LARGE = 32 << 20  # more than a pipe and two sockets hold
AT_G1 = Stamp(G1, 3)


def test_a_node_passes_on_what_another_keeps_and_keeps_nothing_of_it(nodes: list[CheckpointNode]) -> None:
    assert copy(nodes[0].link(), 3, size=SIZE) == {}
    link = nodes[1].link()
    assert read(link, 3, node=0) > SIZE
    assert read(link, 3, node=0) > SIZE
    assert copy(link, 3, bundle="c") == {}
    nodes[1].until_kept(("c", 3))
    with pytest.raises(SlotRefusedError, match="not here"):
        read(link, 2, node=0)
    nodes[0].kill()
    with pytest.raises(SlotRefusedError):
        read(link, 3, node=0)
    assert read(link, 3, bundle="c", node=0)


def test_workers_of_a_node_are_served_at_once(nodes: list[CheckpointNode]) -> None:
    link = nodes[0].link()
    for bundle in ("b", "c"):
        assert copy(link, 3, bundle=bundle, size=SIZE) == {}
    links = [nodes[1].link() for _ in range(4)]
    streams = [each.read("bc"[number % 2], AT_G1, 0) for number, each in enumerate(links)]
    for stream in streams:
        stream.close()
    with ThreadPoolExecutor(len(links)) as pool:
        sizes = pool.map(lambda pair: read(pair[1], 3, node=0, bundle="bc"[pair[0] % 2]), enumerate(links))
    assert min(sizes) > SIZE


def test_a_copy_without_any_data_is_passed_on(nodes: list[CheckpointNode]) -> None:
    link, empty = nodes[0].link(), Layout.of([])
    writer = link.fill("b", AT_G1, slot_size(empty, 6))
    assert writer is not None
    assert not len(writer.begin(JOB, "b", AT_G1, empty, b"extras"))
    writer.seal()
    link.sealed("b", AT_G1)
    assert link.copied("b", AT_G1, [0]) == {}
    assert read(nodes[1].link(), 3, node=0) == 0


def test_for_whom_the_extras_are_enough_the_data_is_read_through(nodes: list[CheckpointNode]) -> None:
    assert copy(nodes[0].link(), 3, size=SIZE) == {}
    link = nodes[1].link()
    with closing(link.read("b", AT_G1, 0)) as stream:
        assert isinstance(stream, StreamReader)
        with pytest.raises(AssertionError):
            assert stream.extras
        stream.skip()
        assert bytes(stream.extras) == b"extras"
    assert read(link, 3, node=0) > SIZE


def test_a_slot_is_not_overwritten_before_the_worker_has_all_of_it(nodes: list[CheckpointNode]) -> None:
    """What is in the pipe may be that slot's own memory."""
    first, size = nodes[0].link(), 64 << 10
    assert copy(first, 3, size=size) == {}
    assert copy(first, 4, size=size) == {}
    first.complete = 4
    with closing(nodes[1].link().read("b", AT_G1, 0)) as stream, ThreadPoolExecutor(1) as pool:
        assert isinstance(stream, StreamReader)
        copied = pool.submit(copy, first, 5, size=size)
        with pytest.raises(TimeoutError):
            copied.result(0.5)
        data = memoryview(bytearray(stream.size))
        stream.fill(data)
        stream.end()
        row = stream.layout.tensors[0]
        assert bytes(data[row.offset : row.offset + row.size]) == content(3, size)
        assert copied.result(SECONDS) == {}


# --- what breaks -----------------------------------------------------------------------------------------------------


def quiet(nodes: list[CheckpointNode], link: SlotsLink, eventually: Callable[..., object]) -> list[tuple[int, int]]:
    """Threads and descriptors of both servers, when a copy has gone from the first to this worker of the second."""
    threads = nodes[0].threads()
    assert read(link, 3, node=0) > LARGE
    eventually(lambda: nodes[0].threads() == threads)
    return [(node.threads(), node.descriptors()) for node in nodes]


def test_a_worker_that_gives_a_stream_up_can_go_on_and_leaves_nothing_open(
    nodes: list[CheckpointNode], eventually: Callable[..., object]
) -> None:
    assert copy(nodes[0].link(), 3, size=LARGE) == {}
    link = nodes[1].link()
    before = quiet(nodes, link, eventually)
    for _ in range(3):
        stream = link.read("b", AT_G1, 0)
        assert isinstance(stream, StreamReader)
        stream.fill(memoryview(bytearray(SIZE)))
        stream.close()
    assert read(link, 3, node=0) > LARGE
    eventually(lambda: [(node.threads(), node.descriptors()) for node in nodes] == before)


WORKER = """
import sys
from checkpoint_nodes import *
link = SlotsLink(sys.argv[1], JOB, 1, SECONDS)
link.generation = G1
stream = link.read("b", Stamp(G1, 3), 0)
stream.fill(memoryview(bytearray(1 << 20)))
print("there", flush=True)
sys.stdin.readline()
"""


def test_a_worker_that_is_killed_in_the_middle_leaves_nothing_open_and_frees_the_slot_it_read_from(
    nodes: list[CheckpointNode], eventually: Callable[..., object]
) -> None:
    link = nodes[0].link()
    assert copy(link, 3, size=LARGE) == {}
    before = quiet(nodes, nodes[1].link(), eventually)
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, nodes[1].path],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    nodes[1].follow(G1, nodes, workers=(os.getpid(), process.pid))
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        process.send_signal(signal.SIGKILL)
    eventually(lambda: [(node.threads(), node.descriptors()) for node in nodes] == before)
    for version in (4, 5):
        link.complete = version - 1
        assert copy(link, version, size=4096) == {}


def test_a_node_that_dies_in_the_middle_is_told_and_the_next_one_can_be_asked(
    start_node: Callable[[int], CheckpointNode],
) -> None:
    nodes = [start_node(index) for index in range(3)]
    for node in nodes:
        node.follow(G1, nodes)
    assert copy(nodes[0].link(), 3, size=LARGE, replicas=(1,)) == {}
    link = nodes[2].link()
    with closing(link.read("b", AT_G1, 0)) as stream:
        assert isinstance(stream, StreamReader)
        nodes[0].kill()
        with pytest.raises(SlotRefusedError, match=r"closed the connection|reset by peer"):
            stream.fill(memoryview(bytearray(stream.size)))
    assert read(link, 3, node=1) > LARGE


def test_a_server_that_dies_in_the_middle_is_noticed(nodes: list[CheckpointNode]) -> None:
    assert copy(nodes[0].link(), 3, size=LARGE) == {}
    with closing(nodes[1].link().read("b", AT_G1, 0)) as stream:
        assert isinstance(stream, StreamReader)
        nodes[1].kill()
        with pytest.raises(OSError, match=r"checkpoint server is gone|reset by peer"):
            stream.fill(memoryview(bytearray(stream.size)))


@pytest.mark.parametrize("change", [breaks_off(SIZE // 2), None], ids=["breaks off", "never comes"])
def test_a_stream_that_does_not_come_to_its_end_is_refused_and_the_node_itself_can_be_asked(
    nodes: list[CheckpointNode], change: Callable[[int, bytes], bytes | None] | None
) -> None:
    assert copy(nodes[0].link(), 3, size=SIZE) == {}
    with Relay(nodes[0].port, change=change or breaks_off(0)) as relay:
        nodes[1].follow(G2, [PeerAt(relay.port, 0), PeerAt(nodes[0].port, 7)], resume=3, lineage=(Stamp(G2, 3),))
        nodes[1].until_generation(G2)
        link = nodes[1].link(G2)
        with pytest.raises(SlotRefusedError, match=r"closed the connection|reset by peer"):
            read(link, 3, node=0)
        assert read(link, 3, node=7) > SIZE


def test_a_worker_that_does_not_take_a_copy_is_given_up_in_time() -> None:
    stream = StreamWriter(0.05)
    with closing(stream), pytest.raises(TimeoutError, match="does not take"):
        stream.write(memoryview(bytearray(SIZE)))
    ours, theirs = os.pipe()
    said = SlotStream("b", AT_G1, layout().digest, "", 1, 0, 1)
    with os.fdopen(theirs, "wb"), pytest.raises(TimeoutError, match="does not go on"):
        StreamReader(ours, said, 0.05, lambda: SlotStreamed("b", AT_G1, b"", 0))


# --- the two ends in one process -------------------------------------------------------------------------------------


class Passed:
    """A copy on its way from a host through a server to a worker, all in this process."""

    def __init__(self, port: int, identity: Identity = ME, patience: float = SECONDS) -> None:
        self.port, self.identity, self.patience = port, identity, patience
        self.begun: Future[tuple[int, Label, Extent]] = Future()
        self.over: Future[tuple[bytes, int]] = Future()
        threading.Thread(target=self._run).start()

    def _run(self) -> None:
        try:
            link = peer_link.call("127.0.0.1", self.port, self.identity, SECONDS, self.patience)
            with closing(link):
                self.over.set_result(replication.relay(link, "b", AT_G1, self._begin))
        except Exception as error:
            self.over.set_exception(error)
            if not self.begun.done():
                self.begun.set_exception(error)

    def _begin(self, label: Label, extent: Extent) -> StreamWriter:
        stream = StreamWriter(SECONDS)
        self.begun.set_result((os.dup(stream.far), label, extent))
        stream.handed_over()
        return stream

    def reader(self) -> StreamReader:
        descriptor, label, extent = self.begun.result(SECONDS)
        sizes = (extent.table, extent.extras, extent.data)
        said = SlotStream("b", AT_G1, label.layout, label.data_sum, *sizes)
        return StreamReader(descriptor, said, SECONDS, lambda: SlotStreamed("b", AT_G1, *self.over.result(SECONDS)))


@pytest.mark.parametrize("identity", [ME, SECRET], ids=["plain", "encrypted"])
def test_a_copy_that_is_passed_on_is_the_same_in_every_byte(identity: Identity) -> None:
    with Host(sealed_pairs(), identity) as host:
        stream = Passed(host.port, identity).reader()
        data = memoryview(bytearray(stream.size))
        stream.fill(data)
        stream.end()
    assert bytes(stream.extras) == b"extras" and stream.layout == layout(SIZE)
    row = stream.layout.tensors[0]
    assert bytes(data[row.offset : row.offset + row.size]) == content(3, SIZE)
    assert stream.data_crc == zlib.crc32(data) and not stream.data_sum
    stream.close()
    assert host.error is None


@pytest.mark.parametrize("place", ["table", "extras", "data"])
def test_bits_that_flip_on_the_way_are_found_by_one_of_the_ends(place: str) -> None:
    with Host(sealed_pairs(), ME) as host, Relay(host.port) as relay, closing(Passed(relay.port).reader()) as stream:
        stream.skip()
    head = relay.said.index(layout(SIZE).table)
    flipped = {"table": head + 3, "extras": relay.said.rindex(b"extras"), "data": head + SIZE // 2}[place]
    with Host(sealed_pairs(), ME) as host, Relay(host.port, change=flips(flipped)) as relay:
        passed = Passed(relay.port)
        if place == "table":
            with pytest.raises(ProtocolError, match="changed in memory or on its way"):
                passed.begun.result(SECONDS)
            return
        with closing(passed.reader()) as stream:
            data = memoryview(bytearray(stream.size))
            stream.fill(data)
            if place == "extras":
                with pytest.raises(ProtocolError, match="changed in memory or on its way"):
                    stream.end()
            else:
                stream.end()
                assert stream.data_crc != zlib.crc32(data)


@pytest.mark.parametrize("what", ["table", "extras"])
def test_bits_that_flip_between_server_and_worker_are_found_by_the_worker(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = StreamWriter.write

    def flip(stream: StreamWriter, data: memoryview) -> None:
        place = 3 if what == "table" else bytes(data[:8192]).find(b"extras")
        changed = bytearray(data)
        if place >= 0:
            changed[place] ^= 4
        monkeypatch.setattr(StreamWriter, "write", write)
        write(stream, memoryview(changed))

    monkeypatch.setattr(StreamWriter, "write", flip)
    with Host(sealed_pairs(), ME) as host:
        passed = Passed(host.port)
        with pytest.raises(SlotRefusedError, match="changed on its way"), closing(passed.reader()) as stream:
            stream.skip()


def test_a_node_that_stands_still_in_the_middle_is_given_up_in_time() -> None:
    held = threading.Event()

    def stop(place: int, data: bytes) -> bytes:
        if place > SIZE // 2:
            held.wait(SECONDS)
        return data

    with Host(sealed_pairs(), ME) as host, Relay(host.port, change=stop) as relay, ExitStack() as last:
        last.callback(held.set)
        stream = last.enter_context(closing(Passed(relay.port, patience=0.1).reader()))
        with pytest.raises(TimeoutError, match="stands still"):
            stream.fill(memoryview(bytearray(stream.size)))


def test_an_answer_is_not_taken_for_that_on_a_copy_that_was_given_up(nodes: list[CheckpointNode]) -> None:
    """The word on the first stream comes late; the second one is of the same copy, from another node."""
    assert copy(nodes[0].link(), 3, size=LARGE, replicas=(1,)) == {}
    link: SlotsLink = nodes[1].link()
    for _ in range(5):
        link.read("b", AT_G1, 0).close()
        assert read(link, 3, node=0) > LARGE
