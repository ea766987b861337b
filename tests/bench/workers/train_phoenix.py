"""The example with phoenix_runtime, which notes when it begins, leaves and finishes each step."""

from __future__ import annotations

import os

from step_log import BEGAN, StepLog, parse_options

log = StepLog(int(os.environ["RANK"]))
log.note("began", -1, BEGAN)

import torch
from train_plain import GPT, batch_of, read_text

import phoenix_runtime as phoenix

log.note("imported", -1)


def main() -> None:
    options = parse_options()
    phoenix.init_process_group("gloo")
    log.note("grouped", -1)
    text = read_text("")
    torch.manual_seed(options.seed)
    model = torch.nn.parallel.DistributedDataParallel(
        GPT(options.layers, options.width, options.heads, options.sequence)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    log.note("built", -1)
    state = phoenix.TrainState(model=model, optimizer=optimizer)
    log.note("ready", state.step)

    def train_step() -> torch.Tensor:
        log.note("enters", state.step)
        try:
            loss: torch.Tensor = model(*batch_of(text, options, state.step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()
        finally:
            log.note("leaves", state.step)

    while state.step < options.steps:
        phoenix.run_step(state, train_step)
        log.note("done", state.step - 1)


main()
