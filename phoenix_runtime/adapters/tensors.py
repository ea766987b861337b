"""Tensors: copies that hold every bit, and the way back into the same tensor object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


def cloned(tensor: Tensor) -> Tensor:
    """A copy without graph."""
    return tensor.detach().clone()


def copy_into(target: Tensor, saved: Tensor) -> None:
    """Give `target` the bits of `saved`; it stays the same object, its gradient and graph are not touched."""
    with torch.no_grad():
        if target.shape != saved.shape or target.dtype != saved.dtype or target.device != saved.device:
            target.data = saved.clone()
            return
        view = target  # not detached: copy_ would then change a sparse tensor's shadow only
        if view.layout == torch.strided and type(view) is Tensor:
            for dimension, (stride, size) in enumerate(zip(view.stride(), view.shape, strict=True)):
                if stride == 0 and size > 1:  # expanded: all entries are one in memory, which copy_ refuses
                    view, saved = view.narrow(dimension, 0, 1), saved.narrow(dimension, 0, 1)
        view.copy_(saved)


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """A tensor as it was at the entry."""

    tensor: Tensor


class TensorPart:
    """A tensor that the script named. One that is trained belongs to its optimizer and is not copied."""

    captures: ClassVar[type] = TensorCopy

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.trained = value.is_leaf and value.requires_grad

    def capture(self) -> TensorCopy:
        return TensorCopy(torch.empty(0) if self.trained else cloned(self.value))

    def restore(self, captured: TensorCopy) -> None:
        if not self.trained:
            copy_into(self.value, captured.tensor)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.trained:
            yield "", self.value
