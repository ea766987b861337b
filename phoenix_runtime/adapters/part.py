"""What every adapter offers: a part of the training state that can be captured at a step's entry and put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Part(Protocol):
    """One object of the training state.

    What `capture` returns is the part's share of the private bundle: values only, nothing of it is changed or referred to
    by the object later, so it can also be pickled and restored in another process. Which objects stood where (the tensor
    behind a buffer's name, the list behind a key) is remembered here, by the part itself.
    """

    captures: ClassVar[type]  # what `capture` returns

    @property
    def value(self) -> Any:
        """The object itself. It may be another one after `restore` only where it cannot be changed (a tuple)."""

    def capture(self) -> Any:
        """What a step may change before its first Optimizer.step."""

    def restore(self, captured: Any) -> None:
        """Make the object what it was, bit for bit and in place."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What only Optimizer.step changes, by reference: parameters and optimizer state."""


# Restored in this order: loading a position of the data or a scheduler may touch what stands further right.
EARLY: Final = 0
USUAL: Final = 1
LATE: Final = 2


def joined(*names: str) -> str:
    """model + layers.0 + weight = model.layers.0.weight; what is empty is left out."""
    return ".".join(name for name in names if name)
