"""How long a rank's state of 1 GiB takes from a slot into tensors that nobody has touched yet.

Run as `PYTHONPATH=tests/checkpoint python tests/bench/restore_time.py`. Once from the slot of its own node, once from another
node's. The yardsticks, in turns with them: a copy within memory, and `sendfile` over the loopback interface, both into fresh
memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from checkpoint_nodes import G1, JOB, CheckpointNode
from measure import rounds_option, summary
from torch import nn

from phoenix_launch.checkpoint.client import SlotsLink
from phoenix_launch.copies import Source, SourceKind, Stamp
from phoenix_launch.messages import Ground
from phoenix_runtime import TrainState
from phoenix_runtime.checkpoint.bundles import bundled, private_bundle
from phoenix_runtime.checkpoint.copier import Copier
from phoenix_runtime.checkpoint.filling import Footing
from phoenix_runtime.checkpoint.private import Private
from phoenix_runtime.checkpoint.restore import restore
from phoenix_runtime.communicators.gate import Gate

TENSORS: Final = 64
NUMBERS: Final = 4 << 20  # in each: 16 MiB
SIZE: Final = TENSORS * NUMBERS * 4
STAMP: Final = Stamp(G1, 0)


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def untouched() -> TrainState:
    parameters = [nn.Parameter(torch.empty(NUMBERS)) for _ in range(TENSORS)]
    return TrainState(model=nn.ParameterList(parameters))


def restored(node: CheckpointNode, kind: SourceKind, where: int) -> float:
    state = untouched()
    sources = [Source(key, kind, where) for key in ("rank 0", private_bundle(0).key)]
    link = SlotsLink(node.path, JOB, node.index)
    link.generation = G1
    taken = seconds(lambda: restore(state, sources, STAMP, link, rank=0, world=1))
    link.close()
    assert float(next(iter(state.model)).detach()[-1]) == 1.0
    return taken


def memcpy(source: torch.Tensor) -> float:
    target = torch.empty(TENSORS * NUMBERS)
    return seconds(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), SIZE))


def loopback(descriptor: int) -> float:
    """One thread sends a file of SIZE bytes, this one receives it into fresh memory."""
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as ours:
        theirs, _ = door.accept()

        def transfer() -> None:
            thread = threading.Thread(target=send)
            thread.start()
            target, got = memoryview(mmap.mmap(-1, SIZE)), 0
            while got < SIZE:
                got += ours.recv_into(target[got:])
            thread.join()

        def send() -> None:
            sent = 0
            while sent < SIZE:
                sent += os.sendfile(theirs.fileno(), descriptor, sent, SIZE - sent)

        taken = seconds(transfer)
        theirs.close()
        return taken


def copied(nodes: Sequence[CheckpointNode]) -> None:
    state = untouched()
    with torch.no_grad():
        for parameter in state.model:
            parameter.fill_(1.0)
    copier = Copier(JOB, 0, Gate(), None)
    ground = Ground({0: 0}, ((0, "a"), (1, "b")), tuple(node.peer for node in nodes[:2]))
    copier.resume(Footing(G1, ground, 0, nodes[0].path))
    copier.begin(STAMP, bundled(state, 0, 1), Private(state.capture(), 0))
    copier.wait(lambda: None)
    copier.end()


def main() -> None:
    rounds = rounds_option(__doc__, 5)
    own: list[float] = []
    other: list[float] = []
    copies: list[float] = []
    transfers: list[float] = []
    nodes = [CheckpointNode(index) for index in range(2)]
    source = torch.ones(TENSORS * NUMBERS)
    file = os.memfd_create("bench")
    os.ftruncate(file, SIZE)
    memoryview(mmap.mmap(file, SIZE))[:] = memoryview((ctypes.c_ubyte * SIZE).from_address(source.data_ptr())).cast("B")
    try:
        for node in nodes:
            node.follow(G1, nodes)
        copied(nodes)
        for number in range(rounds):
            fresh = CheckpointNode(2 + number)
            nodes.append(fresh)
            fresh.follow(G1, nodes[:2])
            copies.append(memcpy(source))
            own.append(restored(nodes[0], SourceKind.OWN_NODE, 0))
            transfers.append(loopback(file))
            other.append(restored(fresh, SourceKind.OTHER_NODE, 1))
            fresh.end()
            nodes.remove(fresh)
    finally:
        for node in nodes:
            node.end()
        os.close(file)
    for name, taken, yardstick in (("own slot", own, copies), ("other node's slot", other, transfers)):
        rate, most = ([SIZE / each / 1e9 for each in some] for some in (taken, yardstick))
        print(f"{name:20} {summary(rate, 'GB/s')}; at the most {summary(most, 'GB/s')}")
        print(f"{'':20} {sorted(rate)[len(rate) // 2] / sorted(most)[len(most) // 2]:.2f} of that")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
