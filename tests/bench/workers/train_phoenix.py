"""The example with phoenix_runtime, which notes when it begins, leaves and finishes each step, and each copy in memory.

`BENCH_FAULTS`: POINT,RANK,STEP;... where processes die (phoenix_runtime/fault_points.py).
"""

from __future__ import annotations

import os

from step_log import LOG, parse_options  # isort: split

import torch
from step_model import model_of
from train_plain import batch_of, read_text

import phoenix_runtime as phoenix
from phoenix_runtime.checkpoint.copier import Copier, _Order

LOG.note("imported")
os.environ["PHOENIX_FAULTS"] = f"{os.environ['BENCH_FOLDER']}:{os.environ.get('BENCH_FAULTS', '')}"


def note_copies() -> None:
    original = Copier._carry_out

    def carry_out(copier: Copier, order: _Order) -> None:
        LOG.note("copies", order.stamp.version)
        original(copier, order)
        LOG.note("copied", order.stamp.version)

    Copier._carry_out = carry_out


def main() -> None:
    options = parse_options()
    note_copies()
    phoenix.init_process_group("gloo")
    LOG.note("grouped")
    text = read_text("")
    torch.manual_seed(options.seed)
    model = torch.nn.parallel.DistributedDataParallel(model_of(options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    LOG.note("built")
    state = phoenix.TrainState(model=model, optimizer=optimizer)
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
        LOG.note("done", state.step - 1)


main()
