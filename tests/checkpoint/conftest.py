"""Checkpoint servers that a test starts and that always end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from checkpoint_nodes import G1, CheckpointNode


@pytest.fixture
def start_node() -> Iterator[Callable[..., CheckpointNode]]:
    """`start_node(index)` starts a server that knows nothing yet; `memory`: for all its copies."""
    started: list[CheckpointNode] = []

    def start(index: int, memory: int = 0) -> CheckpointNode:
        started.append(CheckpointNode(index, memory=memory))
        return started[-1]

    yield start
    for node in started:
        node.end()


@pytest.fixture
def node(start_node: Callable[[int], CheckpointNode]) -> CheckpointNode:
    """One server, in the first generation."""
    node = start_node(0)
    node.follow(G1)
    return node


@pytest.fixture
def nodes(start_node: Callable[[int], CheckpointNode]) -> list[CheckpointNode]:
    """Two servers that know each other, in the first generation."""
    nodes = [start_node(index) for index in range(2)]
    for node in nodes:
        node.follow(G1, nodes)
    return nodes
