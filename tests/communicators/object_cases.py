"""Python objects through collectives, and the groups they and everything else go through."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from case_table import Rank, case, recorded, refusal
from torch.distributed import distributed_c10d

from phoenix_runtime import communicators


def speech(rank: Rank) -> dict[str, object]:
    """An object of another length on each rank."""
    return {"rank": rank.number, "words": ["word"] * (rank.number * 50), "tensor": torch.arange(rank.number + 1)}


@case()
def objects_are_gathered(rank: Rank) -> object:
    everywhere: list[Any] = [None] * rank.size
    dist.all_gather_object(everywhere, speech(rank))
    at_one: list[Any] | None = [None] * rank.size if rank.number == 2 else None
    dist.gather_object(speech(rank), at_one, dst=2)
    return everywhere, at_one


@case()
def objects_are_broadcast_and_scattered(rank: Rank) -> object:
    listed: list[Any] = [speech(rank), "and", rank.number] if rank.number == 1 else [None] * 3
    dist.broadcast_object_list(listed, src=1)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [{"for": other} for other in range(rank.size)] if rank.number == 3 else None, src=3)
    return listed, mine


@case()
def objects_are_sent(rank: Rank) -> object:
    found: list[Any] = [None, None]
    if rank.number == 0:
        dist.send_object_list([speech(rank), "x"], dst=3)
    elif rank.number == 3:
        return dist.recv_object_list(found, src=0), found
    return None


@case()
def objects_in_a_group(rank: Rank) -> object:
    group = dist.new_group([1, 3])
    if rank.number % 2 == 0:
        return None
    found: list[Any] = [None, None]
    dist.all_gather_object(found, speech(rank), group=group)
    dist.broadcast_object_list(found, group=group, group_src=1)
    return found


def told_of(group: Any) -> dict[str, object]:
    """What torch says of a group, without what tells the backends apart."""
    return {
        "rank": dist.get_rank(group),
        "size": dist.get_world_size(group),
        "ranks": dist.get_process_group_ranks(group),
        "own": (group.rank(), group.size()),
        "name": group.group_name,
        "description": group.group_desc,
        "default device": str(distributed_c10d._get_pg_default_device(group)),
        "object device": str(distributed_c10d._get_object_coll_device(group)),
        "on the CPU": torch.device("cpu") in group._device_types,
        "bound": str(group.bound_device_id),
        "by name": distributed_c10d._resolve_process_group(group.group_name) is group,
        "member": group != dist.GroupMember.NON_GROUP_MEMBER,
        "tag": distributed_c10d._get_group_tag(group),
        "store": type(group.get_group_store()).__name__,
        "hash": hash(group) == hash(group) and len({group, group}) == 1,
    }


@case()
def the_world_is_what_torch_says(rank: Rank) -> object:
    world = dist.group.WORLD
    assert dist.get_backend() == rank.backend
    assert distributed_c10d.get_backend_config(world) in (
        f"cpu:{rank.backend},cuda:{rank.backend}",
        f"cpu:{rank.backend}",
    )
    assert dist.is_initialized() and distributed_c10d._get_default_group() is world
    assert world is not None and world.name() == rank.backend
    return told_of(world), dist.get_rank(), dist.get_world_size(), dist.get_group_rank(world, 2)


@case()
def new_groups_are_what_torch_says(rank: Rank) -> object:
    """One of all, one of some ranks with a description, one in another order."""
    found: dict[str, object] = {}
    made = {
        "all": dist.new_group(),
        "some": dist.new_group([1, 3], group_desc="two of four"),
        "unsorted": dist.new_group([3, 0, 2], timeout=timedelta(seconds=20)),
    }
    for name, group in made.items():
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            found[name] = "outside", dist.get_rank(group), dist.get_world_size(group)
            continue
        tensor = torch.ones(2) * rank.number
        dist.all_reduce(tensor, group=group)
        found[name] = told_of(group), tensor, dist.get_global_rank(group, 0)
        assert dist.get_backend(group) == rank.backend
    return found


@case()
def groups_that_only_their_members_make(rank: Rank) -> object:
    halves = ([0, 1], [2, 3])
    group = dist.new_group(halves[rank.number // 2], use_local_synchronization=True)
    tensor = torch.ones(2) * rank.number
    dist.all_reduce(tensor, group=group)
    outside = dist.new_group([0, 3], use_local_synchronization=True)
    if rank.number in (0, 3):
        dist.broadcast(tensor, 3, group=outside)
    return told_of(group), tensor, outside is None


@case()
def collectives_on_a_group_of_others(rank: Rank) -> object:
    """Who is outside of a group gets torch's own answer: nothing happens."""
    group = dist.new_group([0, 1])
    tensor = torch.ones(2) * rank.number
    answer = dist.all_reduce(tensor, group=group, async_op=True)
    if answer is not None:
        answer.wait()
    dist.barrier(group=group)
    return tensor, answer is None


@case()
def subgroups_are_made_by_size_and_by_list(rank: Rank) -> object:
    found: list[object] = []
    mine, every = dist.new_subgroups(2)
    found.append([len(every), told_of(mine)])
    other, listed = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    tensor = torch.ones(2) * rank.number
    dist.all_reduce(tensor, group=other)
    return [*found, len(listed), tensor]


@case()
def a_mesh_and_its_parts(rank: Rank) -> object:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    found: dict[str, object] = {}
    for name in ("replicas", "shards"):
        tensor = torch.ones(2) * rank.number
        dist.all_reduce(tensor, group=mesh.get_group(name))
        found[name] = tensor, told_of(mesh[name].get_group()), mesh[name].size(), mesh.get_local_rank(name)
    flat = mesh._flatten("flat")
    tensor = torch.ones(2) * rank.number
    dist.all_reduce(tensor, group=flat.get_group())
    found["flat"] = tensor, flat.size(), mesh.get_coordinate()
    found["text"] = str(mesh["replicas", "shards"]), mesh.mesh.tolist()
    return found


@case()
def a_mesh_from_groups(rank: Rank) -> object:
    group = dist.new_group([0, 1, 2, 3])
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    assert mesh.get_group() is group
    tensor = torch.ones(2) * rank.number
    dist.all_reduce(tensor, group=mesh.get_group())
    return tensor, mesh.mesh.tolist()


@case()
def a_barrier_waits_for_the_last(rank: Rank) -> object:
    """Everybody counts in the store before the barrier, so everybody counts four after it."""
    store = distributed_c10d._get_default_store()
    counts = []
    for turn in range(5):
        store.add(f"barrier{turn}", 1)
        dist.barrier()
        counts.append(store.add(f"barrier{turn}", 0))
    return counts


@case()
def the_groups_store_is_shared(rank: Rank) -> object:
    group: Any = dist.new_group()
    store = group.get_group_store()
    if rank.number == 0:
        store.set("told", b"by rank 0")
    return store.get("told").decode()


@case()
def a_group_cannot_be_copied(rank: Rank) -> object:
    group = dist.new_group()
    found: dict[str, object] = {}
    with recorded(found, "pickle"):
        found["pickle"] = bool(pickle.dumps(group))
    with recorded(found, "copy"):
        found["copy"] = copy.copy(group) is not None
    with recorded(found, "deepcopy"):
        found["deepcopy"] = copy.deepcopy(group) is not None
    return {name: str(value).partition(":")[0] for name, value in found.items()}


@case()
def a_group_with_a_short_timeout(rank: Rank) -> object:
    """A receive that nobody answers: the same error, and the handle tells it again."""
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    if rank.number:
        return None
    work: Any = dist.irecv(torch.zeros(3), 1, group=group)
    return refusal(work.wait), refusal(dist.recv, torch.zeros(3), 1, group=group)


@case()
def a_wait_with_a_short_timeout(rank: Rank) -> object:
    group = dist.new_group()
    if rank.number:
        return None
    work: Any = dist.irecv(torch.zeros(3), 1, group=group)
    return refusal(work.wait, timedelta(milliseconds=200))


def held() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@case()
def nothing_is_left_of_a_group(rank: Rank) -> object:
    """Threads and descriptors: what a group takes, and that all of it is given back."""
    dist.destroy_process_group(dist.new_group())
    before = held()
    group = dist.new_group([0, 1, 2, 3])
    dist.barrier(group=group)
    during = held()
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    after = held()
    return [now - then for now, then in zip(during, before, strict=True)], [
        now - then for now, then in zip(after, before, strict=True)
    ]


@case()
def destroyed_and_begun_again(rank: Rank) -> object:
    """Three worlds one after the other, each with a subgroup; nothing grows."""
    found: list[object] = []
    counts: list[tuple[int, int]] = []
    for turn in range(3):
        dist.barrier()
        dist.destroy_process_group()
        counts.append(held())
        found.append((dist.is_initialized(), refusal(dist.get_rank)))
        rank.begin()
        tensor = torch.ones(2) * (rank.number + turn)
        dist.all_reduce(tensor, group=dist.new_group([0, 1, 2, 3]))
        found.append((tensor, told_of(dist.group.WORLD)))
    assert counts[2] == counts[1], counts
    return found


@case()
def groups_start_no_threads(rank: Rank) -> object:
    """However many there are: what waits for sends, receives and reduce-scatters is shared, and one at a time here."""
    groups = [dist.new_group() for _ in range(4)]
    for group in groups * 5:
        dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(4), group=group)
    names = [thread.name for thread in threading.enumerate()]
    ours = [name for name in names if name.startswith("phoenix-")]
    return [name for name in names if name not in ours], len(ours) < len(groups * 5) / 2


@case(only="phoenix")
def the_living_groups_are_known(rank: Rank) -> object:
    world = dist.group.WORLD
    assert isinstance(world, communicators.PhoenixGroup)
    group = dist.new_group([0, 2])
    mesh = dist.init_device_mesh("cpu", (2, 2))
    members = [world, mesh.get_group(0), mesh.get_group(1), *([group] if rank.number % 2 == 0 else [])]
    assert set(communicators.groups()) == set(members)
    names = [str(group.group_name) for group in communicators.groups()]
    assert names == sorted(names)
    del group, mesh, members
    dist.barrier()
    for made in list(distributed_c10d._world.pg_map):
        if made is not world:
            dist.destroy_process_group(made)
    del made
    gc.collect()
    assert communicators.groups() == [world]
    return None
