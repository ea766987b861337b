"""Training with a model in parts: fully_shard, tensor parallelism, both, pipelining, and checkpoints of such models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from case_table import Rank, case
from replicated_cases import batch, model, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def sharded(**options: Any) -> nn.Sequential:
    made = model()
    for layer in made:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(made, **options)
    return made


@case()
def fully_shard_in_one_dimension(rank: Rank) -> object:
    """33 columns on 4 ranks: the shards are uneven."""
    return train(sharded(), rank)


@case()
def fully_shard_in_two_dimensions(rank: Rank) -> object:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return train(sharded(mesh=mesh), rank)


@case()
def fully_shard_with_mixed_precision(rank: Rank) -> object:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(sharded(mp_policy=policy), rank, loss=lambda output: output.float().square().mean())


@case()
def fully_shard_without_resharding(rank: Rank) -> object:
    return train(sharded(reshard_after_forward=False), rank), train(sharded(reshard_after_forward=2), rank)


@case()
def fully_shard_on_other_terms(rank: Rank) -> object:
    """Clipping, gradient accumulation, prefetching, gradients divided by something else."""
    trained: Any = sharded()
    trained[0].set_modules_to_forward_prefetch([trained[2]])
    trained.set_gradient_divide_factor(3.0)
    optimizer = torch.optim.Adam(trained.parameters())
    norms = []
    for step in range(4):
        trained.set_requires_gradient_sync(step % 2 == 1)
        trained(batch(rank, step)).square().mean().backward()
        if step % 2:
            norms.append(nn.utils.clip_grad_norm_(trained.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
    return trained, norms


@case()
def fully_sharded_data_parallel(rank: Rank) -> object:
    """The older form of sharding."""
    return train(FullyShardedDataParallel(model(), device_id=torch.device("cpu")), rank)


def in_tensors(mesh: Any) -> nn.Module:
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return parallelize_module(made, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, foreach=False)


@case()
def tensor_parallelism(rank: Rank) -> object:
    same = Rank(0, rank.size, rank.folder)
    return train(in_tensors(init_device_mesh("cpu", (rank.size,))), same, make=plain_sgd)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.down(torch.relu(self.up(self.norm(value))))
        return result


@case()
def sequence_parallelism(rank: Rank) -> object:
    mesh = init_device_mesh("cpu", (rank.size,))
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }
    made = parallelize_module(Block(), mesh, plan)
    parallelize_module(made, mesh, {"up": ColwiseParallel()})
    value = batch(Rank(0, 4, rank.folder), 0).chunk(4)[rank.number]
    made(value).square().sum().backward()
    return [parameter.grad for parameter in made.parameters()]


@case()
def losses_in_parallel(rank: Rank) -> object:
    mesh = init_device_mesh("cpu", (rank.size,))
    scores = distribute_tensor(batch(Rank(0, 4, rank.folder), 0).requires_grad_(), mesh, [Shard(1)])
    with loss_parallel():
        loss = nn.functional.cross_entropy(scores, torch.arange(8))
        loss.backward()
    return loss, scores.grad


@case()
def tensors_change_their_layout(rank: Rank) -> object:
    """Every way from one layout to another, on 7 rows and 5 columns that no rank gets evenly."""
    mesh = init_device_mesh("cpu", (rank.size,))
    whole = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    layouts: list[Any] = [Shard(0), Shard(1), Replicate()]
    found: list[object] = []
    for start in layouts:
        for end in layouts:
            moved = distribute_tensor(whole, mesh, [start]).redistribute(mesh, [end])
            found.append((moved.to_local(), moved.full_tensor()))
    partial = DTensor.from_local(whole * rank.number, mesh, [dist.tensor.Partial()])
    found += [partial.redistribute(mesh, [end]).to_local() for end in layouts]
    product = distribute_tensor(whole, mesh, [Shard(0)]) @ distribute_tensor(whole.T, mesh, [Shard(1)])
    return [*found, product.sum()]


@case()
def tensor_parallelism_with_fully_shard(rank: Rank) -> object:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensors"))
    made = in_tensors(mesh["tensors"])
    fully_shard(made, mesh=mesh["data"])
    return train(made, Rank(rank.number // 2, rank.size, rank.folder), make=plain_sgd)


def piped(rank: Rank, schedule: Callable[..., Any], *, shapes_given: bool = False, chunks: int = 1) -> object:
    """Four stages on four ranks (or twice as many); only the last one knows the targets and sees the losses."""
    torch.manual_seed(0)
    count = rank.size * chunks
    layers = [nn.Linear(16, 16) for _ in range(count)]
    mine = [layers[index] for index in range(rank.number, count, rank.size)]
    stages = []
    for index, layer in enumerate(mine):
        place = rank.number + index * rank.size
        example = torch.zeros(2, 16, requires_grad=place > 0)
        given: dict[str, Any] = {"input_args": example, "output_args": layer(example)} if shapes_given else {}
        stages.append(PipelineStage(layer, place, count, torch.device("cpu"), **given))
    runs = schedule(stages if chunks > 1 else stages[0], 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD([parameter for layer in mine for parameter in layer.parameters()], 0.1)
    seen: list[object] = []
    for step in range(3):
        inputs, targets = batch(Rank(0, 4, rank.folder), step), batch(Rank(1, 4, rank.folder), step)
        losses: list[Tensor] = []
        if rank.number == 0:
            runs.step(inputs)
        elif rank.number == rank.size - 1:
            seen.append((runs.step(target=targets, losses=losses), losses))
        else:
            runs.step()
        optimizer.step()
        optimizer.zero_grad()
    return seen, mine


@case()
def pipelines_of_gpipe(rank: Rank) -> object:
    return piped(rank, ScheduleGPipe)


@case()
def pipelines_of_one_forward_one_backward(rank: Rank) -> object:
    return piped(rank, Schedule1F1B)


@case()
def pipelines_of_given_shapes(rank: Rank) -> object:
    return piped(rank, ScheduleGPipe, shapes_given=True), piped(rank, Schedule1F1B, shapes_given=True)


@case()
def pipelines_with_two_stages_a_rank(rank: Rank) -> object:
    return piped(rank, ScheduleInterleaved1F1B, chunks=2)


@case()
def pipelines_with_data_parallelism(rank: Rank) -> object:
    """Two pipelines of two stages; the stages of a kind are replicas under fully_shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stages"))
    place = mesh.get_local_rank("stages")
    torch.manual_seed(0)
    layer = [nn.Linear(16, 16) for _ in range(2)][place]
    fully_shard(layer, mesh=mesh["data"])
    stage = PipelineStage(layer, place, 2, torch.device("cpu"), group=mesh.get_group("stages"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    values = batch(Rank(mesh.get_local_rank("data"), 4, rank.folder), 0)
    losses: list[Tensor] = []
    if place == 0:
        schedule.step(values)
    else:
        schedule.step(target=values, losses=losses)
    return losses, [parameter.grad for parameter in layer.parameters()]


@case()
def checkpoints_are_saved_and_loaded(rank: Rank) -> object:
    """Trained on after the save and loaded again: back at the same bits; an asynchronous save is read by the next load."""
    trained = sharded()
    optimizer = torch.optim.Adam(trained.parameters())

    def step(number: int) -> None:
        trained(batch(rank, number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def parts() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(trained, optimizer), strict=True))

    def load(name: str) -> list[Any]:
        state = parts()
        checkpoint.load(state, checkpoint_id=rank.folder / f"{rank.backend}-{name}")
        set_state_dict(trained, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return [parameter.full_tensor().clone() for parameter in trained.parameters()]

    step(0)
    checkpoint.save(parts(), checkpoint_id=rank.folder / f"{rank.backend}-first")
    first = [parameter.full_tensor().clone() for parameter in trained.parameters()]
    step(1)
    loaded = load("first")
    assert all(torch.equal(*pair) for pair in zip(first, loaded, strict=True))
    step(2)
    second = [parameter.full_tensor().clone() for parameter in trained.parameters()]
    saving: Any = checkpoint.async_save(parts(), checkpoint_id=rank.folder / f"{rank.backend}-second")
    saving.result()
    dist.barrier()
    step(3)
    assert all(torch.equal(*pair) for pair in zip(second, load("second"), strict=True))
    return loaded, second
