"""What is wrong is refused as gloo refuses it; what phoenix cannot carry is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from case_table import Rank, case, refusal
from torch._C._distributed_c10d import ProcessGroup

from phoenix_runtime import communicators


def attempts(rank: Rank) -> dict[str, Callable[[], object]]:
    """Mistakes that a rank sees by itself: nothing is sent, so the ranks stay together."""
    four = torch.ones(4)
    parts = [torch.ones(4) for _ in range(rank.size)]
    group: Any = dist.group.WORLD
    return {
        "bits of floats": lambda: dist.all_reduce(four, op=dist.ReduceOp.BAND),
        "no tensor": lambda: dist.all_reduce([four]),  # type: ignore[arg-type]
        "a number": lambda: dist.broadcast(3, 0),  # type: ignore[arg-type]
        "complex maximum": lambda: dist.all_reduce(torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.MAX),
        "too few outputs": lambda: dist.all_gather(parts[:2], four),
        "outputs of another shape": lambda: dist.all_gather([torch.ones(3) for _ in parts], four),
        "outputs of another type": lambda: dist.all_gather([part.int() for part in parts], four),
        "mixed types": lambda: dist.all_gather([*parts[:3], torch.ones(4).double()], four),
        "output too small": lambda: dist.all_gather_into_tensor(torch.ones(9), four),
        "input not divisible": lambda: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(7)),
        "inputs of another shape": lambda: dist.reduce_scatter(four, [torch.ones(3) for _ in parts]),
        "too few inputs": lambda: dist.reduce_scatter(four, parts[:2]),
        "splits that do not add up": lambda: dist.all_to_all_single(four, torch.ones(4), [1, 1, 1, 2], [1, 1, 1, 1]),
        "too few splits": lambda: dist.all_to_all_single(four, torch.ones(4), [4], [4]),
        "too few to exchange": lambda: dist.all_to_all(parts[:2], parts[:2]),
        "nobody's rank": lambda: dist.broadcast(four, 17),
        "send to oneself": lambda: dist.send(four, rank.number),
        "negative tag": lambda: group.recv([four], rank.previous, -4).wait(),
        "scatter nothing": lambda: dist.scatter(four, None, src=rank.number),
        "scatter to others": lambda: dist.scatter(four, parts, src=rank.next),
        "gather into nothing": lambda: dist.gather(four, None, dst=rank.number),
        "gather for others": lambda: dist.gather(four, parts, dst=rank.next),
        "scattered objects": lambda: dist.scatter_object_list([], None),
        "no tensors": lambda: group.allreduce([]),
        "two tensors": lambda: group.allreduce([four, four]),
        "tensors of two shapes": lambda: group.allreduce([four, torch.ones(3)]),
        "two tensors broadcast": lambda: group.broadcast([four, four], dist.BroadcastOptions()),
        "root out of range": lambda: group.broadcast(four, 17),
        "receive two": lambda: group.recv([four, four], rank.previous, 0),
        "send two": lambda: group.send([four, four], rank.next, 0),
        "tensors without memory": lambda: dist.all_reduce(torch.empty(3, device="meta")),
        "sparse gather": lambda: dist.all_gather([four.to_sparse() for _ in parts], four.to_sparse()),
        "mixed coalescing": lambda: mixed_coalescing(four),
        "unknown rank of a group": lambda: dist.new_group([0, 9]),
        "twice in a group": lambda: dist.new_group([0, 0]),
        "split": lambda: dist.split_group(split_ranks=[[0, 1], [2, 3]]),
        "begun twice": lambda: rank.begin(),
        "shrunk": lambda: dist.shrink_group([3]),
    }


def mixed_coalescing(tensor: torch.Tensor) -> None:
    try:
        with dist._coalescing_manager():
            dist.all_reduce(tensor)
            dist.all_gather_into_tensor(torch.ones(16), tensor)
    finally:
        dist.distributed_c10d._world.pg_coalesce_state.clear()


@case()
def mistakes_are_refused_in_the_same_words(rank: Rank) -> object:
    found = {}
    for name, attempt in attempts(rank).items():
        try:
            attempt()
            found[name] = "accepted"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".partition("Exception raised from")[0]
    tensor = torch.ones(2)
    dist.all_reduce(tensor)  # and all still works
    return found, tensor


@case(only="phoenix")
def monitored_barrier_is_refused_by_torch_itself(rank: Rank) -> object:
    """Torch looks at the backend's name."""
    told = refusal(dist.monitored_barrier)
    assert told == "ValueError: monitored_barrier is only implemented for GLOO backend.", told
    return told


@case(only="phoenix")
def what_cannot_be_carried_is_refused_by_name(rank: Rank) -> object:
    """Merging; and, if phoenix forgot to bring one of its own, what then would be called: the stand-in's collective."""
    world: Any = dist.group.WORLD
    told = refusal(world.merge_remote_group, None, 4)
    assert "phoenix" in told and "merge_remote_group" in told, told
    stand_in: Any = world._get_backend(torch.device("cpu"))
    one, four, ones = torch.ones(1), torch.ones(4), [torch.ones(1) for _ in range(4)]
    collectives: dict[str, tuple[Any, ...]] = {
        "allreduce": ([four],),
        "broadcast": ([four],),
        "reduce": ([four],),
        "allgather": ([ones], [one]),
        "_allgather_base": (four, one),
        "gather": ([ones], [one]),
        "scatter": ([one], [ones]),
        "reduce_scatter": ([one], [ones]),
        "_reduce_scatter_base": (one, four),
        "alltoall": (ones, ones),
        "barrier": (),
    }
    for name, arguments in collectives.items():
        told = refusal(getattr(stand_in, name), *arguments)
        assert told.startswith("RuntimeError: FakeProcessGroup collective operation error"), (name, told)
    return None


NO_OPERATIONS: Final = {
    *ProcessGroup.BackendType.__members__,
    *("BackendType", "backend_type", "bound_device_id", "group_desc", "group_name", "name", "boxed", "unbox", "_id"),
    *("_backend_id", "_device_types", "_enable_collectives_timing", "_has_hooks", "_pybind11_conduit_v1_"),
    *("_wait_for_pending_works", "use_pg_for_symm_mem_rendezvous", "_get_backend", "_get_backend_name"),
    *(
        "_register_backend",
        "_register_on_completion_hook",
        "_set_default_backend",
        "_set_group_desc",
        "_set_group_name",
    ),
    *("_get_backend_supports_splitting",),
}


@case(only="phoenix")
def every_operation_of_a_group_is_one_of_ours(rank: Rank) -> object:
    """A torch with a collective that is not known here makes this fail."""
    named = {name for name in dir(ProcessGroup) if not name.startswith("__")}
    missing = named - set(vars(communicators.PhoenixGroup)) - NO_OPERATIONS
    assert not missing, missing
    return None
