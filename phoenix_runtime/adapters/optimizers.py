"""Optimizers and GradScaler: what a script or a scheduler sets in them, and by reference the tensors that they compute."""

from __future__ import annotations

import collections
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Final

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, _refresh_per_optimizer_state
from torch.optim import Optimizer

from phoenix_runtime.adapters.part import LATE
from phoenix_runtime.adapters.tensors import TensorCopy, cloned, copy_into
from phoenix_runtime.adapters.values import ATOMS, copied
from phoenix_runtime.errors import ScriptError

_PARAMETERS: Final = "params"
_MOMENTA: Final = {"Adadelta": 2, "Adam": 2, "AdamW": 2, "Adamax": 2, "Muon": 1, "NAdam": 2, "RAdam": 2, "Rprop": 2}


@dataclass(frozen=True, slots=True)
class Groups:
    """Of each param_group all but its parameters.

    `values`: what is no tensor in the optimizer's state (a count of steps, lists), each with its owner: the number of a
    parameter, counted over all groups, or a word.
    """

    order: ClassVar[int] = LATE
    groups: tuple[dict[str, Any], ...]
    values: tuple[tuple[int | str, Any, Any], ...] = ()


class OptimizerPart:
    """An optimizer. Its state (momenta ...) changes in step() only: tensors are not captured, but given by reference."""

    captures: ClassVar[type] = Groups

    def __init__(self, value: Optimizer) -> None:
        self.value = value
        self._seen: list[Any] = []  # all of the state, when it was found to be tensors alone
        self.keeps_values = False  # at the last capture: not tensors alone
        self._entry: list[tuple[dict[str, Any], dict[str, Any], list[Tensor]]] = []  # group, its values, its parameters

    def capture(self) -> Groups:
        groups = self.value.param_groups
        self._entry = [(group, group.copy(), group[_PARAMETERS].copy()) for group in groups]
        return Groups(
            tuple([{key: _kept(item) for key, item in group.items() if key != _PARAMETERS} for group in groups]),
            self._values(),
        )

    def restore(self, captured: Groups) -> None:
        present = self.value.param_groups
        if len(self._entry) == len(captured.groups):
            present[:] = [group for group, _, _ in self._entry]
        elif len(present) != len(captured.groups):
            raise ScriptError(
                f"{len(captured.groups)} param_groups were captured, but {type(self.value).__name__} has {len(present)}",
                hint="add all param_groups before the first step",
            )
        for index, (group, saved) in enumerate(zip(present, captured.groups, strict=True)):
            before = group
            if len(self._entry) == len(present):
                _, before, parameters = self._entry[index]
                group[_PARAMETERS] = before[_PARAMETERS]
                group[_PARAMETERS][:] = parameters
            for key in [key for key in group if key not in saved and key != _PARAMETERS]:
                del group[key]
            for key, item in saved.items():
                group[key] = _given_back(before.get(key), item)
        self._restore_values(captured)

    # --- the state ---------------------------------------------------------------------------------------------------

    @property
    def stepping(self) -> Optimizer:
        """Who keeps the state: the optimizer itself, or the one that it wraps (ZeroRedundancyOptimizer, averaging)."""
        inner = getattr(self.value, "optim", None)
        return inner if isinstance(inner, Optimizer) else self.value

    def parameters(self) -> list[Tensor]:
        """Those whose state is kept in this process, over all groups."""
        return list(chain.from_iterable([group[_PARAMETERS] for group in self.stepping.param_groups]))

    def state(self) -> list[Any]:
        """All that is in the state, the same objects in the same order as long as nothing is new in it."""
        entries = self.stepping.state.values()
        return list(chain.from_iterable([entry.values() if type(entry) is dict else (entry,) for entry in entries]))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The state of the n-th parameter, counted over all groups, under `n.key`."""
        for index, key, item in self.named_state():
            yield f"{index}.{key}", item

    def named_state(self) -> Iterator[tuple[int, str, Tensor]]:
        """The number of a parameter, what its optimizer calls it, and the tensor."""
        for owner, key, item in self._entries():
            if isinstance(owner, int) and not is_value(owner, key, item):
                yield owner, key, item

    def to_come(self) -> Iterator[tuple[Tensor, int]]:
        """Parameters without state for which the first step is going to keep some, and how many tensors of their size."""
        known = self.stepping.state
        for group in self.stepping.param_groups:
            copies = momenta(self.stepping, group)
            for parameter in group[_PARAMETERS]:
                if copies and parameter.requires_grad and not known.get(parameter):
                    yield parameter, copies

    def _entries(self) -> Iterator[tuple[int | str, Any, Any]]:
        places: dict[int, int] = {}
        for index, parameter in enumerate(self.parameters()):
            places.setdefault(id(parameter), index)
        for owner, entry in self.stepping.state.items():
            if isinstance(owner, str):
                yield owner, None, entry
            elif id(owner) in places and isinstance(entry, dict):
                yield from ((places[id(owner)], key, item) for key, item in entry.items())

    def _values(self) -> tuple[tuple[int | str, Any, Any], ...]:
        state = self.state()
        if len(state) == len(self._seen) and all(map(operator.is_, state, self._seen)):
            return ()
        found = tuple(
            [(owner, key, copied(item)) for owner, key, item in self._entries() if is_value(owner, key, item)]
        )
        self._seen, self.keeps_values = [] if found else state, bool(found)
        return found

    def _restore_values(self, captured: Groups) -> None:
        state: dict[Any, Any] = self.stepping.state
        parameters = self.parameters()
        kept = {(owner, key) for owner, key, _ in captured.values}
        for owner, key, item in list(self._entries()):
            if is_value(owner, key, item) and (owner, key) not in kept:
                if isinstance(owner, str):
                    del state[owner]
                else:
                    del state[parameters[owner]][key]
        for owner, key, item in captured.values:
            if isinstance(owner, str):
                state[owner] = copied(item)
            else:
                state[parameters[owner]][key] = copied(item)


def momenta(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """How many tensors of a parameter's size one of torch's optimizers keeps for it; 0 for what is not known."""
    kind = type(optimizer).__name__
    if type(optimizer).__module__.partition(".")[0] != "torch":
        return 0
    if kind == "SGD":
        return int(bool(group.get("momentum")))
    if kind == "RMSprop":
        return 1 + bool(group.get("centered")) + bool(group.get("momentum"))
    return _MOMENTA.get(kind, 0) + bool(group.get("amsgrad"))


def is_value(owner: int | str, key: Any, item: Any) -> bool:
    """Whether this piece of an optimizer's state is captured; else it is a tensor that belongs to a parameter, by name."""
    return not (isinstance(item, Tensor) and isinstance(key, str) and isinstance(owner, int))


def _kept(item: Any) -> Any:
    if type(item) in ATOMS:
        return item
    if isinstance(item, Tensor):
        return TensorCopy(cloned(item))
    # A function or another object that an optimizer keeps in a group is no value: the same one is put back.
    return copied(item) if isinstance(item, list | tuple | dict) else item


def _given_back(before: Any, item: Any) -> Any:
    if isinstance(item, TensorCopy):
        if not isinstance(before, Tensor):
            return item.tensor.clone()
        copy_into(before, item.tensor)
        return before
    return copied(item) if isinstance(item, list | tuple | dict) else item


@dataclass(frozen=True, slots=True)
class Scale:
    """A GradScaler's values. Which optimizers were unscaled already is known to the process alone."""

    values: dict[str, Any]


class ScalerPart:
    """A GradScaler, with the stage that each optimizer has reached: a repeated unscale_() is then the first again."""

    captures: ClassVar[type] = Scale
    _VALUES: Final = (
        "_scale",
        "_growth_tracker",
        "_init_scale",
        "_growth_factor",
        "_backoff_factor",
        "_growth_interval",
        "_init_growth_tracker",
    )

    def __init__(self, value: GradScaler) -> None:
        self.value = value
        self._tensors: dict[str, Tensor] = {}
        self._stages: dict[int, dict[str, Any]] = {}

    @property
    def enabled(self) -> bool:
        return bool(self.value.is_enabled())

    def capture(self) -> Scale:
        if not self.enabled:
            return Scale({})
        values = {name: getattr(self.value, name) for name in self._VALUES}
        self._tensors = {name: item for name, item in values.items() if isinstance(item, Tensor)}
        self._stages = {key: _copied_stage(stage) for key, stage in self.value._per_optimizer_states.items()}
        return Scale({name: _kept(item) for name, item in values.items()})

    def restore(self, captured: Scale) -> None:
        for name, item in captured.values.items():
            before = self._tensors.get(name, getattr(self.value, name, None))
            setattr(self.value, name, _given_back(before, item))
        if captured.values:
            stages: dict[int, dict[str, Any]] = collections.defaultdict(_refresh_per_optimizer_state)
            stages.update({key: _copied_stage(stage) for key, stage in self._stages.items()})
            self.value._per_optimizer_states = stages

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())


def _copied_stage(stage: dict[str, Any]) -> dict[str, Any]:
    return {name: dict(item) if isinstance(item, dict) else item for name, item in stage.items()}
