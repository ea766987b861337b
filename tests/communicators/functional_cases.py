"""Functional collectives, collectives with gradients, and what torch.compile makes of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from case_table import Rank, case
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def own(rank: Rank, *shape: int, gradient: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(7 + rank.number)
    return torch.randn(*shape, generator=generator, requires_grad=gradient)


@case()
def functional_collectives(rank: Rank) -> object:
    world: Any = dist.group.WORLD
    found: dict[str, Any] = {
        name: functional.all_reduce(own(rank, 3), name, world) for name in ("sum", "min", "max", "product")
    }
    found["gather"] = functional.all_gather_tensor(own(rank, 2, 3), 0, world)
    found["gather by columns"] = functional.all_gather_tensor(own(rank, 2, 3), 1, world)
    found["scatter"] = functional.reduce_scatter_tensor(own(rank, 8, 3), "sum", 0, world)
    found["scatter by columns"] = functional.reduce_scatter_tensor(own(rank, 2, 8), "sum", 1, world)
    found["exchange"] = functional.all_to_all_single(own(rank, 8), None, None, world)
    sizes = [rank.number + other + 1 for other in range(rank.size)]
    found["uneven"] = functional.all_to_all_single(own(rank, sum(sizes)), sizes, sizes, world)
    found["broadcast"] = functional.broadcast(own(rank, 3), 2, world)
    found["many"] = functional.all_reduce_coalesced([own(rank, 3), own(rank, 2)], "sum", world)
    found["gathers"] = functional.all_gather_into_tensor_coalesced([own(rank, 3), own(rank, 2)], world)
    found["scatters"] = functional.reduce_scatter_tensor_coalesced([own(rank, 8), own(rank, 4)], "sum", [0, 0], world)
    found["permuted"] = functional.permute_tensor(own(rank, 3), [1, 2, 3, 0], world)
    return {name: _waited(value) for name, value in found.items()}


def _waited(value: Any) -> Any:
    return [_waited(item) for item in value] if isinstance(value, list) else functional.wait_tensor(value) + 0


@case()
def functional_collectives_by_name_and_by_mesh(rank: Rank) -> object:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    group = mesh.get_group("rows")
    found = [
        functional.all_reduce(own(rank, 3), "sum", reference) for reference in (group, group.group_name, (mesh, 0))
    ]
    found.append(functional.all_reduce(own(rank, 3), "sum", mesh["columns"]))
    return [_waited(value) for value in found]


@case()
def functional_collectives_have_gradients(rank: Rank) -> object:
    world: Any = dist.group.WORLD
    found = []
    for operation in (
        lambda value: functional.all_gather_tensor_autograd(value, 0, world),
        lambda value: functional.reduce_scatter_tensor_autograd(value, "sum", 0, world),
        lambda value: functional.all_to_all_single_autograd(value, None, None, world),
        lambda value: functional.all_reduce(value, "sum", world),
    ):
        value = own(rank, 8, gradient=True)
        result = operation(value)
        (result * (1 + torch.arange(result.numel()))).sum().backward()
        found.append((result, value.grad))
    return found


@case()
def collectives_with_gradients(rank: Rank) -> object:
    found: dict[str, object] = {}
    value, operations = own(rank, 4, gradient=True), differentiable
    results: dict[str, Any] = {
        "all_reduce": operations.all_reduce(value * 2),
        "broadcast": operations.broadcast(value * 2, 1),
        "reduce": operations.reduce(value * 2, 1),
        "all_gather": torch.stack(list(operations.all_gather(value * 2))),
        "reduce_scatter": operations.reduce_scatter(torch.zeros(1), [part * 2 for part in value.chunk(4)]),
        "all_to_all_single": operations.all_to_all_single(torch.zeros(4), value * 2),
        "all_to_all": torch.cat(
            list(operations.all_to_all([torch.zeros(1) for _ in range(4)], [part * 2 for part in value.chunk(4)]))
        ),
        "gather": torch.stack(list(operations.gather(value * 2, 2))),
        "scatter": operations.scatter([part * 2 for part in value.chunk(4)], 3),
    }
    for name, result in results.items():
        (gradient,) = torch.autograd.grad((result * (1 + rank.number)).sum(), value, retain_graph=True)
        found[name] = result, gradient
    return found


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))


def _trained(model: Any, rank: Rank, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(own(rank, 4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@case()
def a_compiled_function_with_a_collective(rank: Rank) -> object:
    """In one graph: the functional form, and the plain one, which torch rewrites."""
    torch._dynamo.reset()
    world: Any = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def reduced(value: Tensor) -> Tensor:
        return functional.all_reduce(value * 2, "sum", world) + 1

    @torch.compile(backend="aot_eager", fullgraph=True)
    def in_place(value: Tensor) -> Tensor:
        doubled = value * 2
        dist.all_reduce(doubled)
        gathered = torch.zeros(12)
        dist.all_gather_into_tensor(gathered, doubled)
        return gathered + 1

    return reduced(own(rank, 3)), in_place(own(rank, 3))


@case()
def a_compiled_function_that_breaks_its_graph(rank: Rank) -> object:
    torch._dynamo.reset()
    group = dist.new_group([0, 1, 2, 3])

    @torch.compile(backend="aot_eager")
    def reduced(value: Tensor) -> Tensor:
        doubled = value * 2
        work = dist.all_reduce(doubled, group=group, async_op=True)
        assert work is not None
        work.wait()
        dist.barrier()
        return doubled + dist.get_rank() + dist.get_world_size(group)

    return reduced(own(rank, 3))


@case()
def compiled_ddp(rank: Rank) -> object:
    torch._dynamo.reset()
    model = DistributedDataParallel(_model())
    _trained(torch.compile(model, backend="aot_eager"), rank)
    return model


@case()
def compiled_fully_shard(rank: Rank) -> object:
    torch._dynamo.reset()
    model = _model()
    fully_shard(model)
    _trained(torch.compile(model, backend="aot_eager"), rank)
    return model


@case(slow=True)
def compiled_by_inductor(rank: Rank) -> object:
    """Into machine code, with the collective in the graph."""
    torch._dynamo.reset()
    model = DistributedDataParallel(_model())
    _trained(torch.compile(model), rank)
    world: Any = dist.group.WORLD

    @torch.compile(fullgraph=True)
    def reduced(value: Tensor) -> Tensor:
        return functional.all_reduce(value * 2, "sum", world) + 1

    return model, reduced(own(rank, 3))
