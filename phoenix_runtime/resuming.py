"""What a plan says to a worker about the state that all resume with: whether it is enough to go on, and what is where."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping

import msgspec

from phoenix_launch.checkpoint.client import SlotsLink
from phoenix_launch.copies import Source
from phoenix_launch.local_messages import WorkerPlan
from phoenix_runtime.checkpoint import bundles
from phoenix_runtime.state import Captured, TrainState


def open_slots(plan: WorkerPlan) -> SlotsLink:
    """A connection to the node's checkpoint server, for reading. Raises OSError."""
    slots = SlotsLink(plan.slots, os.environ["PHOENIX_JOB"], plan.node)
    slots.generation = plan.generation
    return slots


def private_source(plan: WorkerPlan, rank: int) -> Source:
    """Where this rank's private bundle is. Raises RuntimeError when the plan does not say."""
    key = bundles.private_bundle(rank).key
    for source in plan.sources:
        if source.bundle == key:
            return source
    raise RuntimeError(f"the plan names no copy of the private bundle of rank {rank}")


def put_back(state: TrainState, captured: Captured) -> None:
    state.reset_gradients(captured)
    state.restore(captured)


def can_copy(plan: WorkerPlan) -> bool:
    if plan.ground is None or not plan.slots:
        return False
    return set(plan.ground.places.values()) <= {server.node for server in plan.ground.servers}


def can_restore(plan: WorkerPlan) -> bool:
    """It says at which version to resume, and where this rank's copies of it are."""
    return plan.resumption is not None and plan.resumption.stamp is not None and bool(plan.slots)


def can_connect(plan: WorkerPlan) -> bool:
    return can_restore(plan) and plan.resumption is not None and bool(plan.resumption.addresses)


def packed(addresses: Mapping[str, bytes]) -> str:
    return base64.b85encode(msgspec.msgpack.encode(dict(addresses))).decode()


def unpacked(text: str) -> dict[str, bytes]:
    return msgspec.msgpack.decode(base64.b85decode(text), type=dict[str, bytes])


def other_nodes(plan: WorkerPlan) -> tuple[int, ...]:
    """Nodes other than one's own that may keep copies."""
    servers = plan.ground.servers if plan.ground is not None else ()
    return tuple(server.node for server in servers if server.node != plan.node)


def neighbours(plan: WorkerPlan, rank: int) -> tuple[int, ...]:
    """The other ranks of one's own node."""
    places = plan.ground.places if plan.ground is not None else {}
    return tuple(other for other, node in places.items() if node == plan.node and other != rank)
