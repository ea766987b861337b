"""Dicts, lists, tuples, deques and dataclasses of parts and plain values, nested in any way."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from phoenix_runtime.adapters.part import USUAL, Part, joined
from phoenix_runtime.adapters.tensors import TensorCopy, TensorPart
from phoenix_runtime.adapters.values import ATOMS, Value
from phoenix_runtime.errors import ScriptError

Adapt = Callable[[str, Any], Part]


@dataclass(frozen=True, slots=True)
class Items:
    """What stood in a container: atoms as they are, everything else as its part has captured it. `blank` is an empty one."""

    blank: Any
    items: tuple[tuple[Hashable, Any], ...]


def is_container(value: object) -> bool:
    known = isinstance(value, dict | list | tuple | collections.deque)
    return known or (dataclasses.is_dataclass(value) and not isinstance(value, type))


class ContainerPart:
    """A container that stays the same object; a tuple is made anew where what stands in it cannot be changed."""

    captures: ClassVar[type] = Items

    def __init__(self, value: Any, name: str, adapt: Adapt) -> None:
        self.value = value
        self._name, self._adapt = name, adapt
        self._entry: dict[Hashable, tuple[Any, Part | None]] = {}

    def children(self) -> Iterator[tuple[str, Part]]:
        """The parts in it and in what is nested in it, by name."""
        for key, (_, child) in self._looked_through().items():
            if child is not None:
                yield str(key), child
                if isinstance(child, ContainerPart):
                    yield from ((joined(str(key), name), part) for name, part in child.children())

    def capture(self) -> Items:
        self._entry = entry = self._looked_through()
        return Items(
            _blank(self.value),
            tuple([(key, item if child is None else child.capture()) for key, (item, child) in entry.items()]),
        )

    def restore(self, captured: Items) -> None:
        present = self._looked_through()
        entry = {**present, **self._entry}
        items = dict(captured.items)
        for key in sorted(items, key=lambda key: getattr(items[key], "order", USUAL)):
            items[key] = self._restored(key, items[key], entry.get(key))
        self._put(captured, items)
        self._entry = self._looked_through()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for key, (_, child) in self._looked_through().items():
            for name, tensor in child.tensors() if child is not None else ():
                yield joined(str(key), name), tensor

    # --- one by one --------------------------------------------------------------------------------------------------

    def _looked_through(self) -> dict[Hashable, tuple[Any, Part | None]]:
        entry, found = self._entry, {}
        for key, item in _items(self.value):
            child: Part | None = None
            if type(item) not in ATOMS:
                child = entry.get(key, (None, None))[1]
                if child is None or child.value is not item:
                    child = self._adapt(joined(self._name, str(key)), item)
            found[key] = (item, child)
        return found

    def _restored(self, key: Hashable, captured: Any, before: tuple[Any, Part | None] | None) -> Any:
        if type(captured) in ATOMS:
            return captured
        child = before[1] if before is not None else None
        if child is not None and _fits(child, captured):
            child.restore(captured)
            return child.value
        return built(captured, joined(self._name, str(key)))

    def _put(self, captured: Items, items: dict[Hashable, Any]) -> None:
        value = self.value
        if isinstance(value, dict):
            value.clear()
            value.update(items)
        elif isinstance(value, list):
            value[:] = items.values()
        elif isinstance(value, collections.deque):
            value.clear()
            value.extend(items.values())
        elif isinstance(value, tuple):
            if [*map(id, value)] != [*map(id, items.values())]:
                self.value = _filled(captured.blank, items)
        else:
            for key, item in items.items():
                object.__setattr__(value, str(key), item)


def _fits(child: Part, captured: Any) -> bool:
    """In another process something else may stand in a place."""
    if isinstance(child, ContainerPart) and isinstance(captured, Items):
        blank = captured.blank
        return type(child.value) is (blank.kind if isinstance(blank, _Kind) else type(blank))
    if isinstance(child, TensorPart) and isinstance(captured, TensorCopy):
        return child.trained or child.value.dtype == captured.tensor.dtype
    return isinstance(captured, child.captures)


def built(captured: Any, name: str) -> Any:
    """An object from what was captured, in a process where nothing stands in its place."""
    if type(captured) in ATOMS:
        return captured
    if isinstance(captured, Value):
        return copy.deepcopy(captured.value)
    if isinstance(captured, TensorCopy):
        return captured.tensor.clone()
    if isinstance(captured, Items):
        return _filled(captured.blank, {key: built(item, joined(name, str(key))) for key, item in captured.items})
    raise ScriptError(
        f"{name} was captured, but is not there now",
        hint="give TrainState(...) the same objects in every process, before the first step",
    )


def _items(value: Any) -> list[tuple[Hashable, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if dataclasses.is_dataclass(value):
        return [
            (field.name, getattr(value, field.name))
            for field in dataclasses.fields(value)
            if hasattr(value, field.name)
        ]
    return list(enumerate(value))


def _blank(value: Any) -> Any:
    """An empty container of the same kind."""
    if isinstance(value, collections.defaultdict):
        return collections.defaultdict(value.default_factory)
    if isinstance(value, collections.deque):
        return collections.deque(maxlen=value.maxlen)
    kind = type(value)
    if isinstance(value, tuple) or dataclasses.is_dataclass(value):
        return object.__new__(kind) if not isinstance(value, tuple) else _Kind(kind)
    return kind()


@dataclass(frozen=True, slots=True)
class _Kind:
    """Stands for an empty tuple of that type: a named one cannot be empty."""

    kind: type


def _filled(blank: Any, items: dict[Hashable, Any]) -> Any:
    if isinstance(blank, _Kind):
        values = tuple(items.values())
        make = getattr(blank.kind, "_make", None)
        return make(values) if make is not None else blank.kind(values)
    filled = copy.copy(blank)
    if isinstance(filled, dict):
        filled.update(items)
    elif isinstance(filled, list | collections.deque):
        filled.extend(items.values())
    else:
        for key, item in items.items():
            object.__setattr__(filled, str(key), item)
    return filled
