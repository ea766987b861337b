"""Sections wherever a script may have them: `section_script.py KIND STEPS`.

One before the loop, in every process; one at the top of the loop, before each third step. KIND is what the second one returns:
"large" (of rank 0: more than is kept for a replacement) or "lambda". Data parallel by hand. Fault point beside the runtime's
own: "stepped", when all ranks have stepped their optimizer.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import phoenix_runtime as phoenix
from phoenix_runtime.fault_points import FAULT_POINTS

EVERY = 3


def main(kind: str, steps: int) -> None:
    torch.set_num_threads(1)
    phoenix.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.1), nn.Linear(12, 6))
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    phoenix.replicated(model)
    phoenix.replicated(optimizer)
    state = phoenix.TrainState(model=model, optimizer=optimizer, best=float("inf"), rises=0)
    losses: dict[int, float] = {}  # what sections returned in this process, by step

    def train_step() -> Tensor:
        loss: Tensor = (model(torch.rand(4, 6)) - 0.3).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        dist.barrier()
        FAULT_POINTS.reached("stepped")
        optimizer.zero_grad()
        return loss.detach()

    def meet() -> list[int]:
        everybody: list[Any] = [None] * world
        dist.all_gather_object(everybody, 100 + rank)
        return everybody

    def evaluate() -> Any:
        with torch.no_grad():
            loss = (model(torch.rand(2, 6)) - 0.3).square().mean()
            dist.all_reduce(loss)
        if kind == "large" and rank == 0:
            return [float(loss), b"examples" * (1 << 18)]
        return [float(loss), (lambda: loss) if kind == "lambda" else b""]

    everybody = phoenix.run_section(state, meet, name="meet")
    while state.step < steps and state.rises < 100:
        if state.step % EVERY == 0:
            loss, _ = phoenix.run_section(state, evaluate, name="evaluate")
            losses[state.step] = loss
            state.rises += loss > state.best  # early stopping
            state.best = min(loss, state.best)
            optimizer.param_groups[0]["lr"] *= 0.9
        phoenix.run_step(state, train_step)
        phoenix.report(step=state.step)
    digest = hashlib.sha256(repr((state.best, state.rises, optimizer.param_groups[0]["lr"], everybody)).encode())
    for tensor in [*model.parameters(), torch.rand(2)]:
        digest.update(bytes(tensor.detach().view(-1).view(torch.uint8).tolist()))
    said = {"rank": rank, "digest": digest.hexdigest()[:16], "losses": losses, "generation": phoenix.generation()}
    print(json.dumps(said), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
