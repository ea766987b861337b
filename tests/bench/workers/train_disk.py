"""The example as torchrun's users write it: DDP, and rank 0 writes a checkpoint after every step, which all load at the start."""

from __future__ import annotations

import os
from pathlib import Path

from step_log import BEGAN, StepLog, parse_options

log = StepLog(int(os.environ["RANK"]))
log.note("began", -1, BEGAN)

import torch
import torch.distributed as dist
from train_plain import GPT, batch_of, load, read_text, save

log.note("imported", -1)


def main() -> None:
    options = parse_options()
    path = Path(os.environ["BENCH_FOLDER"], "gpt.pt") if os.environ.get("BENCH_CHECKPOINTS") else None
    dist.init_process_group("gloo")
    log.note("grouped", -1)
    text = read_text("")
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, options.heads, options.sequence)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = 0
    if found := load(path, torch.device("cpu")):
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step = found["step"]
    trained = torch.nn.parallel.DistributedDataParallel(model)
    log.note("ready", step)
    while step < options.steps:
        log.note("enters", step)
        loss = trained(*batch_of(text, options, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.note("done", step)
        step += 1
        if path and dist.get_rank() == 0:
            save(path, {"step": step, "loss": loss, "model": model.state_dict(), "optimizer": optimizer.state_dict()})


main()
