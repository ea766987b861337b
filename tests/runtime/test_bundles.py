"""Bundles: who holds the same bits is known from structure, and the same on all holders."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from phoenix_runtime import TrainState
from phoenix_runtime.checkpoint import bundles
from phoenix_runtime.checkpoint.bundles import bundled, replicated

RANK, WORLD = 1, 4


@pytest.fixture(scope="module", autouse=True)
def one_of_four_ranks() -> Iterator[None]:
    """A group whose collectives do nothing."""
    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


def named(state: TrainState) -> dict[str, list[str]]:
    return {bundle.key: [name for name, _ in bundle.tensors] for bundle in bundled(state, RANK, WORLD)}


def keys(state: TrainState) -> list[str]:
    return [bundle.key for bundle in bundled(state, RANK, WORLD)]


def stepped(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()


def placed(mesh: dist.DeviceMesh, *placements: Placement) -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, placements, run_check=False))


def test_what_nobody_is_known_to_share_is_this_ranks_alone() -> None:
    assert named(TrainState(model=nn.Linear(3, 2))) == {"rank 1": ["model.weight", "model.bias"]}


def test_parameters_of_ddp_and_their_optimizer_state_are_held_by_its_group_frozen_ones_too() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    wrapped = DistributedDataParallel(nn.Sequential(model, nn.Linear(2, 2)))
    optimizer = torch.optim.Adam(wrapped.parameters())
    stepped(wrapped, optimizer)
    (bundle,) = bundled(TrainState(model=wrapped, optimizer=optimizer), RANK, WORLD)
    assert (bundle.key, bundle.holders) == ("ranks 0-3", (0, 1, 2, 3))
    names = [name for name, _ in bundle.tensors]
    assert "model.module.0.bias" in names and "optimizer[model.module.0.weight].exp_avg" in names
    assert len(names) == 4 + 3 * 3


def test_a_group_that_is_not_the_whole_world_holds_its_own() -> None:
    group = dist.new_group([1, 3])
    assert keys(TrainState(model=DistributedDataParallel(nn.Linear(3, 2), process_group=group))) == ["ranks 1,3"]


def test_what_ddp_was_told_to_ignore_is_this_ranks_alone() -> None:
    model = nn.Linear(3, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    assert named(TrainState(model=DistributedDataParallel(model))) == {
        "ranks 0-3": ["model.module.weight"],
        "rank 1": ["model.module.bias"],
    }


def test_placements_say_who_holds_a_dtensor() -> None:
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for placements, key in {
        (Replicate(), Replicate()): "ranks 0-3",
        (Replicate(), Shard(0)): "ranks 1,3",
        (Shard(0), Replicate()): "ranks 0-1",
        (Shard(0), Shard(0)): "rank 1",
        (Partial(), Replicate()): "rank 1",
    }.items():
        assert keys(TrainState(x=placed(grid, *placements))) == [key], placements
    assert keys(TrainState(x=placed(grid["b"], Replicate()))) == ["ranks 0-1"]


def test_optimizer_state_of_a_dtensor_goes_with_it_the_scalars_too() -> None:
    parameter = placed(dist.init_device_mesh("cpu", (2, 2)), Replicate(), Shard(0))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    (bundle,) = bundled(TrainState(x=parameter, optimizer=optimizer), RANK, WORLD)
    assert [row.name for row in bundle.layout.tensors] == [
        "x",
        "optimizer[x].step",
        "optimizer[x].exp_avg",
        "optimizer[x].exp_avg_sq",
    ]
    assert [row.dtype for row in bundle.layout.tensors][1:3] == ["float32", "float32 like its parameter"]
    assert bundle.layout.tensors[0].shape == (2, 2)  # of the local part


def test_zero_keeps_the_state_of_some_parameters_and_has_a_bundle_for_it_from_the_beginning() -> None:
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    state = TrainState(model=model, optimizer=optimizer)
    assert named(state)["rank 1"] == []
    stepped(model, optimizer.optim)
    assert 0 < len(named(state)["rank 1"]) < 8 * 3
    assert len(named(state)["ranks 0-3"]) == 8


def test_parameters_that_are_averaged_from_time_to_time_are_not_equal_in_between() -> None:
    model = DistributedDataParallel(nn.Linear(3, 2))
    averager = torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager(period=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    assert keys(TrainState(model=model, optimizer=optimizer)) == ["rank 1"]


def test_the_script_may_say_that_something_is_equal_everywhere() -> None:
    model, other = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([*model.parameters(), other])
    state = TrainState(model=model, other=other, optimizer=optimizer)
    assert keys(state) == ["rank 1"]
    replicated(model[0])
    assert named(state)["ranks 0-3"] == ["model.0.weight", "model.0.bias"]
    replicated(other)
    replicated(model)
    assert keys(state) == ["ranks 0-3"]
    with pytest.raises(TypeError, match="not a str"):
        replicated("model")  # type: ignore[arg-type]


def test_an_optimizer_that_is_said_to_be_equal_has_its_bundle_from_the_beginning() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    replicated(optimizer)
    state = TrainState(model=model, optimizer=optimizer)
    assert named(state)["ranks 0-3"] == []
    stepped(model, optimizer)
    assert len(named(state)["ranks 0-3"]) == 6


def test_a_parameter_that_only_an_optimizer_knows_is_part_of_the_state() -> None:
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1, momentum=0.9)
    assert named(TrainState(optimizer=optimizer)) == {"rank 1": ["optimizer.param_groups[0][0]"]}


def test_as_long_as_nothing_is_new_the_same_bundles_come_again() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = TrainState(model=model, optimizer=optimizer)
    first = bundled(state, RANK, WORLD)
    assert bundled(state, RANK, WORLD) is first
    stepped(model, optimizer)
    second = bundled(state, RANK, WORLD)
    assert second is not first and len(second[0].tensors) == 2 + 6
    stepped(model, optimizer)
    assert bundled(state, RANK, WORLD) is second
    optimizer.state.clear()
    assert len(bundled(state, RANK, WORLD)[0].tensors) == 2


def test_numbers_that_an_optimizer_keeps_do_not_make_bundles_new() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TrainState(model=model, optimizer=optimizer)
    stepped(model, optimizer)
    found = []
    for count in range(3):
        optimizer.state[model.weight]["count"] = 1000 + count
        state.capture()
        found.append(bundled(state, RANK, WORLD))
    assert found[1] is found[2]
    assert all("count" not in name for name, _ in found[2][0].tensors)


def test_a_tensor_that_got_other_memory_has_another_row() -> None:
    model = nn.Linear(3, 2)
    (bundle,) = bundled(TrainState(model=model), RANK, WORLD)
    assert [row.shape for row in bundle.now()[0].tensors] == [(2, 3), (2,)]
    model.weight.data = torch.zeros(5, 3)
    layout, (weight, _) = bundle.now()
    assert [row.shape for row in layout.tensors] == [(5, 3), (2,)] and weight.data_ptr() == model.weight.data_ptr()


@pytest.mark.parametrize(
    ("holders", "key"),
    [((2,), "rank 2"), ((0, 1, 2, 3), "ranks 0-3"), ((0, 1, 4, 5), "ranks 0-1,4-5"), ((1, 3), "ranks 1,3")],
)
def test_a_key_says_who_the_holders_are(holders: tuple[int, ...], key: str) -> None:
    assert bundles.key_of(holders) == key


def test_keys_of_many_holders_are_short_and_differ() -> None:
    found = {bundles.key_of(tuple(range(first, 4096, 8))) for first in range(8)}
    assert len(found) == 8 and max(map(len, found)) < 60


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda p: torch.optim.SGD(p, lr=1.0), 0),
        (lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), 1),
        (torch.optim.AdamW, 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
        (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9), 3),
        (torch.optim.Adagrad, 0),
        (torch.optim.Adadelta, 2),
        (torch.optim.NAdam, 2),
    ],
)
def test_what_an_optimizer_is_going_to_keep_is_known_before_its_first_step(
    make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer], copies: int
) -> None:
    """And is what it does keep then."""
    model = nn.Linear(100, 100)
    optimizer = make(model.parameters())
    state = TrainState(model=model, optimizer=optimizer)
    (before,) = bundled(state, RANK, WORLD)
    size = before.layout.size
    stepped(model, optimizer)
    (after,) = bundled(state, RANK, WORLD)
    assert after.to_come == 0
    assert abs(after.layout.size - size - before.to_come) <= 64 * 2 * (copies + 1)
    assert (before.to_come > 0) == (copies > 0)
