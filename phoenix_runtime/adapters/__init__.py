"""Adapters: one small class for each kind of object that can be part of a training state."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from phoenix_runtime.adapters.containers import ContainerPart, is_container
from phoenix_runtime.adapters.generators import GeneratorPart, is_generator
from phoenix_runtime.adapters.modules import ModulePart
from phoenix_runtime.adapters.optimizers import OptimizerPart, ScalerPart
from phoenix_runtime.adapters.part import Part
from phoenix_runtime.adapters.state_dicts import StateDictPart, has_state_dict
from phoenix_runtime.adapters.tensors import TensorPart
from phoenix_runtime.adapters.values import ValuePart, is_plain

__all__ = ["Part", "adapt"]


def adapt(name: str, value: Any) -> Part:
    """The adapter that fits.

    Raises:
        TypeError: none does; it names the object and says what would fit.
    """
    if isinstance(value, nn.Module):
        return ModulePart(value, name)
    if isinstance(value, Optimizer):
        return OptimizerPart(value)
    if isinstance(value, GradScaler):
        return ScalerPart(value)
    if isinstance(value, Tensor):
        return TensorPart(value)
    if is_generator(value):
        return GeneratorPart(value)
    if is_plain(value):
        return ValuePart(value)
    if not isinstance(value, type) and isinstance(value, Part):
        return value
    if has_state_dict(value):
        return StateDictPart(value)
    if is_container(value):
        return ContainerPart(value, name, adapt)
    raise TypeError(
        f"{name or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be captured. What"
        " can: modules, optimizers, tensors, anything with state_dict() and load_state_dict(), generators of torch, numpy"
        " and python, plain values, and dicts, lists, tuples and dataclasses of these"
    )
