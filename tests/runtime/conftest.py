"""Checkpoint servers that a test of copies starts and that always end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from checkpoint_nodes import CheckpointNode


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
