"""Checkpoint servers that a test of copies starts and that always end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from checkpoint_nodes import CheckpointNode


@pytest.fixture
def start_node() -> Iterator[Callable[[int], CheckpointNode]]:
    """`start_node(index)` starts a server that knows nothing yet."""
    started: list[CheckpointNode] = []

    def start(index: int) -> CheckpointNode:
        started.append(CheckpointNode(index))
        return started[-1]

    yield start
    for node in started:
        node.end()
