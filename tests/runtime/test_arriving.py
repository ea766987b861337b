"""Copies that come from another node as a stream: into tensors of all kinds bit for bit, and never for good when spoilt."""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
from checkpoint_nodes import G1, JOB, SECONDS, CheckpointNode
from hypothesis import given
from hypothesis import strategies as st
from one_rank import MAKES, Rank
from torch import Tensor, nn
from two_ends import PeerAt, Relay, breaks_off, flips

from phoenix_launch.checkpoint.client import SlotsLink
from phoenix_launch.checkpoint.header import PAGE_BYTES, Extent
from phoenix_launch.checkpoint.layout import Layout
from phoenix_launch.checkpoint.pairs import SlotRefusedError
from phoenix_launch.checkpoint.streams import StreamReader, StreamWriter
from phoenix_launch.copies import Source, SourceKind, Stamp
from phoenix_launch.local_messages import SlotStream, SlotStreamed
from phoenix_launch.messages import Ground
from phoenix_runtime import TrainState
from phoenix_runtime.checkpoint.arriving import arrive
from phoenix_runtime.checkpoint.bundles import bundled, replicated
from phoenix_runtime.checkpoint.copier import Copier
from phoenix_runtime.checkpoint.filling import Footing
from phoenix_runtime.checkpoint.memory import DataSum, bytes_of, data_sum, entry
from phoenix_runtime.checkpoint.private import Private
from phoenix_runtime.checkpoint.restore import restore
from phoenix_runtime.communicators.gate import Gate

MIDDLE = 1 << 20  # of what a node sends of a large rank: within the data
STAMP = Stamp(G1, 1)
DAMAGED = "was damaged in memory: another copy is taken"


@given(st.lists(st.integers(0, 20_000), max_size=12), st.integers(0, 2**32))
def test_a_sum_of_pieces_is_that_of_the_whole(sizes: list[int], seed: int) -> None:
    data = memoryview(bytearray(hashlib.shake_128(seed.to_bytes(5, "little")).digest(sum(sizes))))
    pieces, start = DataSum(len(data)), 0
    for size in sizes:
        pieces.update(data[start : start + size])
        start += size
    assert pieces.hexdigest() == data_sum(data)


# --- tensors ---------------------------------------------------------------------------------------------------------


def targets() -> dict[str, list[Tensor]]:
    return {
        "nothing": [],
        "only empty ones": [torch.empty(0, 3), torch.empty(4, 0, dtype=torch.int8)],
        "scalars": [torch.tensor(0.0), torch.tensor(0, dtype=torch.int64), torch.tensor(False)],
        "turned": [torch.zeros(40, 60).t(), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)],
        "every second": [torch.zeros(1 << 19)[::2], torch.zeros(3, dtype=torch.complex64)],
        "of odd sizes": [torch.zeros(size, dtype=torch.uint8) for size in (1, 8191, 8192, 8193, 0, 65_537, 3 << 20, 7)],
        "many": [torch.zeros(3) for _ in range(3000)],
        "of all types": [torch.zeros(999, dtype=it) for it in (torch.bfloat16, torch.float64, torch.int16, torch.bool)],
    }


class Coming:
    """A copy that is sent to this process, by a thread, as a server would."""

    def __init__(self, tensors: list[Tensor], *, summed: bool, flip: int = -1) -> None:
        self.layout = Layout.of(entry(str(number), tensor) for number, tensor in enumerate(tensors))
        torch.manual_seed(len(tensors))
        self.data = memoryview(bytearray(torch.randint(0, 2, (self.layout.size,), dtype=torch.uint8).tolist()))
        end = 0
        for row in self.layout.tensors:
            self.data[end : row.offset] = bytes([7]) * (row.offset - end)  # what lies between is summed, too
            end = row.offset + row.size
        extent = Extent(len(self.layout.table), 0, self.layout.size)
        head = bytearray(extent.data_offset - PAGE_BYTES)
        head[: extent.table] = self.layout.table
        digest = data_sum(self.data) if summed else ""
        crc = 0 if summed else zlib.crc32(self.data)
        said = SlotStream("b", STAMP, self.layout.digest, digest, extent.table, 0, extent.data)
        last = SlotStreamed("b", STAMP, hashlib.blake2b(head).digest(), crc)
        sent = bytearray(self.data)
        if flip >= 0:
            sent[flip] ^= 4
        self._writer = StreamWriter(SECONDS)
        descriptor = os.dup(self._writer.far)
        self._writer.handed_over()
        self._thread = threading.Thread(target=self._send, args=(memoryview(head), memoryview(sent)))
        self._thread.start()
        self.reader = StreamReader(descriptor, said, SECONDS, lambda: last)

    def _send(self, head: memoryview, data: memoryview) -> None:
        with closing(self._writer) as writer:
            writer.write(head)
            writer.write(data)

    def close(self) -> None:
        self.reader.close()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("summed", [True, False], ids=["summed", "crc"])
@pytest.mark.parametrize("kind", targets())
def test_tensors_of_every_kind_get_what_comes_and_stay_where_they_are(kind: str, summed: bool) -> None:
    tensors = targets()[kind]
    places = [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]
    with closing(Coming(tensors, summed=summed)) as coming:
        assert arrive(coming.reader, tensors)
    assert places == [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]
    for row, tensor in zip(coming.layout.tensors, tensors, strict=True):
        assert bytes(bytes_of(tensor.contiguous())) == bytes(coming.data[row.offset : row.offset + row.size])


@pytest.mark.parametrize("summed", [True, False], ids=["summed", "crc"])
@pytest.mark.parametrize("place", ["first", "between rows", "last"])
def test_a_flipped_bit_is_found_wherever_it_is(place: str, summed: bool) -> None:
    tensors = targets()["of odd sizes"]
    layout = Layout.of(entry(str(number), tensor) for number, tensor in enumerate(tensors))
    flip = {"first": 0, "between rows": layout.tensors[1].offset - 1, "last": layout.size - 1}[place]
    with closing(Coming(tensors, summed=summed, flip=flip)) as coming:
        assert not arrive(coming.reader, tensors)


# --- ranks -----------------------------------------------------------------------------------------------------------


def large(model: nn.Module) -> None:
    model.large = nn.Linear(1024, 1024)


@pytest.fixture
def ranks(start_node: Callable[[int], CheckpointNode]) -> Iterator[Callable[..., Rank]]:
    """`ranks(node, ...)`: a rank on this node."""
    made: list[Rank] = []

    def make(*arguments: Any, **options: Any) -> Rank:
        made.append(Rank(*arguments, **options))
        return made[-1]

    yield make
    for rank in made:
        rank.copier.end()


@pytest.mark.parametrize("replicas", [0, 1], ids=["without a sum", "with a sum"])
@pytest.mark.parametrize("name", MAKES)
def test_a_new_process_on_another_node_goes_on_bit_for_bit(
    start_node: Callable[[int], CheckpointNode], ranks: Callable[..., Rank], name: str, replicas: int
) -> None:
    nodes = [start_node(index) for index in range(3)]
    for node in nodes:
        node.follow(G1, nodes)
    rank = ranks(nodes[0], MAKES[name], others=nodes[1 : 1 + replicas])
    rank.step()
    rank.step()
    expected = rank.bits()
    rank.step()
    again = ranks(nodes[2], MAKES[name], seed=1)
    again.restore(2, SourceKind.OTHER_NODE, replicas)
    assert again.bits() == expected and again.state.step == 2
    again.step()
    assert again.bits() == rank.bits()
    assert {kept.slot.stamp.version for kept in nodes[2].until_kept(("private 0", 2), ("rank 0", 2)).kept} == {2}


@pytest.mark.parametrize("replicas", [0, 1], ids=["without a sum", "with a sum"])
@pytest.mark.parametrize(
    ("change", "remarks"), [(breaks_off(MIDDLE), 0), (flips(MIDDLE), 1)], ids=["breaks off", "a bit flips"]
)
def test_when_a_stream_is_spoilt_in_the_middle_the_next_node_is_asked_and_without_one_it_is_refused(
    start_node: Callable[[int], CheckpointNode],
    ranks: Callable[..., Rank],
    capsys: pytest.CaptureFixture[str],
    change: Callable[[int, bytes], bytes | None],
    remarks: int,
    replicas: int,
) -> None:
    first, second, fresh = (start_node(index) for index in range(3))
    for node in (first, second):
        node.follow(G1, [first, second])
    with Relay(first.port, change=change) as relay:
        fresh.follow(G1, [PeerAt(relay.port, 0), PeerAt(second.port, 1), PeerAt(first.port, 7)])
        rank = ranks(first, MAKES["adam"], change=large, others=[second][:replicas])
        rank.step()
        expected = rank.bits()
        rank.step()
        again = ranks(fresh, MAKES["adam"], seed=1, change=large)
        capsys.readouterr()
        again.restore(1, SourceKind.OTHER_NODE, 0, nodes=(1 if replicas else 7,))
        assert again.bits() == expected
        assert capsys.readouterr().err.count(DAMAGED) == remarks
        with pytest.raises(SlotRefusedError, match="damaged" if remarks else "closed the connection|reset by peer"):
            again.restore(1, SourceKind.OTHER_NODE, 0, nodes=())


def test_a_rank_that_is_ahead_goes_back_by_a_stream_to_before_its_optimizer_had_a_state(
    start_node: Callable[[int], CheckpointNode], ranks: Callable[..., Rank]
) -> None:
    nodes = [start_node(index) for index in range(2)]
    for node in nodes:
        node.follow(G1, nodes)
    rank = ranks(nodes[0], MAKES["adam"])
    before = rank.bits()
    rank.step()
    ahead = ranks(nodes[1], MAKES["adam"])
    (ahead.model(torch.ones(3, 6)) ** 2).mean().backward()
    ahead.optimizer.step()
    assert ahead.optimizer.state
    ahead.restore(0, SourceKind.OTHER_NODE, 0)
    assert ahead.bits() == before and not ahead.optimizer.state


def test_what_several_ranks_of_a_node_share_is_brought_to_it_once(
    start_node: Callable[[int], CheckpointNode],
) -> None:
    nodes = [start_node(index) for index in range(2)]
    for node in nodes:
        node.follow(G1, nodes)

    def made(fill: float) -> TrainState:
        model = nn.Linear(30, 20)
        replicated(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(fill)
        return TrainState(model=model)

    state = made(3.0)
    copier = Copier(JOB, 0, Gate(), None)
    alone = Ground({0: 0, 1: 7}, ((0, "a"), (7, "b")), (nodes[0].peer,), replicas=0)
    copier.resume(Footing(G1, alone, 0, nodes[0].path))
    copier.begin(STAMP, bundled(state, 0, 2), Private(state.capture(), 1))
    copier.wait(lambda: None)
    copier.end()

    def load(rank: int) -> TrainState:
        link, found = SlotsLink(nodes[1].path, JOB, 1), made(0.0)
        link.generation = G1
        with closing(link):
            sources = [Source("ranks 0-1", SourceKind.OTHER_NODE, 0)]
            restore(found, sources, STAMP, link, rank=rank, world=2, beside=(1 - rank,))
        return found

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(load, range(2)):
            assert all(bool((parameter == 3.0).all()) for parameter in found.model.parameters())
    nodes[1].until_kept(("ranks 0-1", 1))
