"""Plain values: numbers, texts, dates, sets, numpy arrays; and copies of what state_dict functions return."""

from __future__ import annotations

import copy
import datetime
import decimal
import enum
import fractions
import pathlib
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from phoenix_runtime.adapters.tensors import cloned

# Of these the value itself is kept: nothing can change them.
ATOMS: Final[frozenset[type]] = frozenset(
    (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, torch.Size, torch.dtype, torch.device)
)
_FIXED: Final[tuple[type, ...]] = (
    *ATOMS,
    enum.Enum,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    decimal.Decimal,
    fractions.Fraction,
    pathlib.PurePath,
    uuid.UUID,
    frozenset,
)


def copied(value: Any) -> Any:
    """A deep copy; tensors become clones that know no graph. Quicker than copy.deepcopy for what state dicts consist of."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list:
        return [copied(item) for item in value]
    if kind is tuple:
        return tuple([copied(item) for item in value])
    if isinstance(value, Tensor):
        return cloned(value)
    return copy.deepcopy(value)


def is_array(value: object) -> bool:
    """A numpy array, without importing numpy for the question."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_fixed(value: object) -> bool:
    """Nothing can change it, so the object itself may be kept."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, _FIXED) or (numpy is not None and isinstance(value, numpy.generic | numpy.dtype))


def is_plain(value: object) -> bool:
    """Neither an object with a state of its own nor a container."""
    return is_fixed(value) or isinstance(value, set | bytearray) or is_array(value)


@dataclass(frozen=True, slots=True)
class Value:
    """A copy of a plain value that is no atom."""

    value: Any


class ValuePart:
    """A set, a bytearray, a numpy array (all in place), or something that cannot be changed."""

    captures: ClassVar[type] = Value

    def __init__(self, value: Any) -> None:
        self.value = value

    def capture(self) -> Value:
        return Value(self.value if is_fixed(self.value) else copy.deepcopy(self.value))

    def restore(self, captured: Value) -> None:
        saved = captured.value
        if isinstance(self.value, set) and isinstance(saved, set):
            self.value.clear()
            self.value.update(copy.deepcopy(saved))
        elif isinstance(self.value, bytearray) and isinstance(saved, bytearray):
            self.value[:] = saved
        elif is_array(self.value) and is_array(saved) and _alike(self.value, saved):
            self.value[...] = copy.deepcopy(saved)
        else:
            self.value = saved if is_fixed(saved) else copy.deepcopy(saved)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())


def _alike(one: Any, other: Any) -> bool:
    return bool(one.shape == other.shape and one.dtype == other.dtype and one.flags.writeable)
