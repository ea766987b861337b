"""A job whose ranks may be as many as they like: `reshard_script.py ddp|fsdp|zero STEPS`.

Before each step all ranks put together what parameters and optimizer state are as a whole, and rank 0 prints a digest of it
as a JSON line; each rank prints where its data stands.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import phoenix_runtime as phoenix

WIDTH = 6


class Training:
    def __init__(self, kind: str, rank: int, world: int) -> None:
        torch.manual_seed(5)
        net = nn.Sequential(
            nn.Linear(WIDTH, 7), nn.BatchNorm1d(7) if kind != "fsdp" else nn.ReLU(), nn.Linear(7, WIDTH)
        )
        self.kind = kind
        self.model: nn.Module = fully_shard(net) if kind == "fsdp" else DistributedDataParallel(net)
        self.optimizer: torch.optim.Optimizer
        if kind == "zero":
            self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.Adam, lr=1e-2)
        else:
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        examples = TensorDataset(torch.randn(48, WIDTH))
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(examples, world, rank)
        self.state = phoenix.TrainState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler,
            data=phoenix.Batches(DataLoader(examples, 2, sampler=sampler)),
        )  # fmt: skip

    def step(self) -> None:
        (batch,) = next(self.state.data)
        (self.model(batch) - batch).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def whole(self) -> str:
        """All ranks call it."""
        found = hashlib.sha256()
        optimizer = self.optimizer
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.consolidate_state_dict()
            kept = optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}
        else:
            kept = {index: optimizer.state.get(item, {}) for index, item in enumerate(self.model.parameters())}
        for tensor in self.model.parameters():
            found.update(_bytes(tensor))
        for _, entry in sorted(kept.items()):
            for _, tensor in sorted(entry.items()):
                found.update(_bytes(tensor))
        return found.hexdigest()[:16]


def _bytes(tensor: Tensor) -> bytes:
    plain = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return bytes(plain.detach().contiguous().view(-1).view(torch.uint8).tolist())


def main(kind: str, steps: int) -> None:
    torch.set_num_threads(1)
    phoenix.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    training = Training(kind, rank, world)
    state = training.state
    while state.step < steps:
        said = {"rank": rank, "step": state.step, "whole": training.whole(), "lr": training.scheduler.get_last_lr()[0]}
        print(json.dumps({**said, "data": state.data.position().place()}), flush=True)
        phoenix.run_step(state, training.step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
