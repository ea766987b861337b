"""Several workers of a node fill one slot: it is whole when all slices are there, and nothing when one is missing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpoint_nodes import G1, G2, JOB, SECONDS, CheckpointNode, copy, read

from phoenix_launch.checkpoint.client import SlotsLink
from phoenix_launch.checkpoint.layout import Entry, Layout
from phoenix_launch.checkpoint.pairs import SlotRefusedError
from phoenix_launch.checkpoint.slots import SlotWriter, slot_size
from phoenix_launch.copies import Stamp

LAYOUT = Layout.of([Entry(f"w{number}", "uint8", (4096,), 4096) for number in range(4)])
SIZE = slot_size(LAYOUT, 0)
PARTS = 2


def begin(link: SlotsLink, version: int, part: int, parts: int = PARTS) -> SlotWriter | None:
    return link.fill("b", Stamp(G1, version), SIZE, 0, part, parts)


def store(writer: SlotWriter, version: int, part: int, parts: int = PARTS) -> None:
    stamp = Stamp(G1, version)
    data = writer.begin(JOB, "b", stamp, LAYOUT) if part == 0 else writer.join(LAYOUT)
    rows = LAYOUT.tensors[part * 4 // parts : (part + 1) * 4 // parts]
    for row in rows:
        data[row.offset : row.offset + row.size] = bytes([version + 1]) * row.size


def fill(link: SlotsLink, version: int, part: int, parts: int = PARTS) -> dict[int, SlotRefusedError]:
    writer = begin(link, version, part, parts)
    if writer is not None:
        store(writer, version, part, parts)
        if parts == 1:
            writer.seal()
    link.sealed("b", Stamp(G1, version))
    return link.copied("b", Stamp(G1, version), [0])


def content(link: SlotsLink, version: int) -> set[int]:
    with contextlib.closing(link.read("b", Stamp(G1, version))) as reader:
        return set(reader.data)


@pytest.fixture
def links(node: CheckpointNode) -> list[SlotsLink]:
    return [node.link(), node.link()]


def test_a_slot_is_sealed_when_all_slices_are_there(node: CheckpointNode, links: list[SlotsLink]) -> None:
    for version in range(4):
        for link in links:
            link.complete = version - 1
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda part, v=version: fill(links[part], v, part), range(2))) == [{}, {}]
        assert content(links[0], version) == {version + 1}
    node.until_kept(("b", 2), ("b", 3))


def test_as_long_as_a_slice_is_missing_there_is_no_copy(links: list[SlotsLink]) -> None:
    first = begin(links[0], 0, 0)
    assert first is not None
    store(first, 0, 0)
    links[0].sealed("b", Stamp(G1, 0))
    with pytest.raises(SlotRefusedError, match="does not keep it"):
        links[1].read("b", Stamp(G1, 0))
    assert fill(links[1], 0, 1) == {} == links[0].copied("b", Stamp(G1, 0), [0])
    assert content(links[1], 0) == {1}


def test_a_slice_without_a_head_is_no_copy(links: list[SlotsLink]) -> None:
    """Part 0, which writes it, says that it has stored, and has not."""
    assert begin(links[0], 0, 0) is not None
    links[0].sealed("b", Stamp(G1, 0))
    assert "does not hold a whole copy" in fill(links[1], 0, 1)[0].message
    assert "does not hold a whole copy" in links[0].copied("b", Stamp(G1, 0), [0])[0].message


def test_when_a_worker_goes_the_others_hear_that_their_slices_are_of_no_use(links: list[SlotsLink]) -> None:
    first, second = begin(links[0], 0, 0), begin(links[1], 0, 1)
    assert first is not None and second is not None
    store(first, 0, 0)
    links[0].sealed("b", Stamp(G1, 0))
    links[1].close()
    assert "do not come together" in links[0].copied("b", Stamp(G1, 0), [0])[0].message
    assert fill(links[0], 0, 0, parts=1) == {}
    assert len(content(links[0], 0)) == 1


def test_who_writes_the_whole_takes_over_and_late_slices_harm_nothing(
    node: CheckpointNode, links: list[SlotsLink]
) -> None:
    slow = begin(links[1], 0, 0)
    assert slow is not None
    assert copy(links[0], 0) == {}
    store(slow, 5, 0)  # it stores into memory that nobody looks at
    links[1].sealed("b", Stamp(G1, 0))
    assert "do not come together" in links[1].copied("b", Stamp(G1, 0), [0])[0].message
    assert read(links[0], 0)


def test_slices_of_an_older_generation_are_void(node: CheckpointNode, links: list[SlotsLink]) -> None:
    writer = begin(links[0], 0, 0)
    assert writer is not None
    store(writer, 0, 0)
    links[0].sealed("b", Stamp(G1, 0))
    node.follow(G2)
    node.until_generation(G2)
    with pytest.raises(SlotRefusedError, match="may not write"):
        begin(links[1], 0, 1)
    node.until_kept()


def test_many_versions_by_four_workers_are_all_whole(node: CheckpointNode, eventually: Callable[..., object]) -> None:
    links = [node.link() for _ in range(4)]
    meeting = threading.Barrier(4, timeout=SECONDS)

    def work(part: int) -> None:
        for version in range(50):
            links[part].complete = version - 1
            assert fill(links[part], version, part, 4) == {}
            meeting.wait()
            assert part or content(links[0], version) == {version + 1}
            meeting.wait()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    node.until_kept(("b", 48), ("b", 49))
