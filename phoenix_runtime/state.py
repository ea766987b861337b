"""`TrainState`: everything that training changes, by name; captured at a step's entry, and put back when it is repeated."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phoenix_runtime import randomness
from phoenix_runtime.adapters import Part, adapt
from phoenix_runtime.adapters.containers import ContainerPart, Items
from phoenix_runtime.adapters.generators import GeneratorPart
from phoenix_runtime.adapters.modules import ModulePart, ModuleState
from phoenix_runtime.adapters.optimizers import OptimizerPart, ScalerPart
from phoenix_runtime.adapters.part import joined
from phoenix_runtime.adapters.tensors import TensorPart
from phoenix_runtime.adapters.values import ATOMS, ValuePart
from phoenix_runtime.data import Batches, Position
from phoenix_runtime.errors import ScriptError
from phoenix_runtime.randomness import Randomness

_STEP: Final = "step"


@dataclass(frozen=True, slots=True)
class Captured:
    """The private bundle: what a step may change before its first Optimizer.step. Values only, it can be pickled.

    `without_gradient`: for each parameter whether it had none.
    """

    parts: Items
    randomness: Randomness
    without_gradient: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _Listed:
    """The parts by kind, nested ones too, with their names."""

    every: list[tuple[str, Part]]
    modules: list[tuple[str, ModulePart]]
    optimizers: list[tuple[str, OptimizerPart]]
    scalers: list[ScalerPart]
    batches: list[Batches]
    tensors: list[tuple[str, TensorPart]]
    nested: bool  # containers, whose contents may be others tomorrow


class TrainState:
    """The training state: `TrainState(model=model, optimizer=optimizer, data=Batches(loader), best_loss=inf)`.

    Objects are read back as attributes. They have to be there before the first step; plain values (numbers, texts, lists of
    them ...) may be assigned at any time: `state.best_loss = 0.3`. `state.step` counts completed steps. Random number
    generators of python, numpy and torch belong to the state by themselves; others when they are named.

    Raises:
        TypeError: for an object that cannot be captured; it says what can.
    """

    def __init__(self, **objects: Any) -> None:
        own = object.__setattr__
        own(self, "_values", {_STEP: 0})
        own(self, "_root", ContainerPart(self._values, "", adapt))
        own(self, "_begun", False)
        self._forget()
        for name, value in objects.items():
            setattr(self, name, value)
        if TrainState.made is not None:
            TrainState.made(self)

    made: ClassVar[Callable[[TrainState], None] | None] = None  # who wants to know of each new one
    _values: dict[str, Any]
    _root: ContainerPart
    _begun: bool
    _kinds: _Listed | None
    _parameters: tuple[list[list[Any]], list[tuple[str, Tensor]]] | None

    # --- names -------------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_values")[name]
        except KeyError:
            raise AttributeError(f"the training state has no {name!r}, only {', '.join(self._values)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        before = self._values.get(name)
        if type(value) in ATOMS and type(before) in ATOMS and name in self._values:
            self._values[name] = value
            return
        if name.startswith("_") or hasattr(type(self), name):
            raise ScriptError(
                f"a training state cannot call anything {name!r}",
                hint="that name belongs to TrainState itself: choose another one",
            )
        self._refuse_late(name, before, value)
        self._values[name] = value
        self._forget()

    def __delattr__(self, name: str) -> None:
        if name == _STEP or name not in self._values:
            raise AttributeError(name)
        self._refuse_late(name, self._values[name], None)
        del self._values[name]
        self._forget()

    def _refuse_late(self, name: str, before: Any, value: Any) -> None:
        new_is_plain, old_is_plain = (_is_plain(name, item) for item in (value, before))
        if self._begun and value is not before and not (new_is_plain and old_is_plain):
            raise ScriptError(
                f"state.{name} was assigned or deleted after the first step began, and"
                f" {'is no plain value' if old_is_plain else 'was an object of the state'}",
                hint="give objects to TrainState(...) before the first step; later change them in place (a tensor: copy_)",
            )

    def _forget(self) -> None:
        """What was looked up is looked up again when it is needed."""
        object.__setattr__(self, "_kinds", None)
        object.__setattr__(self, "_parameters", None)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    # --- what is in it -----------------------------------------------------------------------------------------------

    @property
    def parts(self) -> Mapping[str, Part]:
        """The adapter of each object by its name; a plain value has none."""
        return {name: part for name, part in self._listed().every if name in self._values}

    def objects(self) -> Iterator[Any]:
        """All objects, those in containers too, and the loaders of Batches."""
        for _, part in self._listed().every:
            yield part.value
            if isinstance(part, Batches):
                yield part.loader

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that were named, not what is in them."""
        yield from ((name, part.value) for name, part in self._listed().modules)

    def modules(self) -> Iterator[nn.Module]:
        yield from (part.value for _, part in self._listed().modules)

    def named_optimizers(self) -> Iterator[tuple[str, Optimizer]]:
        yield from ((name, part.value) for name, part in self._listed().optimizers)

    def optimizer_parts(self) -> Iterator[tuple[str, OptimizerPart]]:
        yield from self._listed().optimizers

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All that can be trained, once each, by name; of FSDP modules the shards."""
        yield from self._all_parameters()

    def _all_parameters(self) -> list[tuple[str, Tensor]]:
        """The modules' lists are the same objects as long as nothing has changed in them."""
        kinds = self._listed()
        lists = [part.parameters() for _, part in kinds.modules]
        known, found = self._parameters or (None, [])
        if known is None or kinds.nested or len(known) != len(lists) or not all(map(operator.is_, known, lists)):
            unique: dict[int, tuple[str, Tensor]] = {}
            for (name, _), parameters in zip(kinds.modules, lists, strict=True):
                for path, parameter in parameters:
                    unique.setdefault(id(parameter), (joined(name, path), parameter))
            for name, part in kinds.tensors:
                for _, tensor in part.tensors():
                    unique.setdefault(id(tensor), (name, tensor))
            found = list(unique.values())
            object.__setattr__(self, "_parameters", (lists, found))
        return found

    def optimized_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Those that an optimizer of the state holds."""
        names = {id(parameter): name for name, parameter in self.parameters()}
        seen: set[int] = set()
        for name, optimizer in self.named_optimizers():
            for index, group in enumerate(optimizer.param_groups):
                for number, parameter in enumerate(group["params"]):
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield names.get(id(parameter), f"{name}.param_groups[{index}][{number}]"), parameter

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, part in self._listed().modules:
            for path, buffer in part.buffers():
                yield joined(name, path), buffer

    @property
    def scales_gradients(self) -> bool:
        """A GradScaler is in use, which may leave out an optimizer's step."""
        return any(scaler.enabled for scaler in self._listed().scalers)

    def _listed(self) -> _Listed:
        kinds = self._kinds
        if kinds is None or kinds.nested:
            every = list(self._root.children())
            kinds = _Listed(
                every=every,
                modules=[(name, part) for name, part in every if isinstance(part, ModulePart)],
                optimizers=[(name, part) for name, part in every if isinstance(part, OptimizerPart)],
                scalers=[part for _, part in every if isinstance(part, ScalerPart)],
                batches=[part for _, part in every if isinstance(part, Batches)],
                tensors=[(name, part) for name, part in every if isinstance(part, TensorPart)],
                nested=any(isinstance(part, ContainerPart) for _, part in every),
            )
            generators = [part for _, part in every if isinstance(part, GeneratorPart)]
            for batches in kinds.batches:
                batches.generators = generators
            object.__setattr__(self, "_kinds", kinds)
        return kinds

    # --- steps -------------------------------------------------------------------------------------------------------

    def watch_safe_points(self, check: Callable[[], None]) -> None:
        """`check` is called before each batch, and may raise to end the step there."""
        for batches in self._listed().batches:
            batches.safe_point = check

    def finish_step(self) -> None:
        """The batches of this step are not going to be asked for again."""
        for batches in self._listed().batches:
            batches.finish_step()

    def capture(self) -> Captured:
        """The private bundle of this moment; at a step's entry, before anything of the step ran."""
        object.__setattr__(self, "_begun", True)
        parts = self._root.capture()
        return Captured(
            parts=parts,
            randomness=randomness.capture(),
            without_gradient=tuple([parameter.grad is None for _, parameter in self._all_parameters()]),
        )

    def restore(self, captured: Captured) -> None:
        """Put everything back in place, bit for bit. The next batches are those that came after the capture."""
        self._root.restore(captured.parts)
        self._forget()
        self._listed()
        randomness.restore(captured.randomness)

    def reshard(self) -> None:
        """FSDP modules forget what they have gathered."""
        for _, part in self._listed().modules:
            part.reshard()

    def reset_gradients(self, captured: Captured) -> None:
        """Gradients are again what they were at the entry: absent, or zeros (0 + -0.0 is 0, so that makes a difference).

        FSDP modules forget what they have gathered.
        """
        self.reshard()
        with torch.no_grad():
            for (_, parameter), absent in zip(self.parameters(), captured.without_gradient, strict=True):
                if absent:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                else:
                    parameter.grad.detach_().zero_()

    def fingerprints(self) -> Iterator[tuple[str, bytes]]:
        """Names and bits of everything but parameters, gradients, buffers and the global generators."""
        for name, part in self._listed().every:
            if isinstance(part, Batches):
                yield from _bits(name, part.position().place())
            elif not isinstance(part, ModulePart | ContainerPart):
                yield from _bits(name, part.capture())
            elif isinstance(part, ModulePart):
                yield from _bits(name, part.capture().extra)
        yield from (
            (f"state.{name}", repr(item).encode()) for name, item in self._values.items() if type(item) in ATOMS
        )


def _is_plain(name: str, value: Any) -> bool:
    """Made of plain values alone."""
    if type(value) in ATOMS:
        return True
    part = adapt(f"state.{name}", value)
    if isinstance(part, ContainerPart):
        return all(isinstance(child, ValuePart | ContainerPart) for _, child in part.children())
    return isinstance(part, ValuePart)


def _bits(name: str, captured: Any) -> Iterator[tuple[str, bytes]]:
    """What was captured, down to the single value."""
    if isinstance(captured, Tensor):
        local = captured.to_local() if hasattr(captured, "to_local") else captured
        dense = local.detach().cpu().contiguous()
        yield name, hashlib.sha256(ctypes.string_at(dense.data_ptr(), dense.nbytes)).digest() if dense.nbytes else b""
    elif isinstance(captured, dict):
        for key, item in captured.items():
            yield from _bits(joined(name, str(key)), item)
    elif isinstance(captured, list | tuple) and len(captured) < 100:
        for index, item in enumerate(captured):
            yield from _bits(f"{name}[{index}]", item)
    elif dataclasses.is_dataclass(captured) and not isinstance(captured, type):
        for field in dataclasses.fields(captured):
            yield from _bits(name, getattr(captured, field.name))
    elif hasattr(captured, "tobytes"):
        yield name, captured.tobytes()
    else:
        yield name, repr(captured).encode()


__all__ = ["Captured", "ModuleState", "Position", "TrainState"]
