"""Slots and the checkpoint server: bandwidth of writing, replicating and fetching a copy, and what a small one costs.

Run as `PYTHONPATH=tests/checkpoint python tests/bench/slots.py`. Beside each figure stands what the machine itself gives:
a copy within memory, and `sendfile` over the loopback interface into memory.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

import psutil  # type: ignore[import-untyped]
from checkpoint_nodes import G1, CheckpointNode, layout
from measure import rounds_option, summary

from phoenix_launch.checkpoint.client import SlotsLink
from phoenix_launch.checkpoint.layout import Entry, Layout
from phoenix_launch.checkpoint.slots import slot_size
from phoenix_launch.copies import Stamp

SIZE: Final = 256 << 20
SMALL: Final = 4096
SOURCE: Final = memoryview(bytearray(os.urandom(1 << 20)) * (SIZE >> 20))
MANY: Final = [Entry(f"layers.{number}.weight", "float32", (4, 4), 64) for number in range(10_000)]


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def cpu(action: Callable[[], object]) -> float:
    """Of this thread: what a copy within memory takes, also on a machine that does something else at the time."""
    began = time.thread_time()
    action()
    return time.thread_time() - began


def servers_cpu(nodes: list[CheckpointNode]) -> float:
    return float(sum(sum(psutil.Process(node.process.pid).cpu_times()[:2]) for node in nodes))


def bandwidth(taken: list[float]) -> str:
    return summary([SIZE / each / 1e9 for each in taken], "GB/s")


def copy(link: SlotsLink, table: Layout, version: int, replicas: tuple[int, ...] = ()) -> tuple[float, float]:
    """Seconds of CPU of the store, and seconds from the seal until all copies of this version are sealed."""
    stamp, bundle = Stamp(G1, version), f"of-{table.size}"
    link.complete = version - 1
    writer = link.fill(bundle, stamp, slot_size(table, 0))
    assert writer is not None
    data = writer.begin("job-1", bundle, stamp, table)
    row = table.tensors[0]

    def store() -> None:
        data[row.offset : row.offset + row.size] = SOURCE[: row.size]

    stored = cpu(store)
    writer.seal()

    def replicate() -> None:
        link.sealed(bundle, stamp, replicas)
        assert not link.copied(bundle, stamp, (0, *replicas))

    return stored, seconds(replicate)


def plain_loopback(descriptor: int, target: memoryview) -> None:
    """One thread sends a file of SIZE bytes, this one receives it into memory."""
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as ours:
        theirs, _ = door.accept()

        def send() -> None:
            sent = 0
            while sent < SIZE:
                sent += os.sendfile(theirs.fileno(), descriptor, sent, SIZE - sent)

        thread = threading.Thread(target=send)
        thread.start()
        got = 0
        while got < SIZE:
            got += ours.recv_into(target[got:])
        thread.join()
        theirs.close()


def measure(rounds: int, nodes: list[CheckpointNode]) -> None:
    link, other = nodes[0].link(), nodes[1].link()
    big, small = layout(SIZE), layout(SMALL)
    target = memoryview(bytearray(SIZE))
    target[:] = SOURCE  # all pages are there now
    memcpy = [cpu(lambda: target.__setitem__(slice(None), SOURCE)) for _ in range(rounds)]
    print(f"{'memory to memory':36} {bandwidth(memcpy)}")
    first = [copy(link, big, version)[0] for version in (0, 1)]
    print(f"{'into a slot, the first time':36} {bandwidth(first)}")
    print(f"{'into a slot':36} {bandwidth([copy(link, big, version)[0] for version in range(2, 2 + rounds)])}")
    file = os.memfd_create("bench")
    os.write(file, SOURCE)
    before = time.process_time()
    plain = [seconds(lambda: plain_loopback(file, target)) for _ in range(rounds)]
    spent = (time.process_time() - before) / (rounds * SIZE / 1e9)
    print(f"{'loopback into memory':36} {bandwidth(plain)}, {spent:.2f} s of CPU a GB")
    os.close(file)
    for version in (100, 101):
        copy(link, big, version, (1,))  # the partner's memory is made
    before = servers_cpu(nodes)
    again = [copy(link, big, version, (1,))[1] for version in range(102, 102 + rounds)]
    spent = (servers_cpu(nodes) - before) / (rounds * SIZE / 1e9)
    print(f"{'to the partner, sealed there':36} {bandwidth(again)}, {spent:.2f} s of CPU a GB")
    stamp = Stamp(G1, 101 + rounds)
    fresh = seconds(lambda: other.read(f"of-{big.size}", stamp).close())
    print(f"{'mapping a copy for reading':36} {fresh * 1000:.2f} ms")
    copies = [1000 * seconds(lambda v=v: copy(link, small, v)) for v in range(rounds * 20)]  # type: ignore[misc]
    print(f"{'a copy of 4 KiB, own slot':36} {summary(copies, 'ms')}")
    start = rounds * 20
    copies = [1000 * seconds(lambda v=v: copy(link, small, v, (1,))) for v in range(start, 2 * start)]  # type: ignore[misc]
    print(f"{'a copy of 4 KiB and its replica':36} {summary(copies, 'ms')}")
    tables = [1000 * cpu(lambda: Layout.decode(Layout.of(MANY).table)) for _ in range(rounds)]
    print(f"{'a table of 10,000 tensors, both ways':36} {summary(tables, 'ms')}")


if __name__ == "__main__":
    rounds = rounds_option(__doc__, 5)
    nodes = [CheckpointNode(index) for index in range(2)]
    try:
        for node in nodes:
            node.follow(G1, nodes)
        measure(rounds, nodes)
    finally:
        for node in nodes:
            node.end()
