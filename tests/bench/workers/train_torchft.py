"""The example with torchft, one rank a replica group; a step that was not committed is not logged as done."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from step_log import LOG, parse_options  # isort: split

import torch
import train_plain
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.manager import WorldSizeMode

LOG.note("imported")
REPLICA = int(os.environ["REPLICA_GROUP_ID"])
train_plain.RANK = REPLICA  # of which the batches depend


def main() -> None:
    options = parse_options()
    text = train_plain.read_text("")
    torch.manual_seed(options.seed)
    model = train_plain.GPT(options.layers, options.width, options.heads, options.sequence)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    spares = bool(os.environ.get("BENCH_EXTRA_REPLICA"))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),  # as in torchft's own train_ddp.py
        min_replica_size=4 if spares else 1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"g{REPLICA}",
        timeout=timedelta(seconds=30),
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if spares else WorldSizeMode.DYNAMIC,
    )
    trained = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    LOG.note("ready", 0)
    while manager.current_step() < options.steps:
        step = manager.current_step()
        optimizer.zero_grad()
        LOG.note("enters", step)
        loss = trained(*train_plain.batch_of(text, options, step))
        loss.backward()
        before = manager.current_step()
        optimizer.step()
        LOG.note("done" if manager.current_step() > before else "discards", before)


main()
