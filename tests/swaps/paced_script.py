"""A script whose steps take a while: `paced_script.py KIND STEPS MILLISECONDS`; KIND: ddp, or pipeline (of two such stages).

Each rank computes for about MILLISECONDS of a core in each step. In the pipeline the second stage does three times as much as
the first, which is no fault of its ranks.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import phoenix_runtime as phoenix

WIDTH: Final = 256
STAGE_FACTOR: Final = 3


def rounds_for(milliseconds: float) -> int:
    """How many products of matrices take so much of a core: in processor time, so that a busy machine gives the same."""
    ones = torch.ones(WIDTH, WIDTH)
    for _ in range(20):
        ones @ ones
    began = time.thread_time()
    for _ in range(100):
        ones @ ones
    each = (time.thread_time() - began) / 100
    return max(1, round(milliseconds / 1000 / each))


class Training:
    def __init__(self, kind: str, milliseconds: float) -> None:
        self.rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(5)
        self.pipeline = kind == "pipeline"
        self.stage = self.rank // (world // 2) if self.pipeline else 0
        peers = None
        if self.pipeline:
            half = world // 2
            groups = [dist.new_group(list(range(s * half, (s + 1) * half))) for s in range(2)]
            self.pairs = [dist.new_group([rank, rank + half]) for rank in range(half)]
            self.pair = self.pairs[self.rank % half]
            peers = groups[self.stage]
        rounds = torch.tensor([rounds_for(milliseconds)])
        dist.all_reduce(rounds, op=dist.ReduceOp.MIN)
        self.rounds = int(rounds) * (STAGE_FACTOR if self.stage else 1)
        self.model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH), process_group=peers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.state = phoenix.TrainState(model=self.model, optimizer=self.optimizer)

    def step(self) -> Tensor:
        given = torch.full((WIDTH, WIDTH), 0.01 * (self.rank + 1))
        if self.pipeline and self.stage:
            dist.recv(given, group=self.pair, group_src=0)
        work = torch.eye(WIDTH)
        for _ in range(self.rounds):
            work = work @ work
        out = self.model(given + 0 * work)
        loss = out.square().mean()
        if self.pipeline and not self.stage:
            dist.send(out.detach(), group=self.pair, group_dst=1)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        detached: Tensor = loss.detach()
        return detached


def main(kind: str, steps: int, milliseconds: float) -> None:
    torch.set_num_threads(1)
    phoenix.init_process_group("gloo")
    training = Training(kind, milliseconds)
    began = time.monotonic()
    while training.state.step < steps:
        phoenix.run_step(training.state, training.step)
    digest = hash(tuple(p.detach().sum().item() for p in training.model.parameters()))
    seconds = (time.monotonic() - began) / steps
    print(json.dumps({"rank": dist.get_rank(), "digest": digest, "step_seconds": round(seconds, 4)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
