"""What a step may read and change outside of TrainState: found by looking where its function can reach.

Counters, generators and tensors in closures, in globals that the function names, in the attributes of objects and modules
there. Compared after a restore with what they were at the step's entry: what differs then is changed by a step and restored
by nobody.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from phoenix_runtime.state import TrainState

_DEPTH: Final = 3  # script's object -> its attribute -> an entry of that
_MOST: Final = 2000  # values that are looked at
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))


@dataclass(slots=True)
class Suspects:
    """Where values were found, what they were, and how to look again."""

    _seen: list[tuple[str, Callable[[], Any], Any]]

    @classmethod
    def seen_from(cls, function: Callable[[], object], state: TrainState) -> Suspects:
        modules = dict(state.named_modules())
        known = {id(item) for item in state.objects() if not isinstance(item, nn.Module)} | {id(state)}
        seen: list[tuple[str, Callable[[], Any], Any]] = []
        for name, look in _reachable(function, modules, known):
            if len(seen) >= _MOST:
                break
            seen.append((name, look, _print_of(look())))
        return cls(seen)

    def changed(self) -> list[str]:
        """Names of those that are not what they were, and how they differ where that can be said in a word."""
        return [text for name, look, before in self._seen if (text := _difference(name, before, look))]


def _difference(name: str, before: Any, look: Callable[[], Any]) -> str:
    try:
        after = _print_of(look())
    except (AttributeError, KeyError, IndexError, ValueError):
        return f"{name} is gone"
    if after == before:
        return ""
    short = isinstance(before, _PLAIN) and isinstance(after, _PLAIN) and len(repr(before)) + len(repr(after)) < 60
    return f"{name} ({before!r} -> {after!r})" if short else name


def _print_of(value: Any) -> Any:
    """Something that is equal exactly when the value is."""
    if isinstance(value, Tensor):
        local = value.detach().cpu().contiguous()
        return ("tensor", value._version, tuple(value.shape), local.view(-1).view(torch.uint8).sum().item())
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if type(value).__module__.startswith("numpy.random") and hasattr(value, "bit_generator"):
        return repr(value.bit_generator.state)
    return value


def _is_value(value: Any) -> bool:
    numpy_generator = type(value).__module__.startswith("numpy.random") and hasattr(value, "bit_generator")
    return isinstance(value, (*_PLAIN, Tensor, torch.Generator, random.Random)) or numpy_generator


def _reachable(
    function: Callable[[], object], modules: Mapping[str, nn.Module], known: set[int]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Of the state's own modules what is not registered; then what the function itself can name."""
    visited: set[int] = set(known)
    for name, module in modules.items():
        yield from _below(name, functools.partial(_itself, module), visited, _DEPTH)
    for name, look in _roots(function):
        yield from _below(name, look, visited, _DEPTH)


def _roots(function: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What the function can name: its own object, arguments bound to it, closure cells, globals."""
    while isinstance(function, functools.partial):
        for index, argument in enumerate(function.args):
            yield f"argument {index} of the step", functools.partial(_itself, argument)
        for name, argument in function.keywords.items():
            yield f"argument {name} of the step", functools.partial(_itself, argument)
        function = function.func
    if isinstance(function, types.MethodType):
        yield "self", functools.partial(_itself, function.__self__)
        function = function.__func__
    elif not isinstance(function, types.FunctionType):
        call = vars(type(function)).get("__call__")
        if not isinstance(call, types.FunctionType):
            return
        yield type(function).__name__, functools.partial(_itself, function)
        function = call
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, functools.partial(getattr, cell, "cell_contents")
    for name in _named_globals(function.__code__):
        if name in function.__globals__:
            yield f"{name} (global)", functools.partial(function.__globals__.__getitem__, name)


def _named_globals(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named_globals(constant)


def _itself(value: Any) -> Any:
    return value


def _below(
    name: str, look: Callable[[], Any], visited: set[int], depth: int
) -> Iterator[tuple[str, Callable[[], Any]]]:
    try:
        value = look()
    except ValueError:  # a cell that is still empty
        return
    if _is_value(value):
        if not isinstance(value, Tensor) or id(value) not in visited:
            yield name, look
        return
    if depth == 0 or id(value) in visited or isinstance(value, (type, types.ModuleType)):
        return
    visited.add(id(value))
    if isinstance(value, types.FunctionType):
        if _is_of_the_script(value.__module__):
            for inner, look_inside in _roots(value):
                yield from _below(inner, look_inside, visited, depth - 1)
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules():
            yield from _attributes(f"{name}.{path}" if path else name, module, visited, 1)
    elif isinstance(value, dict):
        for key in list(value):
            yield from _below(f"{name}[{key!r}]", functools.partial(value.__getitem__, key), visited, depth - 1)
    elif isinstance(value, (list, tuple)):
        yield f"the length of {name}", value.__len__
        for index in range(min(len(value), 64)):
            yield from _below(f"{name}[{index}]", functools.partial(value.__getitem__, index), visited, depth - 1)
    elif isinstance(value, types.MethodType):
        yield from _below(f"{name}'s object", functools.partial(_itself, value.__self__), visited, depth)
    elif _is_of_the_script(type(value).__module__):
        yield from _attributes(name, value, visited, depth)


def _attributes(name: str, owner: Any, visited: set[int], depth: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Plain attributes; a module's parameters, buffers and submodules are not among them."""
    attributes: Mapping[str, Any] = getattr(owner, "__dict__", {})
    for key in list(attributes):
        if isinstance(owner, nn.Module) and (key.startswith("_") or not _is_of_the_script(type(owner).__module__)):
            continue
        yield from _below(f"{name}.{key}", functools.partial(attributes.__getitem__, key), visited, depth - 1)


@functools.cache
def _is_of_the_script(module: str) -> bool:
    """Libraries keep counts of their own in their objects; what a step reads of them is their business."""
    if module.split(".")[0] in ("builtins", "phoenix_runtime"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not any(file.startswith(folder) for folder in _LIBRARIES)


_LIBRARIES: Final = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")})
