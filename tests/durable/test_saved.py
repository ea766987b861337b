"""What nodes save of their memory when a job must stop: the newest version that all of it together has is found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from phoenix_launch.checkpoint import saved
from phoenix_launch.checkpoint.layout import Entry, Layout
from phoenix_launch.checkpoint.pairs import SlotPairs, SlotRefusedError, Standing, Wish
from phoenix_launch.checkpoint.saved import SavedSlot
from phoenix_launch.checkpoint.slots import SlotWriter, slot_size
from phoenix_launch.copies import Stamp
from phoenix_launch.job.commit import Lineage
from phoenix_launch.wire import Generation

JOB, SIZE = "train-1a2b", 3000
G1, G2 = Generation(1, 1), Generation(1, 2)
LAYOUT = Layout.of([Entry("w", "uint8", (SIZE,), SIZE)])


class Node:
    """One that keeps slots."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pairs = SlotPairs(JOB)
        self.pairs.follow(Standing(G1))

    def keep(self, bundle: str, version: int, generation: Generation = G1) -> None:
        wish = Wish(
            writer=bundle, generation=generation, bundle=bundle, stamp=Stamp(generation, version), complete=version - 1,
            size=slot_size(LAYOUT, 5),
        )  # fmt: skip
        grant = self.pairs.begin(wish, 0.0)
        assert grant is not None
        writer = SlotWriter(grant.memory.descriptor)
        writer.begin(JOB, bundle, wish.stamp, LAYOUT, b"extra")[:] = bytes([version]) * SIZE
        writer.seal()
        writer.close()
        self.pairs.seal(grant)

    def save(self, root: Path, world: int = 2) -> Path:
        return saved.save(self.pairs, root, self.number, world)


@pytest.fixture
def nodes() -> tuple[Node, Node]:
    """Two ranks, replicas of each other's private bundles. The second node is one version ahead."""
    first, second = Node(0), Node(1)
    for node in (first, second):
        for version in (4, 5):
            for bundle in ("ranks 0-1", "private 0", "private 1"):
                node.keep(bundle, version)
    for bundle in ("ranks 0-1", "private 1"):
        second.keep(bundle, 6)
    return first, second


def test_the_newest_version_that_everybody_has_is_read_back(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    for node in nodes:
        node.save(tmp_path)
    found = saved.newest(tmp_path, 2)
    assert found is not None and (found.version, found.job, found.world) == (5, JOB, 2)
    reader = found.read("private 1", Stamp(G1, 5))
    assert bytes(reader.tensor(reader.layout.tensors[0])) == bytes([5]) * SIZE and bytes(reader.extras) == b"extra"
    reader.close()
    assert saved.newest(tmp_path, 3) is None, "of another number of ranks"


def test_one_node_has_enough_when_it_keeps_the_others_replicas(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    nodes[0].save(tmp_path)
    found = saved.newest(tmp_path, 2)
    assert found is not None and found.version == 5


def test_a_rank_that_nobody_knows_of_makes_it_useless(tmp_path: Path) -> None:
    node = Node(0)
    for bundle in ("ranks 0-1", "private 0"):
        node.keep(bundle, 5)
    node.save(tmp_path)
    assert saved.newest(tmp_path, 2) is None


def test_what_became_void_is_not_saved(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    for node in nodes:
        node.pairs.follow(Standing(G2, 4, Lineage((Stamp(G2, 4),))))
        node.save(tmp_path)
    found = saved.newest(tmp_path, 2)
    assert found is not None and found.version == 4


def test_a_damaged_copy_is_passed_over_for_another_one(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    for node in nodes:
        node.save(tmp_path)
    found = saved.newest(tmp_path, 2)
    assert found is not None
    copies = [path for path, _ in found.copies["private 0"]]
    assert len(copies) == 2
    for path in copies:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        if path is copies[0]:
            found.read("private 0", Stamp(G1, 5)).close()
    with pytest.raises(SlotRefusedError, match="has no whole copy of bundle 'private 0'"):
        found.read("private 0", Stamp(G1, 5))


def test_what_is_half_saved_is_not_found(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    folder = nodes[0].save(tmp_path)
    folder.rename(folder.with_name(".node-0.pending"))
    assert saved.newest(tmp_path, 2) is None


def test_a_checkpoint_that_is_newer_makes_it_go(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    nodes[0].save(tmp_path)
    saved.forget(tmp_path, 4)
    assert saved.newest(tmp_path, 2) is not None
    saved.forget(tmp_path, 5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kept", "version"),
    [
        ({}, None),
        ({3: {"private 0", "rank 0"}}, 3),
        ({3: {"private 0", "rank 0"}, 4: {"private 0"}}, 3),
        ({3: {"rank 0"}, 4: {"private 0"}}, None),
    ],
)
def test_a_version_counts_when_it_has_every_bundle(kept: dict[int, set[str]], version: int | None) -> None:
    slots = [SavedSlot(bundle, Stamp(G1, number), "", 0) for number, bundles in kept.items() for bundle in bundles]
    assert saved.newest_version(slots, 1) == version
