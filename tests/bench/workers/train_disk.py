"""The example as torchrun's users write it. With `BENCH_CHECKPOINTS` rank 0 writes one after every step, and all load it."""

from __future__ import annotations

import os
from pathlib import Path

from step_log import LOG, parse_options  # isort: split

import torch
import torch.distributed as dist
from step_model import model_of
from train_plain import batch_of, load, read_text, save

LOG.note("imported")


def main() -> None:
    options = parse_options()
    path = Path(os.environ["BENCH_FOLDER"], "gpt.pt") if os.environ.get("BENCH_CHECKPOINTS") else None
    dist.init_process_group("gloo")
    LOG.note("grouped")
    text = read_text("")
    torch.manual_seed(options.seed)
    model = model_of(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = 0
    if found := load(path, torch.device("cpu")):
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step = found["step"]
    trained = torch.nn.parallel.DistributedDataParallel(model)
    LOG.note("ready", step)
    while step < options.steps:
        LOG.note("enters", step)
        loss = trained(*batch_of(text, options, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        LOG.note("done", step)
        step += 1
        if path and dist.get_rank() == 0:
            save(path, {"step": step, "loss": loss, "model": model.state_dict(), "optimizer": optimizer.state_dict()})


main()
