"""What the Python layer of the backend costs a collective: phoenix against gloo, by size, in turns, in two processes."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch
import torch.distributed as dist
from measure import rounds_option

from phoenix_runtime import communicators

SIZES = (1, 1 << 10, 1 << 16, 1 << 20)
TIMES = {1: 600, 1 << 10: 600, 1 << 16: 200, 1 << 20: 30}
OPERATIONS: dict[str, Callable[[torch.Tensor, dist.ProcessGroup], object]] = {
    "all_reduce": lambda tensor, group: dist.all_reduce(tensor, group=group),
    "all_reduce by future": lambda tensor, group: (
        dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()
    ),
    "reduce_scatter": lambda tensor, group: dist.reduce_scatter_single(
        torch.empty(max(1, tensor.numel() // 2)), tensor.repeat(2)[: 2 * max(1, tensor.numel() // 2)], group=group
    ),
    "send and recv": lambda tensor, group: (
        dist.send(tensor, 1, group) if dist.get_rank() == 0 else dist.recv(tensor, 0, group)
    ),
}


def seconds(
    operation: Callable[[torch.Tensor, dist.ProcessGroup], object], size: int, group: dist.ProcessGroup
) -> float:
    tensor = torch.zeros(size)
    dist.barrier(group)
    begun = time.perf_counter()
    for _ in range(TIMES[size]):
        operation(tensor, group)
    return (time.perf_counter() - begun) / TIMES[size]


def rank(number: int, port: int, rounds: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=number == 0, timeout=timedelta(seconds=60))
    communicators.register("gloo")
    dist.init_process_group("phoenix", store=store, rank=number, world_size=2)
    groups = {"gloo": dist.new_group([0, 1], backend="gloo"), "phoenix": dist.group.WORLD}
    for name, operation in OPERATIONS.items():
        for size in SIZES:
            found: dict[str, list[float]] = {backend: [] for backend in groups}
            for _ in range(rounds):
                for backend, group in groups.items():
                    found[backend].append(seconds(operation, size, group))  # type: ignore[arg-type]
            if number == 0:
                gloo, ours = (statistics.median(found[backend]) * 1e6 for backend in ("gloo", "phoenix"))
                spread = f"{min(found['phoenix']) * 1e6:.0f}-{max(found['phoenix']) * 1e6:.0f}"
                print(f"{name:22} {size * 4:>9,} bytes  gloo {gloo:8.1f} us  phoenix {ours:8.1f} us ({spread})  "
                      f"+{ours - gloo:6.1f} us  {ours / gloo:.2f}x", flush=True)  # fmt: skip


def main() -> None:
    rounds = rounds_option(__doc__, 7)
    port = 29000 + os.getpid() % 1000
    child = os.fork()
    if child == 0:
        rank(1, port, rounds)
        os._exit(0)
    rank(0, port, rounds)
    os.waitpid(child, 0)


if __name__ == "__main__":
    sys.exit(main())
