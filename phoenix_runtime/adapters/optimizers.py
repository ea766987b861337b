"""Optimizers and GradScaler: what a script or a scheduler sets in them, without what they compute from gradients."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, _refresh_per_optimizer_state
from torch.optim import Optimizer

from phoenix_runtime.adapters.part import LATE
from phoenix_runtime.adapters.tensors import TensorCopy, cloned, copy_into
from phoenix_runtime.adapters.values import ATOMS, copied
from phoenix_runtime.errors import ScriptError

_PARAMETERS: Final = "params"


@dataclass(frozen=True, slots=True)
class Groups:
    """Of each param_group all but its parameters."""

    order: ClassVar[int] = LATE
    groups: tuple[dict[str, Any], ...]


class OptimizerPart:
    """An optimizer. Its state (momenta ...) changes in step() only, so it is not captured, but given by reference."""

    captures: ClassVar[type] = Groups

    def __init__(self, value: Optimizer) -> None:
        self.value = value
        self._entry: list[tuple[dict[str, Any], dict[str, Any], list[Tensor]]] = []  # group, its values, its parameters

    def capture(self) -> Groups:
        groups = self.value.param_groups
        self._entry = [(group, group.copy(), group[_PARAMETERS].copy()) for group in groups]
        return Groups(
            tuple([{key: _kept(item) for key, item in group.items() if key != _PARAMETERS} for group in groups])
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

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The state of the n-th parameter, counted over all groups, under `n.key`."""
        parameters = [parameter for group in self.value.param_groups for parameter in group[_PARAMETERS]]
        for index, parameter in enumerate(parameters):
            for key, item in self.value.state.get(parameter, {}).items():
                if isinstance(item, Tensor):
                    yield f"{index}.{key}", item


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
