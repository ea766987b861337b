"""Everything that training state can be, in a script for phoenix-run, torchrun and python: `state_script.py everything STEPS`.

Each rank prints at the end, as a JSON line, a digest of each part of what it holds and of what its steps have seen. Fault
points beside the runtime's own: "built", "between" (before run_step), "in section" (between two collectives of a section),
"after" (the loop); "node" is one that takes the whole node away, before run_step.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
from harms import lose_node
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import phoenix_runtime as phoenix
from phoenix_runtime.fault_points import FAULT_POINTS

WIDTH = 12
EXAMPLES = 88  # of four ranks each has 22, in batches of 4: an epoch ends in its sixth batch, and not with a full one
EVALUATE = 4  # after so many steps
OVERFLOW = 5  # in every so many-th step the scaler finds an infinite gradient and leaves its optimizer out


class Augmented(Dataset[Tensor]):
    """Draws from all global generators, in the loader's worker processes."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> Tensor:
        noise = torch.rand(WIDTH) * random.random() + float(numpy.random.rand())
        return torch.linspace(0, index / EXAMPLES, WIDTH) + 0.1 * noise


class Numbered(Dataset[Tensor]):
    """Without augmentation: what StatefulDataLoader's workers have drawn is in no state of it."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), index / 30)


class Net(nn.Module):
    """A norm's buffers, and one of its own that is not persistent and so in no state_dict."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 24), nn.BatchNorm1d(24), nn.Dropout(0.2), nn.ReLU())
        self.head = nn.Linear(24, WIDTH)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.head(self.body(x))
        return y + 0.01 * torch.sin(self.calls)


class Momentum(torch.optim.Optimizer):
    """Has state that is no tensor: a count, a list of numbers."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("recent", []).append(float(parameter.grad.norm()))
                del state["recent"][:-3]
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.mul_(0.9).add_(parameter.grad)
                parameter.add_(average, alpha=-group["lr"] / (1 + 0.01 * state["count"] + 0.01 * sum(state["recent"])))


class Training:
    """One rank: `state`, `step` for run_step, and what the script does between two steps."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        torch.manual_seed(3)
        self.model = DistributedDataParallel(Net(), bucket_cap_mb=0.002)
        self.average = AveragedModel(self.model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        torch.manual_seed(100 + rank)
        random.seed(200 + rank)
        numpy.random.seed(300 + rank)
        net = self.model.module
        self.first = torch.optim.AdamW(net.body.parameters(), lr=1e-2)
        self.second = Momentum(net.head.parameters(), lr=1e-2)
        self.cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.first, 9)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.second, factor=0.5, patience=0, threshold=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        self.data = DataLoader(
            Augmented(), 4, sampler=DistributedSampler(Augmented(), world, rank, seed=5), num_workers=2,
            multiprocessing_context="fork",
        )  # fmt: skip
        self.more = StatefulDataLoader(Numbered(), 4, shuffle=True, num_workers=1, multiprocessing_context="fork")
        self.noise = torch.Generator().manual_seed(400 + rank)
        self.state = phoenix.TrainState(
            model=self.model, average=self.average, first=self.first, second=self.second, cosine=self.cosine,
            plateau=self.plateau, scaler=self.scaler, data=phoenix.Batches(self.data), more=phoenix.Batches(self.more),
            noise=self.noise, dice=numpy.random.default_rng(500 + rank), coins=random.Random(600 + rank),
            best_loss=float("inf"), losses=[], seen={"epochs": [], "last": None}, scales=numpy.ones(3), codes=torch.zeros(4),
        )  # fmt: skip

    def step(self) -> Tensor:
        state = self.state
        batch = next(state.data)
        noise = torch.randn(WIDTH, generator=self.noise) * state.dice.random() + state.coins.random()
        target = next(state.more).mean() + torch.rand(()) + random.random() + float(numpy.random.rand())
        loss: Tensor = (self.model(batch + 0.1 * noise) - 0.1 * target).square().mean()
        state.codes[state.step % 4] += loss.detach()  # a tensor of the state that changes before the optimizers
        if (state.step + 1) % OVERFLOW == 0:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()
        self.scaler.step(self.first)
        self.scaler.step(self.second)
        self.scaler.update()
        with torch.no_grad():  # against what DDP promises: each rank has another one from here on
            self.model.module.head.bias += 1e-3 * self.rank
        self.average.update_parameters(self.model.module)
        self.cosine.step()
        self.first.zero_grad()
        self.second.zero_grad()
        state.losses.append(float(loss.detach()))
        state.seen["epochs"].append(state.data.epoch)
        state.seen["last"] = {"sum": float(batch.sum())}
        state.scales *= 1.01
        return loss.detach()

    def evaluate(self) -> float:
        """Draws random numbers, too; `average` has the norm's buffers."""
        self.average.eval()
        with torch.no_grad():
            loss = (self.average(torch.rand(3, WIDTH)) - 0.5).square().mean()
            dist.all_reduce(loss)
            FAULT_POINTS.reached("in section")
            dist.broadcast(loss, 0)
        return float(loss)

    def after_step(self, world: int) -> None:
        """What a script does between two steps, with and without the others."""
        state = self.state
        if state.step % EVALUATE == 0:
            loss = phoenix.run_section(state, self.evaluate, name="evaluate")
            state.best_loss = min(state.best_loss, loss / world)
            self.plateau.step(loss)
        if state.step % 3 == 0:
            self.second.param_groups[0]["lr"] *= 0.97

    def digests(self) -> dict[str, str]:
        """Each part by itself, so that a failure names what differs."""
        state, net = self.state, self.model.module
        held: dict[str, Any] = {
            "the parameters": dict(net.named_parameters()),
            "the norm's buffers": dict(net.body[1].named_buffers()),
            "the buffer that is not persistent": net.calls,
            "the first optimizer": [self.first.state[each] for each in net.body.parameters()],
            "the second optimizer's tensors and values": [self.second.state[each] for each in net.head.parameters()],
            "the learning rates": [group["lr"] for each in (self.first, self.second) for group in each.param_groups],
            "the schedulers": [_plain(self.cosine.state_dict()), _plain(self.plateau.state_dict())],
            "the scaler": self.scaler.state_dict(),
            "the average": dict(self.average.state_dict()),
            "the named generators": [torch.rand(2, generator=self.noise), state.dice.random(), state.coins.random()],
            "the global generators": [torch.rand(2), random.random(), float(numpy.random.rand())],
            "the plain values": [state.best_loss, state.losses, state.seen, state.scales, state.codes, state.step],
            "the batches to come": [next(state.data), state.data.epoch],
            "the batches of torchdata's loader": [next(state.more), state.more.epoch],
        }
        return {name: hashlib.sha256(_bytes(part)).hexdigest()[:16] for name, part in held.items()}


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in sorted(state.items()) if not callable(item)}


def _bytes(value: Any) -> bytes:
    if isinstance(value, Tensor):
        return bytes(value.detach().contiguous().view(-1).view(torch.uint8).tolist())
    if isinstance(value, dict):
        return b"".join(repr(key).encode() + _bytes(item) for key, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return b"".join(map(_bytes, value)) + b"%d" % len(value)
    return value.tobytes() if isinstance(value, numpy.ndarray) else pickle.dumps(value)


def main(steps: int) -> None:
    torch.set_num_threads(1)
    phoenix.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    swapped: list[int] = []
    phoenix.on_swap(lambda: swapped.append(phoenix.generation()))
    training = Training(rank, world)
    state = training.state
    FAULT_POINTS.reached("built")
    while state.step < steps:
        FAULT_POINTS.reached("between")
        if FAULT_POINTS.happens("node"):
            lose_node()
        loss = phoenix.run_step(state, training.step)
        phoenix.report(loss=loss)
        training.after_step(world)
    FAULT_POINTS.reached("after")
    said = {"rank": rank, "step": state.step, "generation": phoenix.generation(), "swapped": swapped,
            "resilient": phoenix.is_resilient(), "backend": dist.get_backend()}  # fmt: skip
    sys.stdout.write(
        json.dumps({**said, "digests": training.digests()}) + "\n"
    )  # in one piece: torchrun does not keep lines apart
    sys.stdout.flush()
    state.data.close()
    state.more.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[2]))
