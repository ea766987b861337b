"""The example with phoenix_runtime, which notes when it begins, leaves and finishes each step, each copy in memory, and
each wait of the training thread for one.

`BENCH_FAULTS`: POINT,RANK,STEP;... where processes die (phoenix_runtime/fault_points.py). `BENCH_SAVE`: what users do without
copies in memory, at the end of every step: `torch` (torch.save of this rank's part), `dcp` (its async_save).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from step_log import LOG, parse_options  # isort: split

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from step_model import model_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from train_plain import batch_of, read_text

import phoenix_runtime as phoenix
from phoenix_runtime.checkpoint.copier import Copier
from phoenix_runtime.checkpoint.filling import Order

LOG.note("imported")
os.environ["PHOENIX_FAULTS"] = f"{os.environ['BENCH_FOLDER']}:{os.environ.get('BENCH_FAULTS', '')}"


def note_copies() -> None:
    original, begin, wait = Copier._carry_out, Copier.begin, Copier.wait

    def noted(event: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            LOG.note(f"{event}s")
            function(*arguments)
            LOG.note(f"{event}ed")

        return call

    def carry_out(copier: Copier, order: Order) -> None:
        LOG.note("copies", order.stamp.version)
        original(copier, order)
        LOG.note("copied", order.stamp.version)

    Copier._carry_out = carry_out
    Copier.begin, Copier.wait = noted("hand", begin), noted("wait", wait)


class Saver:
    """What users do without copies in memory."""

    def __init__(self, kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.kind, self.model, self.optimizer = kind, model, optimizer
        self.under_way: Future[Any] | None = None
        self.folder = Path(os.environ["BENCH_FOLDER"])
        self.group = dist.new_group(backend="gloo") if kind == "dcp" else None

    def save(self, step: int) -> None:
        if self.kind == "torch":
            path = self.folder / f"rank{dist.get_rank()}.pt"
            parts = {
                name: it.to_local() if hasattr(it, "to_local") else it for name, it in self.model.state_dict().items()
            }
            torch.save({"model": parts, "optimizer": self.optimizer.state_dict(), "step": step}, path)
        elif self.kind == "dcp":
            model, optimizer = get_state_dict(self.model, self.optimizer)
            if self.under_way is not None:
                self.under_way.result()
            where = str(self.folder / f"dcp{step % 2}")
            self.under_way = dcp.async_save({"m": model, "o": optimizer}, checkpoint_id=where, process_group=self.group)


def main() -> None:
    options = parse_options()
    note_copies()
    phoenix.init_process_group("gloo")
    LOG.note("grouped")
    text = read_text("")
    torch.manual_seed(options.seed)
    model = model_of(options)
    if options.parallel == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    LOG.note("built")
    state = phoenix.TrainState(model=model, optimizer=optimizer)
    saver = Saver(os.environ.get("BENCH_SAVE", ""), model, optimizer)
    LOG.note("ready", state.step)

    def train_step() -> torch.Tensor:
        LOG.note("enters", state.step)
        try:
            loss: torch.Tensor = model(*batch_of(text, options, state.step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()
        finally:
            LOG.note("leaves", state.step)

    while state.step < options.steps:
        phoenix.run_step(state, train_step)
        saver.save(state.step)
        LOG.note("done", state.step - 1)


main()
