"""Collectives on tensors: every one of them, every operator and type, sizes that are uneven, zero or large."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from case_table import Rank, case, recorded
from torch import Tensor

FLOATS: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WHOLES: Final = (torch.int64, torch.int32, torch.int8, torch.uint8)
OTHERS: Final = (torch.bool, torch.complex64, torch.float8_e4m3fn)
OPERATORS: Final = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")


def filled(rank: Rank, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of which no two ranks have the same, and whose sums round."""
    generator = torch.Generator().manual_seed(100 + rank.number)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(*shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 5, shape, generator=generator).to(dtype)


@case()
def all_reduce_with_every_operator_and_type(rank: Rank) -> object:
    found: dict[str, object] = {}
    for dtype in FLOATS + WHOLES + OTHERS:
        for operator in OPERATORS:
            name = f"{operator} {dtype}"
            tensor = filled(rank, 5, dtype=dtype)
            with recorded(found, name):
                dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operator))
                found[name] = tensor
    return found


@case()
def every_collective_with_every_type(rank: Rank) -> object:
    found: dict[str, object] = {}
    for dtype in FLOATS + WHOLES + OTHERS:
        for name, collective in COLLECTIVES.items():
            with recorded(found, f"{name} {dtype}"):
                found[f"{name} {dtype}"] = collective(rank, filled(rank, 8, dtype=dtype), False)
    return found


@case()
def every_collective_without_waiting(rank: Rank) -> object:
    return {name: collective(rank, filled(rank, 8), True) for name, collective in COLLECTIVES.items()}


@case()
def every_collective_with_a_megabyte(rank: Rank) -> object:
    return {name: collective(rank, filled(rank, 4 * 77_777), False) for name, collective in COLLECTIVES.items()}


@case()
def every_collective_with_nothing_in_it(rank: Rank) -> object:
    found: dict[str, object] = {}
    for name, collective in COLLECTIVES.items():
        with recorded(found, name):
            found[name] = collective(rank, torch.empty(0), False)
    return found


@case()
def every_collective_in_inference_mode(rank: Rank) -> object:
    with torch.inference_mode():
        return {name: collective(rank, filled(rank, 8), False) for name, collective in COLLECTIVES.items()}


@case()
def every_collective_on_tensors_with_gaps(rank: Rank) -> object:
    """Views whose elements do not lie one after the other: torch refuses some of them."""
    found: dict[str, object] = {}
    for name, collective in COLLECTIVES.items():
        with recorded(found, name):
            found[name] = collective(rank, filled(rank, 8, 2)[:, 1], False)
    return found


@case()
def many_in_flight_are_waited_for_in_any_order(rank: Rank) -> object:
    tensors = [filled(rank, 10 + index) * index for index in range(12)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    return tensors


@case()
def uneven_exchanges(rank: Rank) -> object:
    """Rank r sends r + i + 1 elements to rank i; as numbers, as rows, and with nothing for some."""
    sent = [rank.number + other + 1 for other in range(rank.size)]
    single = torch.zeros(sum(sent))
    dist.all_to_all_single(single, filled(rank, sum(sent)), sent, sent)
    rows = torch.zeros(sum(sent), 3)
    dist.all_to_all_single(rows, filled(rank, sum(sent), 3), sent, sent)
    triangle = [other if other <= rank.number else 0 for other in range(rank.size)]
    received = [rank.number if other >= rank.number else 0 for other in range(rank.size)]
    sparse = torch.zeros(sum(received))
    dist.all_to_all_single(sparse, filled(rank, sum(triangle)), received, triangle)
    return single, rows, sparse


@case()
def uneven_lists(rank: Rank) -> object:
    """Tensors of different shapes in one list: torch itself allows it, gloo refuses it."""
    found: dict[str, object] = {}
    with recorded(found, "all_gather"):
        outputs = [torch.zeros(other + 1) for other in range(rank.size)]
        dist.all_gather(outputs, filled(rank, rank.number + 1))
        found["all_gather"] = outputs
    with recorded(found, "all_to_all"):
        outputs = [torch.zeros(rank.number + other + 1) for other in range(rank.size)]
        dist.all_to_all(outputs, [filled(rank, rank.number + other + 1) for other in range(rank.size)])
        found["all_to_all"] = outputs
    return found


@case()
def coalesced_collectives(rank: Rank) -> object:
    found: dict[str, object] = {}
    for asynchronous in (False, True):
        tensors = [filled(rank, 3), filled(rank, 2, 2), filled(rank, 1)]
        with dist._coalescing_manager(async_ops=asynchronous) as pending:
            for tensor in tensors:
                dist.all_reduce(tensor)
        gathered = [torch.zeros(rank.size * size) for size in (2, 5)]
        with dist._coalescing_manager(async_ops=asynchronous) as gathering:
            for output in gathered:
                dist.all_gather_into_tensor(output, filled(rank, output.numel() // rank.size))
        scattered = [torch.zeros(size) for size in (2, 5)]
        with dist._coalescing_manager(async_ops=asynchronous) as scattering:
            for output in scattered:
                dist.reduce_scatter_tensor(output, filled(rank, output.numel() * rank.size))
        for manager in (pending, gathering, scattering):
            manager.wait()
        found[f"asynchronous {asynchronous}"] = tensors, gathered, scattered
    return found


@case()
def coalescing_by_the_backend(rank: Rank) -> object:
    """The older style, in which the backend itself is told where a batch begins and ends: gloo has it or refuses it."""
    found: dict[str, object] = {}
    with recorded(found, "refused"):
        tensor = filled(rank, 3)
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as pending:
            dist.all_reduce(tensor)
        pending.wait()
        found["reduced"] = tensor
    dist.distributed_c10d._world.pg_coalesce_state.clear()
    return found


@case()
def coalesced_methods(rank: Rank) -> object:
    """Methods of the group that only libraries call."""
    group: Any = dist.group.WORLD
    found: dict[str, object] = {}
    tensors = [filled(rank, 3), filled(rank, 5)]
    dist.all_reduce_coalesced(tensors)
    found["all_reduce_coalesced"] = tensors
    outputs = [[torch.zeros(3), torch.zeros(2, 2)] for _ in range(rank.size)]
    dist.all_gather_coalesced(outputs, [filled(rank, 3), filled(rank, 2, 2)])
    found["all_gather_coalesced"] = outputs
    for name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
        gathered = [torch.zeros(8), torch.zeros(12)]
        getattr(group, name)(gathered, [filled(rank, 2), filled(rank, 3)]).wait()
        found[name] = gathered
    for name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
        scattered = [torch.zeros(2), torch.zeros(3)]
        getattr(group, name)(scattered, [filled(rank, 8), filled(rank, 12)]).wait()
        found[name] = scattered
    return found


@case()
def sparse_tensors_are_reduced(rank: Rank) -> object:
    sparse = torch.sparse_coo_tensor([[rank.number, 5]], [1.5, float(rank.number)], (8,))
    dist.all_reduce(sparse)
    rows = torch.sparse_coo_tensor([[rank.number]], filled(rank, 1, 4), (6, 4))
    dist.all_reduce(rows)
    return sparse, rows


@case()
def methods_of_the_group_with_few_arguments(rank: Rank) -> object:
    """The short forms that ProcessGroup has for tensors, with the options left out or given as an operator."""
    group: Any = dist.group.WORLD
    tensors = [filled(rank, 4) for _ in range(5)]
    group.allreduce(tensors[0]).wait()
    group.allreduce([tensors[1]], dist.ReduceOp.MAX).wait()
    group.allreduce(tensors[2], op=dist.ReduceOp.MIN).wait()
    group.broadcast(tensors[3], root=1).wait()
    group.broadcast([tensors[4]]).wait()
    group.reduce(filled(rank, 4), root=2).wait()
    gathered = [torch.zeros(4) for _ in range(rank.size)]
    group.allgather(gathered, filled(rank, 4)).wait()
    scattered = torch.zeros(2)
    group.reduce_scatter(scattered, list(filled(rank, 8).chunk(4))).wait()
    exchanged = torch.zeros(8)
    group.alltoall_base(exchanged, filled(rank, 8), [], []).wait()
    part = torch.zeros(2)
    group.scatter(part, list(filled(rank, 8).chunk(4)) if rank.number == 1 else [], root=1).wait()
    collected = [torch.zeros(2) for _ in range(4)] if rank.number == 1 else []
    group.gather(collected, filled(rank, 2), root=1).wait()
    group.barrier().wait()
    return tensors, gathered, scattered, exchanged, part, collected


@case()
def reduced_in_groups_of_every_size(rank: Rank) -> object:
    """One, two, three and four ranks: gloo's algorithms differ."""
    found = []
    for size in range(1, rank.size + 1):
        group = dist.new_group(list(range(size)))
        if rank.number < size:
            for name, collective in COLLECTIVES.items():
                if name in ("all_reduce", "broadcast", "all_gather", "reduce"):
                    found.append(collective(Rank(rank.number, size, rank.folder), filled(rank, 12), False, group))
    return found


def _all_reduce(rank: Rank, tensor: Tensor, later: bool, group: Any = None) -> object:
    _finish(dist.all_reduce(tensor, group=group, async_op=later))
    return tensor


def _broadcast(rank: Rank, tensor: Tensor, later: bool, group: Any = None) -> object:
    _finish(dist.broadcast(tensor, rank.size - 1, group=group, async_op=later))
    return tensor


def _reduce(rank: Rank, tensor: Tensor, later: bool, group: Any = None) -> object:
    _finish(dist.reduce(tensor, rank.size - 1, group=group, async_op=later))
    return tensor if rank.number == rank.size - 1 else None


def _all_gather(rank: Rank, tensor: Tensor, later: bool, group: Any = None) -> object:
    outputs = [torch.zeros_like(tensor) for _ in range(rank.size)]
    _finish(dist.all_gather(outputs, tensor, group=group, async_op=later))
    return outputs


def _all_gather_into_tensor(rank: Rank, tensor: Tensor, later: bool) -> object:
    output = tensor.new_zeros(rank.size * tensor.numel())
    _finish(dist.all_gather_into_tensor(output, tensor, async_op=later))
    return output


def _reduce_scatter(rank: Rank, tensor: Tensor, later: bool) -> object:
    inputs = (
        [part.clone() for part in tensor.chunk(rank.size)] if tensor.numel() else [tensor.clone() for _ in range(4)]
    )
    output = torch.zeros_like(inputs[0])
    _finish(dist.reduce_scatter(output, inputs, async_op=later))
    return output


def _reduce_scatter_tensor(rank: Rank, tensor: Tensor, later: bool) -> object:
    output = tensor.new_zeros(tensor.numel() // rank.size)
    _finish(dist.reduce_scatter_tensor(output, tensor, op=dist.ReduceOp.SUM, async_op=later))
    return output


def _all_to_all_single(rank: Rank, tensor: Tensor, later: bool) -> object:
    output = torch.zeros_like(tensor)
    _finish(dist.all_to_all_single(output, tensor, async_op=later))
    return output


def _all_to_all(rank: Rank, tensor: Tensor, later: bool) -> object:
    inputs = list(tensor.chunk(rank.size)) if tensor.numel() else [tensor] * rank.size
    outputs = [torch.zeros_like(part) for part in inputs]
    _finish(dist.all_to_all(outputs, inputs, async_op=later))
    return outputs


def _gather(rank: Rank, tensor: Tensor, later: bool) -> object:
    outputs = [torch.zeros_like(tensor) for _ in range(rank.size)] if rank.number == 1 else None
    _finish(dist.gather(tensor, outputs, dst=1, async_op=later))
    return outputs


def _scatter(rank: Rank, tensor: Tensor, later: bool) -> object:
    inputs = [tensor + index if tensor.dtype.itemsize > 1 else tensor for index in range(rank.size)]
    output = torch.zeros_like(tensor)
    _finish(dist.scatter(output, inputs if rank.number == 2 else None, src=2, async_op=later))
    return output


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


COLLECTIVES: Final[dict[str, Any]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
}
