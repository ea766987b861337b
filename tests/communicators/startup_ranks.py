"""Four ranks start as many scripts do, with all that they may want to know of each other; then four others do it alone.

`run` gives for each rank what it received, what the process that was started from its record received, and what the record
says could not be replayed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.distributed import _functional_collectives as functional

from phoenix_runtime import communicators
from phoenix_runtime.communicators import BACKEND
from phoenix_runtime.startup import LARGEST, StartupRecord

SIZE: Final = 4
DEADLINE: Final = 30.0


def objects(rank: int) -> list[Any]:
    told = [{"seed": 11, "names": ["a", "b"]} if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    gathered: list[Any] = [None] * SIZE
    dist.all_gather_object(gathered, ("rank", rank, "x" * rank))
    at_one: list[Any] | None = [None] * SIZE if rank == 1 else None
    dist.gather_object(rank * rank, at_one, dst=1)
    share: list[Any] = [None]
    dist.scatter_object_list(share, [f"share{n}" for n in range(SIZE)] if rank == 2 else None, src=2)
    return [told, gathered, at_one, share]


def tensors(rank: int) -> list[Any]:
    size = torch.tensor([rank + 1])
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(SIZE)]
    dist.all_gather(sizes, size)
    longest = int(max(each.item() for each in sizes))
    padded = torch.zeros(SIZE * longest, dtype=torch.bfloat16)
    dist.all_gather_single(padded, torch.full((longest,), rank + 0.5, dtype=torch.bfloat16))
    total, mean = torch.tensor(rank + 1.0), torch.tensor([rank * 0.1])
    works = [dist.all_reduce(total, async_op=True), dist.all_reduce(mean, async_op=True)]
    for work in reversed(works):
        work.wait()
    later = torch.tensor([rank, rank * rank])
    dist.all_reduce(later, async_op=True).get_future().wait()
    part = torch.zeros(2)
    dist.reduce_scatter_single(part, torch.arange(2.0 * SIZE) + rank)
    swapped = torch.zeros(SIZE, dtype=torch.uint8)
    dist.all_to_all_single(swapped, torch.arange(SIZE, dtype=torch.uint8) + 10 * rank)
    flag = torch.tensor([rank == 3])
    dist.broadcast(flag, src=3)
    dist.barrier()
    return [
        longest,
        padded,
        total,
        mean,
        later,
        part,
        swapped,
        flag,
        functional.all_reduce(later, "sum", dist.group.WORLD),
    ]


def from_one_to_another(rank: int) -> list[Any]:
    before, after = torch.zeros(2), torch.zeros(2)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, before, (rank - 1) % SIZE),
            dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % SIZE),
        ]
    ):
        work.wait()
    source = None
    if rank == 0:
        source = dist.recv(after)
    elif rank == 3:
        dist.send(torch.tensor([3.0, 4.0]), 0)
    return [before, after, source]


def in_groups(rank: int) -> list[Any]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    pair = dist.new_group([1, 3])
    found = []
    for group in [mesh.get_group("data"), mesh.get_group("tensor"), *([pair] if rank in (1, 3) else [])]:
        names: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(names, f"{rank} of {dist.get_rank(group)}", group=group)
        found.append(names)
    return found


def start(rank: int) -> list[Any]:
    received = [*objects(rank), *tensors(rank), *from_one_to_another(rank), *in_groups(rank)]
    dist.all_reduce(torch.ones(LARGEST // 4 + 1))  # too large to be recorded
    return [item.tolist() if isinstance(item, torch.Tensor) else item for item in received]


def begin(rank: int, store: dist.Store) -> None:
    faulthandler.dump_traceback_later(DEADLINE - 5, exit=True)
    dist.init_process_group("phoenix", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=DEADLINE))


def together(rank: int, port: int, line: Connection) -> None:
    communicators.register("gloo")
    recorder = BACKEND.record_startup()
    begin(rank, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE)))
    received = start(rank)
    recorder.enter_step(0)
    line.send((received, recorder.record.to_bytes()))


def alone(rank: int, record: bytes, line: Connection) -> None:
    communicators.register("gloo")
    shadow = BACKEND.shadow(StartupRecord.from_bytes(record))
    begin(rank, dist.HashStore())
    received = start(rank)
    shadow.enter_step()
    line.send((received, b""))


def host_store(answer_to: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answer_to.send(store.port)
    signal.pause()


def run() -> Iterator[dict[str, Any]]:
    pids: list[int] = []

    def fork(run: Callable[[Connection], None]) -> Connection:
        line, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            try:
                run(theirs)
                signal.pause()
            except BaseException:
                theirs.send((traceback.format_exc()[-3000:], b""))
            finally:
                os._exit(1)
        pids.append(pid)
        theirs.close()
        return line

    def answer(line: Connection) -> Any:
        return line.recv() if line.poll(DEADLINE) else ("no answer", b"")

    try:
        port = fork(host_store).recv()
        lines = [fork(lambda line: together(rank, port, line)) for rank in range(SIZE)]  # noqa: B023
        originals = [answer(line) for line in lines]
        for rank, (received, record) in enumerate(originals):
            again, _ = answer(fork(lambda line: alone(rank, record, line))) if record else (None, b"")  # noqa: B023
            missing = StartupRecord.from_bytes(record).unreplayable if record else ()
            yield {"received": received, "alone": again, "unreplayable": missing}
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
