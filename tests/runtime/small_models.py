"""Small training jobs of every kind of parallelism for four ranks, each as it would stand in a script."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from phoenix_runtime import Batches, TrainState

SIZE = 4
WIDTH = 30
EXAMPLES = 128


class Layer(nn.Module):
    """With dropout and, where asked for, a norm whose buffers a forward changes and a branch that is not always used."""

    def __init__(self, norm: bool = False, branch: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 46), nn.Linear(46, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.branch = nn.Linear(WIDTH, WIDTH) if branch else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.drop(torch.relu(self.up(x))))
        if self.branch is not None and bool(x.sum() > 0):
            y = y + self.branch(x)
        return self.norm(x + y) if not isinstance(self.norm, nn.Identity) else x + y


def layers(count: int = 3, **kind: bool) -> nn.Sequential:
    return nn.Sequential(*(Layer(**kind) for _ in range(count)))


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Layer):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def ddp(**options: Any) -> Callable[[], nn.Module]:
    return lambda: DistributedDataParallel(layers(), bucket_cap_mb=0.005, **options)


def ddp_with_buffers_and_unused() -> nn.Module:
    return DistributedDataParallel(
        layers(norm=True, branch=True), bucket_cap_mb=0.005, find_unused_parameters=True, gradient_as_bucket_view=True
    )


def hybrid() -> nn.Module:
    return shard(layers(), mesh=dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def tensor_parallel(sharded: bool) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = layers()
    for layer in model:
        layer.drop.p = 0.0  # ranks of one tensor mesh have to drop the same
    plan = {f"{i}.{name}": style() for i in range(len(model)) for name, style in PLAN.items()}
    parallelize_module(model, mesh["tensor"], plan)
    return shard(model, mesh=mesh["data"]) if sharded else model


PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "ddp": ddp(),
    "ddp bucket view": ddp(gradient_as_bucket_view=True),
    "ddp with buffers and unused": ddp_with_buffers_and_unused,
    "ddp accumulating": ddp(),
    "fsdp": lambda: shard(layers()),
    "fsdp unresharded": lambda: shard(layers(), reshard_after_forward=False),
    "fsdp mixed": lambda: shard(layers(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "hsdp": hybrid,
    "tp": lambda: tensor_parallel(sharded=False),
    "tp fsdp": lambda: tensor_parallel(sharded=True),
    "zero": ddp(),
    "gpipe": Layer,
    "1f1b": Layer,
}
KINDS = tuple(MODELS)


class Job:
    """One rank of a job of this kind, from its beginning: `state`, and `step` for run_step."""

    def __init__(self, kind: str, rank: int) -> None:
        torch.manual_seed(7 + (rank if kind in ("gpipe", "1f1b") else 0))
        self.kind, self.rank = kind, rank
        self.model = MODELS[kind]()
        torch.manual_seed(100 + self.data_rank)  # each draws its own dropout, as in a real job
        self.optimizer = self._optimizer()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))
        self.schedule = self._schedule()
        self.state = TrainState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, data=Batches(self._loader())
        )

    @property
    def data_rank(self) -> int:
        if self.kind in ("tp", "tp fsdp"):
            return self.rank // 2
        return 0 if self.kind in ("gpipe", "1f1b") else self.rank

    def _optimizer(self) -> torch.optim.Optimizer:
        if self.kind == "zero":
            return ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.Adam, lr=1e-2)
        return torch.optim.Adam(self.model.parameters(), lr=1e-2, foreach=False)

    def _loader(self) -> DataLoader[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(5)
        examples = torch.randn(EXAMPLES, 2, WIDTH, generator=generator)
        parts = {"tp": 2, "tp fsdp": 2, "gpipe": 1, "1f1b": 1}.get(self.kind, SIZE)
        sampler = DistributedSampler(TensorDataset(examples), num_replicas=parts, rank=self.data_rank)
        return DataLoader(TensorDataset(examples), batch_size=8, sampler=sampler)

    def _schedule(self) -> Any:
        if self.kind not in ("gpipe", "1f1b"):
            return None
        stage = PipelineStage(self.model, self.rank, SIZE, torch.device("cpu"))
        schedule = ScheduleGPipe if self.kind == "gpipe" else Schedule1F1B
        return schedule(stage, 4, loss_fn=lambda output, target: ((output - target) ** 2).mean())

    def step(self) -> None:
        if self.schedule is not None:
            (pairs,) = next(self.state.data)
            inputs, targets = pairs.unbind(1)
            arguments = (inputs,) if self.rank == 0 else ()
            last = {"target": targets, "losses": []} if self.rank == SIZE - 1 else {}
            self.schedule.step(*arguments, **last)
        elif self.kind == "ddp accumulating":
            with self.model.no_sync():
                self._loss().backward()
            self._loss().backward()
        else:
            self._loss().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def _loss(self) -> Tensor:
        (pairs,) = next(self.state.data)
        inputs, targets = pairs.unbind(1)
        return ((self.model(inputs) - targets) ** 2).mean()

    def digest(self) -> str:
        """Of everything this rank holds: parameters, buffers, optimizer state, learning rate, random numbers to come."""
        found = hashlib.sha256()
        for tensor in [*self.model.parameters(), *self.model.buffers(), torch.rand(2)]:
            found.update(_bytes(tensor))
        optimizer = self.optimizer.optim if self.kind == "zero" else self.optimizer
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            for value in optimizer.state[parameter].values():
                found.update(_bytes(value))
        found.update(str([group["lr"] for group in self.optimizer.param_groups]).encode())
        return found.hexdigest()[:16]


def _bytes(tensor: Tensor) -> bytes:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bytes(local.detach().contiguous().view(-1).view(torch.uint8).tolist())
