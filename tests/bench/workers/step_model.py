"""The example's model at the size that a measurement asks for."""

from __future__ import annotations

import argparse

from torch import Tensor, nn
from train_plain import GPT


class Reversed(nn.Sequential):
    """Runs the last module first: DDP meets gradients in another order than it lays out buckets for."""

    def forward(self, x: Tensor) -> Tensor:
        for module in reversed(self):
            x = module(x)
        return x


def model_of(options: argparse.Namespace) -> GPT:
    model = GPT(options.layers, options.width, options.heads, options.sequence)
    if options.odd:
        model.blocks = Reversed(*model.blocks)
    return model
