"""Sends and receives: tags, any source, batches; and what the handles of all operations tell."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from case_table import Rank, case, recorded
from tensor_cases import filled
from torch import Tensor


def own(rank: Rank, size: int = 3) -> Tensor:
    return torch.arange(size, dtype=torch.float32) / 7 + rank.number


@case()
def sends_and_receives_in_pairs(rank: Rank) -> object:
    """Ranks 0 and 2 send to their neighbours, who answer."""
    received = torch.zeros(3)
    if rank.number % 2 == 0:
        dist.send(own(rank), rank.next)
        dist.recv(received, rank.next)
    else:
        dist.recv(received, src=rank.previous)
        dist.send(own(rank), dst=rank.previous)
    return received


@case()
def tags_tell_messages_apart(rank: Rank) -> object:
    """Sent under the tags 1, 2, 3 and received as 3, 1, 2."""
    sent = [dist.isend(own(rank) * tag, rank.next, tag=tag) for tag in (1, 2, 3)]
    received = {tag: torch.zeros(3) for tag in (3, 1, 2)}
    for tag, tensor in received.items():
        work = dist.irecv(tensor, rank.previous, tag=tag)
        assert work is not None
        work.wait()
    for work in sent:
        assert work is not None
        work.wait()
    return received


@case()
def received_from_whoever_sends(rank: Rank) -> object:
    """Rank 0 receives three messages without saying from whom; the order is nobody's, so it is sorted."""
    if rank.number:
        dist.send(own(rank), 0)
        return None
    found: dict[int, Tensor] = {}
    for _ in range(rank.size - 1):
        tensor = torch.zeros(3)
        source = dist.recv(tensor)
        found[source] = tensor
    return dict(sorted(found.items()))


@case()
def received_later_from_whoever_sends(rank: Rank) -> object:
    found: dict[str, object] = {}
    if rank.number == 1:
        dist.send(own(rank), 2, tag=9)
    elif rank.number == 2:
        tensor = torch.zeros(3)
        work: Any = dist.irecv(tensor, tag=9)
        work.wait()
        with recorded(found, "source"):
            found["source"] = work._source_rank()
        found["tensor"] = tensor
        found["completed"] = work.is_completed()
    return found


@case()
def the_source_is_given_back(rank: Rank) -> object:
    tensor = torch.zeros(3)
    work = dist.isend(own(rank), rank.next)
    source = dist.recv(tensor, rank.previous)
    assert work is not None
    work.wait()
    return source, tensor


@case()
def ranks_of_a_group_in_sends(rank: Rank) -> object:
    """In the group [3, 1, 2] peers are named by their global rank or by their rank in the group."""
    group = dist.new_group([1, 2, 3])
    tensor, other = torch.zeros(3), torch.zeros(3)
    if rank.number == 1:
        dist.send(own(rank), 3, group=group)
        dist.send(own(rank) * 2, group=group, group_dst=1)
    if rank.number == 3:
        return dist.recv(tensor, 1, group=group), tensor
    if rank.number == 2:
        return dist.recv(other, group=group, group_src=0), other
    return dist.get_rank(group)


@case()
def a_ring_in_one_batch(rank: Rank) -> object:
    forth, back = torch.zeros(3), torch.zeros(5)
    operations = [
        dist.P2POp(dist.isend, own(rank), rank.next),
        dist.P2POp(dist.irecv, forth, rank.previous),
        dist.P2POp(dist.isend, own(rank, 5), rank.previous, tag=4),
        dist.P2POp(dist.irecv, back, rank.next, tag=4),
    ]
    works = dist.batch_isend_irecv(operations)
    for work in works:
        work.wait()
    return forth, back


@case()
def a_batch_in_a_group(rank: Rank) -> object:
    group = dist.new_group([0, 2])
    if rank.number % 2:
        return None
    tensor = torch.zeros(3)
    operations = [
        dist.P2POp(dist.irecv, tensor, 2 - rank.number, group),
        dist.P2POp(dist.isend, own(rank), group=group, group_peer=1 - rank.number // 2),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return tensor


@case()
def every_type_is_sent(rank: Rank) -> object:
    found: dict[str, object] = {}
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8):
        received = torch.zeros(2, 3, dtype=dtype)
        work = dist.isend((own(rank, 6).reshape(2, 3)).to(dtype), rank.next)
        dist.recv(received, rank.previous)
        assert work is not None
        work.wait()
        found[str(dtype)] = received
    return found


@case()
def nothing_and_a_lot_are_sent(rank: Rank) -> object:
    found = []
    for size in (0, 1, 300_000):
        received = torch.zeros(size)
        work = dist.isend(own(rank, size), rank.next)
        dist.recv(received, rank.previous)
        assert work is not None
        work.wait()
        found.append(received)
    return found


@case()
def two_threads_use_two_groups(rank: Rank) -> object:
    groups = [dist.new_group(), dist.new_group()]
    tensors = [own(rank), own(rank, 5)]

    def reduce_often(tensor: Tensor, group: Any) -> None:
        for _ in range(20):
            dist.all_reduce(tensor, group=group)
            tensor /= rank.size

    threads = [threading.Thread(target=reduce_often, args=pair) for pair in zip(tensors, groups, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tensors


@case()
def what_a_work_tells(rank: Rank) -> object:
    """Works are asked in many ways: by wait with and without a limit, by futures, by results."""
    found: dict[str, object] = {}
    tensor = filled(rank, 6)
    work = dist.all_reduce(tensor, async_op=True)
    found["wait"] = work.wait(timedelta(seconds=20))
    found["again"] = work.wait()
    found["completed"], found["success"] = work.is_completed(), work.is_success()
    found["exception"] = str(work.exception())
    found["result"] = work.result()
    found["synchronize"] = work.synchronize()
    outputs = [torch.zeros(6) for _ in range(rank.size)]
    for name, work in {
        "gather": dist.all_gather(outputs, tensor, async_op=True),
        "flat": dist.all_gather_into_tensor(torch.zeros(24), tensor, async_op=True),
        "scatter": dist.reduce_scatter_tensor(torch.zeros(6), tensor.repeat(4), async_op=True),
        "exchange": dist.all_to_all_single(torch.zeros(4), tensor[:4], async_op=True),
    }.items():
        work.wait()
        with recorded(found, f"result of {name}"):
            found[f"result of {name}"] = work.result()
    future = dist.all_reduce(tensor, async_op=True).get_future()
    found["future"] = future.then(lambda done: [value * 2 for value in done.value()]).wait()
    found["done"] = future.done()
    found["gathered"] = dist.all_gather(outputs, tensor, async_op=True).get_future().wait()
    barrier = dist.barrier(async_op=True)
    found["barrier"] = barrier.wait()
    return found


@case()
def a_future_of_each_collective_holds_its_outputs(rank: Rank) -> object:
    group = dist.group.WORLD
    assert group is not None
    whole, part = filled(rank, 8), filled(rank, 2)
    works = {
        "allreduce": group.allreduce([filled(rank, 3)]),
        "broadcast": group.broadcast([filled(rank, 3)]),
        "allgather": group.allgather([[torch.zeros(2) for _ in range(4)]], [part]),
        "_allgather_base": group._allgather_base(torch.zeros(8), part),
        "_reduce_scatter_base": group._reduce_scatter_base(torch.zeros(2), whole),
        "alltoall_base": group.alltoall_base(torch.zeros(8), whole, [], []),
        "reduce_scatter": group.reduce_scatter([torch.zeros(2)], [list(whole.chunk(4))]),
    }
    found: dict[str, object] = {}
    for name, work in works.items():
        with recorded(found, name):
            found[name] = work.get_future().wait()
    return found
