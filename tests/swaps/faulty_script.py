"""A quick training script for faults anywhere: `faulty_script.py KIND STEPS`. No step takes long, and neither does its start.

Fault points beside the runtime's own: "built" (the model is), "collective N" (the step's N-th, from 1), "between" (before
run_step), "optimizer 1" and "optimizer 2" (in the middle of each, with half of its parameters changed), "between optimizers",
"after" (the loop), "in section"; and all of harms.py, before run_step. KIND is "ddp", or "sections" (with an evaluation after
each second step).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from harms import Counted, do_harm
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import phoenix_runtime as phoenix
from phoenix_runtime.fault_points import FAULT_POINTS

WIDTH = 16


class Momentum(torch.optim.Optimizer):
    """A fault point is in its middle, when some of the parameters have changed and others have not."""

    def __init__(self, parameters: Iterator[nn.Parameter], name: str) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.name = name

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for i, parameter in enumerate(group["params"]):
                if i == 1:
                    FAULT_POINTS.reached(self.name)
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.mul_(0.9).add_(parameter.grad)
                parameter.sub_(group["lr"] * average)


class Training:
    def __init__(self, rank: int) -> None:
        torch.manual_seed(1)
        self.model = DistributedDataParallel(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 4))
        )
        layers = self.model.module
        self.first = Momentum(layers[0].parameters(), "optimizer 1")
        self.second = Momentum(layers[2].parameters(), "optimizer 2")
        torch.manual_seed(100 + rank)
        self.state = phoenix.TrainState(model=self.model, first=self.first, second=self.second)

    def step(self) -> Tensor:
        loss: Tensor = self.model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        self.first.step()
        FAULT_POINTS.reached("between optimizers")
        self.second.step()
        self.first.zero_grad()
        self.second.zero_grad()
        return loss.detach()

    def evaluate(self) -> float:
        loss = self.model.module.eval()(torch.ones(WIDTH)).sum().detach()
        dist.all_reduce(loss)
        FAULT_POINTS.reached("in section")
        dist.all_reduce(loss)
        self.model.train()
        return float(loss)

    def digest(self) -> str:
        found = hashlib.sha256()
        optimizers = [*self.first.state.values(), *self.second.state.values()]
        for tensor in [*self.model.parameters(), *(state["average"] for state in optimizers), torch.rand(2)]:
            found.update(bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist()))
        return found.hexdigest()[:16]


def main(kind: str, steps: int) -> None:
    torch.set_num_threads(1)
    phoenix.init_process_group("gloo")
    rank = dist.get_rank()
    training = Training(rank)
    state = training.state
    FAULT_POINTS.reached("built")
    counted = Counted()
    while state.step < steps:
        FAULT_POINTS.reached("between")
        do_harm()
        counted.made = 0
        phoenix.run_step(state, training.step)
        phoenix.report(step=state.step)
        if kind == "sections" and state.step % 2 == 0:
            phoenix.run_section(state, training.evaluate, name="evaluate")
    FAULT_POINTS.reached("after")
    digest = {"rank": rank, "digest": training.digest(), "step": state.step, "generation": phoenix.generation()}
    print(json.dumps({**digest, "pid": os.getpid()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
