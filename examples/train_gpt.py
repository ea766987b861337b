"""A small byte-level GPT on real text, trained with DDP or FSDP; a process or a node that dies does not end it.

    phoenix-run --nodes 2 --nproc-per-node 2 --spares 1 examples/train_gpt.py --steps 200
    torchrun --nproc-per-node 4 examples/train_gpt.py
    python examples/train_gpt.py --steps 50

The text is the source code of the running Python's standard library, or `--text FILE`. The last line on stdout is JSON with the
final loss and a hash over parameters and optimizer state: equal runs have equal hashes, also when processes were replaced in
one of them. `train_plain.py` is the same without phoenix_runtime.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import phoenix_runtime as phoenix

RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
TEXT_BYTES = 8 << 20


class Block(nn.Module):
    """Attention and a two-layer network, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(sequence, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        """The mean loss of predicting each next byte; both tensors are (batch, sequence)."""
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        scores = F.linear(self.norm(self.blocks(x)), self.bytes.weight)
        return F.cross_entropy(scores.flatten(0, 1), following.flatten())


def read_text(path: str) -> Tensor:
    library = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in [Path(path)] if path else sorted(library.glob("*.py")):
        text += file.read_bytes()
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


def batch_of(text: Tensor, options: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """The batch of this step and rank: always the same one, so that a repeated step computes the same."""
    generator = torch.Generator().manual_seed((options.seed << 40) + (step << 16) + RANK)
    starts = torch.randint(len(text) - options.sequence, (options.batch, 1), generator=generator)
    window = text[starts + torch.arange(options.sequence + 1)].long()
    return window[:, :-1], window[:, 1:]


def state_sha256(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of FSDP's shards the whole tensors are put together, so all ranks have to call it."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        tensors = {"": parameter, **optimizer.state[parameter]}
        for key in sorted(tensors):
            value = tensors[key].detach()
            value = (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu().contiguous()
            digest.update(f"{name.removeprefix('module.')} {key} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(ctypes.string_at(value.data_ptr(), value.nbytes))
    return digest.hexdigest()


def parallel(model: GPT, kind: str) -> nn.Module:
    """What the ranks share: each has the whole model (ddp), or a part of each layer (fsdp)."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--sequence", type=int, default=128, help="bytes of context")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--text", default="", metavar="FILE", help="train on this file instead")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser.parse_args()


def choose_device(wanted: str) -> torch.device:
    """One GPU a rank, or none at all."""
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return (
        torch.device("cuda", LOCAL_RANK) if wanted == "cuda" or (wanted == "auto" and enough) else torch.device("cpu")
    )


def main() -> None:
    options = parse_options()
    device = choose_device(options.device)
    phoenix.init_process_group("nccl" if device.type == "cuda" else "gloo")
    text = read_text(options.text)
    torch.manual_seed(options.seed)
    model = parallel(GPT(options.layers, options.width, options.heads, options.sequence).to(device), options.parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=True)
    state = phoenix.TrainState(model=model, optimizer=optimizer, loss=0.0)

    def train_step() -> Tensor:
        loss = model(*(part.to(device) for part in batch_of(text, options, state.step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if RANK == 0:
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{WORLD_SIZE} x {device.type}, {size / 1e6:.1f} M parameters, from step {state.step}", flush=True)
    began, since = time.monotonic(), state.step
    while state.step < options.steps:
        loss = phoenix.run_step(state, train_step)
        phoenix.report(loss=loss, tokens=options.batch * options.sequence)
        if state.step % options.log_every == 0 or state.step == options.steps:
            state.loss = loss.item()
            if RANK == 0:
                pace = (time.monotonic() - began) / (state.step - since)
                print(f"step {state.step:4d}/{options.steps}  loss {state.loss:.4f}  {pace:.3f} s/step", flush=True)
    digest = state_sha256(model, optimizer)
    if RANK == 0:
        print(json.dumps({"step": state.step, "loss": state.loss, "state_sha256": digest}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
