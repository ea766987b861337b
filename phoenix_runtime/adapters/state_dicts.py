"""Anything with state_dict and load_state_dict: schedulers, averages, the script's own objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from phoenix_runtime.adapters.part import EARLY
from phoenix_runtime.adapters.values import copied


@dataclass(frozen=True, slots=True)
class StateDict:
    """A deep copy of what state_dict() returned."""

    order: ClassVar[int] = EARLY
    state: Any


def has_state_dict(value: object) -> bool:
    """Both functions, and no class (whose functions want an object first)."""
    functions = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
    return not isinstance(value, type) and all(map(callable, functions))


class StateDictPart:
    """Copied both ways: torch's schedulers hand out their own lists, and keep those that they are given."""

    captures: ClassVar[type] = StateDict

    def __init__(self, value: Any) -> None:
        self.value = value

    def capture(self) -> StateDict:
        return StateDict(copied(self.value.state_dict()))

    def restore(self, captured: StateDict) -> None:
        self.value.load_state_dict(copied(captured.state))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())
