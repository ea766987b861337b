"""Training with a whole model on every rank: DistributedDataParallel in its forms, and ZeroRedundancyOptimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from case_table import Rank, case
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 16))


def batch(rank: Rank, step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank.number))


def train(
    trained: Any,
    rank: Rank,
    *,
    steps: int = 3,
    make: Callable[..., Any] = torch.optim.Adam,
    loss: Callable[[Any], Tensor] = lambda output: output.square().mean(),
) -> list[object]:
    """A few steps on batches of the rank's own; the losses, and at the end what was trained."""
    optimizer = make(trained.parameters())
    losses: list[object] = []
    for step in range(steps):
        value = loss(trained(batch(rank, step)))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return [losses, [*trained.parameters()], [*trained.buffers()]]


@case()
def ddp(rank: Rank) -> object:
    return train(DistributedDataParallel(model()), rank, steps=5)


@case()
def ddp_in_small_buckets(rank: Rank) -> object:
    """Several buckets in flight at once, gradients as views of them."""
    return train(DistributedDataParallel(model(), bucket_cap_mb=0.001, gradient_as_bucket_view=True), rank)


@case()
def ddp_in_a_group(rank: Rank) -> object:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return train(DistributedDataParallel(model(), process_group=pairs[rank.number % 2]), rank)


@case()
def ddp_with_buffers(rank: Rank) -> object:
    torch.manual_seed(3)
    normed = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 16))
    return train(DistributedDataParallel(normed), rank)


class Branches(nn.Module):
    """Which branch is used depends on the rank and on the call."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.rank, self.calls = rank.number, 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        chosen: Tensor = self.branches[(self.rank + self.calls) % 2](value)
        return chosen


@case()
def ddp_with_unused_parameters(rank: Rank) -> object:
    return train(DistributedDataParallel(Branches(rank), find_unused_parameters=True), rank)


@case()
def ddp_with_static_graph(rank: Rank) -> object:
    return train(DistributedDataParallel(model(), static_graph=True), rank, steps=4)


@case()
def ddp_with_sparse_gradients(rank: Rank) -> object:
    torch.manual_seed(3)
    trained = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    for step in range(3):
        trained(torch.tensor([rank.number, step, 9])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return trained


@case()
def ddp_accumulates_gradients(rank: Rank) -> object:
    """Two batches of every three are summed up without a collective."""
    trained = DistributedDataParallel(model())
    optimizer = torch.optim.Adam(trained.parameters())
    for step in range(9):
        with trained.no_sync() if step % 3 < 2 else contextlib.nullcontext():
            trained(batch(rank, step)).square().mean().backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return trained


@case()
def ddp_with_mixed_precision_and_clipping(rank: Rank) -> object:
    trained = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(trained.parameters())
    norms = []
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = trained(batch(rank, step)).square().mean()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(trained.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return trained, norms


@case()
def ddp_with_hooks_on_its_communication(rank: Rank) -> object:
    """Hooks chain on the futures of collectives."""
    found = []
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        trained = DistributedDataParallel(model())
        trained.register_comm_hook(dist.group.WORLD, hook)
        found.append(train(trained, rank))
    trained = DistributedDataParallel(model())
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2)
    trained.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return [*found, train(trained, rank, steps=4)]


@case()
def ddp_with_uneven_inputs(rank: Rank) -> object:
    """Each rank has another number of batches: those that are done shadow the others' collectives."""
    trained = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    with trained.join():
        for step in range(rank.number + 1):
            trained(batch(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return trained


@case()
def models_averaged_from_time_to_time(rank: Rank) -> object:
    trained = model()
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    for step in range(4):
        trained(batch(rank, step)).square().mean().backward()
        optimizer.step()
        averager.average_parameters(trained.parameters())  # those that have a gradient
        optimizer.zero_grad()
    return trained


@case()
def zero_redundancy_optimizer(rank: Rank) -> object:
    def make(parameters: Any) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.Adam, lr=0.01)

    return train(DistributedDataParallel(model()), rank, make=make)


@case()
def zero_redundancy_optimizer_saves_its_state(rank: Rank) -> object:
    trained = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(trained.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    for step in range(2):
        trained(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=1)
    if rank.number != 1:
        return None
    saved = optimizer.state_dict()
    return saved["state"]
