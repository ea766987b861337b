"""Copies of batches: fresh containers around the same tensors, for a step that is repeated."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from phoenix_runtime.adapters.part import joined
from phoenix_runtime.adapters.tensors import cloned
from phoenix_runtime.adapters.values import ATOMS, is_array
from phoenix_runtime.errors import ScriptError


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tensor as it was fetched."""

    name: str
    tensor: Tensor
    version: int
    requires_grad: bool


class BatchCopy:
    """A batch as it was fetched. What the script does to the containers that it was given does not reach it."""

    def __init__(self, batch: Any, seen: tuple[_Seen, ...]) -> None:
        self._batch, self._seen = batch, seen

    @classmethod
    def of(cls, batch: Any) -> BatchCopy:
        seen: list[_Seen] = []

        def kept(name: str, tensor: Tensor) -> Tensor:
            if tensor.is_inference():  # has no version, so a change could not be noticed
                return cloned(tensor)
            seen.append(_Seen(name, tensor, tensor._version, tensor.requires_grad))
            return tensor

        return cls(_renewed(batch, kept, "", {}), tuple(seen))

    def again(self, place: str) -> Any:
        """The batch in fresh containers. `place`: what messages call it.

        Raises:
            ScriptError: a tensor of it was changed in place.
        """
        for seen in self._seen:
            if seen.tensor._version != seen.version:
                raise ScriptError(
                    f"{place} cannot be given again: its tensor {seen.name or 'itself'} was changed in place",
                    hint="a repeated step needs the batch as it was: x = x * 2 instead of x *= 2, or change a clone",
                )
            if seen.tensor.requires_grad != seen.requires_grad:
                seen.tensor.requires_grad_(seen.requires_grad)
                seen.tensor.grad = None
        return _renewed(self._batch, lambda _, tensor: cloned(tensor) if tensor.is_inference() else tensor, "", {})


def _renewed(value: Any, tensor: Callable[[str, Tensor], Tensor], name: str, done: dict[int, Any]) -> Any:
    """The value in new containers, all the way down; what stood in two places does so again."""
    if type(value) in ATOMS:
        return value
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, Tensor):
        new: Any = tensor(name, value)
    elif is_array(value) or isinstance(value, set | bytearray):
        new = value.copy()
    elif isinstance(value, tuple):
        items = [_renewed(item, tensor, joined(name, str(index)), done) for index, item in enumerate(value)]
        make = getattr(value, "_make", None)
        new = make(items) if make is not None else tuple(items) if type(value) is tuple else value
    else:
        return _renewed_in_place(value, tensor, name, done)
    done[id(value)] = new
    return new


def _renewed_in_place(value: Any, tensor: Callable[[str, Tensor], Tensor], name: str, done: dict[int, Any]) -> Any:
    """Containers that can contain themselves: first the new one, then what is in it."""
    if isinstance(value, nn.Module | type) or callable(value):
        return value
    plain = isinstance(value, dict | list | collections.deque | collections.UserDict) or dataclasses.is_dataclass(value)
    if not plain and not hasattr(value, "__dict__"):
        return value
    done[id(value)] = new = copy.copy(value)
    if isinstance(value, list | collections.deque):
        for index, item in enumerate(value):
            new[index] = _renewed(item, tensor, joined(name, str(index)), done)
    elif isinstance(value, dict):
        for key, item in value.items():
            new[key] = _renewed(item, tensor, joined(name, str(key)), done)
    for key, item in _attributes(value).items():
        object.__setattr__(new, key, _renewed(item, tensor, joined(name, key), done))
    return new


def _attributes(value: Any) -> Mapping[str, Any]:
    slots = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    return {**getattr(value, "__dict__", {}), **{key: getattr(value, key) for key in slots if hasattr(value, key)}}
