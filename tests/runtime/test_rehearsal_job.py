"""A script with the runtime's lines runs unchanged under phoenix-run, torchrun and python, and a rehearsal changes no bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from jobs_under_test import run, script

TRAIN = """
import hashlib, json, os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import phoenix_runtime as phoenix

phoenix.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Dropout(0.2), nn.Linear(24, 2))
model = DistributedDataParallel(model, bucket_cap_mb=0.0005)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
data = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(3)))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
state = phoenix.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=phoenix.Batches(loader))
calls = 0

def train_step():
    global calls
    calls += 1
    (batch,) = next(state.data)
    loss = model(batch).square().mean() + HIDDEN
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.detach()

while state.step < 6:
    loss = phoenix.run_step(state, train_step)
    phoenix.report(loss=loss)
if dist.get_rank() == 0:
    bits = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        bits.update(bytes(tensor.detach().flatten().view(torch.uint8).tolist()))
    print(json.dumps({"backend": dist.get_backend(), "resilient": phoenix.is_resilient(), "bits": bits.hexdigest()}))
dist.destroy_process_group()
"""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def test_a_rehearsed_job_ends_with_the_bits_of_torchrun(tmp_path: Path) -> None:
    train = script(tmp_path, TRAIN.replace("HIDDEN", "0"))
    rehearsed = run(tmp_path / "home", "--nproc-per-node", 2, "--rehearse", 2, train, env=ONE_THREAD)
    assert rehearsed.code == 0, rehearsed.err
    assert rehearsed.err.count("phoenix: 2 steps rehearsed: aborted, repaired and repeated bit for bit") == 1
    assert "without a visible effect: calls (global)" in rehearsed.err
    ours = json.loads(rehearsed.out.splitlines()[-1])
    assert (ours["backend"], ours["resilient"]) == ("phoenix", False)  # a rehearsed job has no other repair
    torchrun = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(train)],
        env=os.environ | ONE_THREAD, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    theirs = json.loads(torchrun.stdout.splitlines()[-1])
    assert (theirs["backend"], theirs["resilient"]) == ("gloo", False)
    assert ours["bits"] == theirs["bits"]


# What no TrainState knows: a counter, a generator, a tensor that should have been a buffer.
HIDDEN = {
    "calls = 0\n": """calls = 0
draws = torch.Generator().manual_seed(2)
class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(6)
    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean
state.running = running = Running()
""",
    "model(batch)": "model(running(batch + torch.randn(6, generator=draws)))",
    "HIDDEN": "calls * model.module[0].weight.sum()",
}


def test_what_is_hidden_ends_a_rehearsed_job_with_its_name_last(tmp_path: Path) -> None:
    source = TRAIN
    for place, instead in HIDDEN.items():
        source = source.replace(place, instead)
    done = run(tmp_path / "home", "--nproc-per-node", 2, "--rehearse", 2, script(tmp_path, source), env=ONE_THREAD)
    assert done.code == 1
    assert "differs from its first run in the gradient of model.module.0.weight" in done.err
    unrestored = done.err.rpartition("not restored: ")[2].partition("\n")[0]
    for name in ("calls (global) (0 -> 1)", "draws (global)", "running.mean"):
        assert name in unrestored


def test_plain_python_runs_the_same_script_alone(tmp_path: Path) -> None:
    train = script(tmp_path, TRAIN.replace("HIDDEN", "0"))
    done = subprocess.run(
        [sys.executable, str(train)], env=os.environ | ONE_THREAD | {"PHOENIX_REHEARSE": "1"},
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["resilient"] is False
    assert "1 step rehearsed" in done.stderr
