"""A small byte-level GPT on real text that knows nothing of phoenix-run: DistributedDataParallel, and its own checkpoint.

    phoenix-run --nodes 2 --nproc-per-node 2 --spares 1 examples/train_plain.py --steps 200
    torchrun --nproc-per-node 4 examples/train_plain.py --checkpoint /tmp/gpt.pt
    python examples/train_plain.py --steps 50

The text is the source code of the running Python's standard library, or `--text FILE`. Rank 0 writes the checkpoint, by
default to `checkpoints/RUN_ID.pt`; a run that has no id keeps none unless `--checkpoint` names one. The last line on
stdout is JSON with the final loss and a hash over parameters and optimizer state: equal runs have equal hashes, also
when one of them was interrupted.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import io
import json
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        tensors = {"": parameter, **optimizer.state[parameter]}
        for key in sorted(tensors):
            value = tensors[key].detach().cpu().contiguous()
            digest.update(f"{name} {key} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(ctypes.string_at(value.data_ptr(), value.nbytes))
    return digest.hexdigest()


def save(path: Path, state: dict[str, Any]) -> None:
    """Write the checkpoint whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def load(path: Path | None, device: torch.device) -> dict[str, Any] | None:
    """What rank 0 finds, for all ranks: the file need not be on a shared disk. (Object collectives would need NumPy.)"""
    data = path.read_bytes() if RANK == 0 and path and path.exists() else b""
    if WORLD_SIZE > 1:
        size = torch.tensor(len(data), device=device)
        dist.broadcast(size, 0)
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        content = content.to(device) if RANK == 0 else torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.broadcast(content, 0)
        content = content.cpu()
        data = ctypes.string_at(content.data_ptr(), content.nbytes) if content.nbytes else b""
    return torch.load(io.BytesIO(data), map_location="cpu") if data else None


def default_checkpoint() -> str:
    run = os.environ.get("PHOENIX_JOB") or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if run == "none" else f"checkpoints/{run}.pt"


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
    parser.add_argument("--checkpoint", default=default_checkpoint(), metavar="FILE")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
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
    checkpoint = Path(options.checkpoint) if options.checkpoint else None
    device = choose_device(options.device)
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    text = read_text(options.text)
    torch.manual_seed(options.seed)
    model: nn.Module = GPT(options.layers, options.width, options.heads, options.sequence).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=True)
    step, loss = 0, torch.tensor(0.0)
    if found := load(checkpoint, device):
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step, loss = found["step"], found["loss"]
    if RANK == 0:
        size = sum(parameter.numel() for parameter in model.parameters())
        start = f"step {step} of {checkpoint}" if step else "the beginning"
        print(f"{WORLD_SIZE} x {device.type}, {size / 1e6:.1f} M parameters, from {start}", flush=True)
    trained = DistributedDataParallel(model) if WORLD_SIZE > 1 else model
    # In its first pass DDP sums gradients in another order than later. One pass thrown away makes all steps alike, and
    # a run that was restarted equal to one that was not, bit for bit.
    trained(*(part.to(device) for part in batch_of(text, options, step))).backward()
    optimizer.zero_grad()
    began, since = time.monotonic(), step
    while step < options.steps:
        loss = trained(*(part.to(device) for part in batch_of(text, options, step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if RANK == 0 and (step % options.log_every == 0 or step == options.steps):
            pace = (time.monotonic() - began) / (step - since)
            print(f"step {step:4d}/{options.steps}  loss {loss.item():.4f}  {pace:.3f} s/step", flush=True)
        if RANK == 0 and checkpoint and (step % options.checkpoint_every == 0 or step == options.steps):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(checkpoint, {**state, "step": step, "loss": loss.detach()})
    if RANK == 0:
        print(
            json.dumps({"step": step, "loss": loss.item(), "state_sha256": state_sha256(model, optimizer)}), flush=True
        )
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
