"""A training loop whose steps are interrupted before their optimizer and repeated, to be compared with a calm one."""

from __future__ import annotations

import ctypes
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from phoenix_runtime import randomness
from phoenix_runtime.data import Batches
from phoenix_runtime.state import TrainState

Step = Callable[[Callable[[], None]], object]  # called with the safe point before its optimizer


class Interrupted(BaseException):
    """What a safe point raises."""


@dataclass
class Training:
    """A state, one step of it, and what a script does between two steps."""

    state: TrainState
    step: Step
    between: Callable[[], None] = lambda: None
    seen: list[object] = field(default_factory=list)  # what the finished steps noted down


def bits(value: Any) -> Any:
    """Something that is equal exactly when all bits are."""
    if isinstance(value, Tensor):
        dense = value.detach().contiguous()
        return (
            str(value.dtype),
            tuple(value.shape),
            ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b"",
        )
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(bits, value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, *(bits(getattr(value, field.name)) for field in fields(value))]
    if hasattr(value, "tobytes"):
        return str(value.dtype), value.tobytes()
    return repr(value)


def everything(state: TrainState) -> dict[str, Any]:
    """All that a state holds, and the random number generators."""
    return {
        "parameters": bits(dict(state.parameters())),
        "gradients": bits({name: parameter.grad for name, parameter in state.parameters()}),
        "buffers": bits(dict(state.buffers())),
        "bulk": bits({name: dict(part.tensors()) for name, part in state.parts.items()}),
        "private": dict(state.fingerprints()),
        "randomness": bits(randomness.capture()),
    }


def run(build: Callable[[], Training], steps: int, interruptions: int) -> list[dict[str, Any]]:
    """Train; each step is interrupted so many times before it is finished. Everything after each step."""
    seed()
    training = build()
    with ended(training):
        return list(_history(training, steps, interruptions))


@contextmanager
def ended(*trainings: Training) -> Iterator[None]:
    """Workers of data loaders end with the test, whatever came of it."""
    try:
        yield
    finally:
        for training in trainings:
            for item in training.state.objects():
                if isinstance(item, Batches):
                    item.close()


def _history(training: Training, steps: int, interruptions: int) -> Iterator[dict[str, Any]]:
    state = training.state
    for _ in range(steps):
        entry = state.capture()
        for _ in range(interruptions):
            noted = len(training.seen)
            try:
                training.step(_raise)
            except Interrupted:
                pass
            del training.seen[noted:]
            state.reset_gradients(entry)
            state.restore(entry)
        training.step(lambda: None)
        state.step += 1
        state.finish_step()
        training.between()
        yield {**everything(state), "seen": bits(training.seen)}


def assert_same(one: Any, other: Any) -> None:
    """Name what differs: pytest's own comparison of so many bits takes minutes."""
    different = list(_different(one, other, ""))
    assert not different, f"not the same bits: {', '.join(different[:10])}"


def _different(one: Any, other: Any, name: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from _different(one.get(key), other.get(key), f"{name}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _different(left, right, f"{name}[{index}]")
    elif one != other:
        yield name


def moved(build: Callable[[], Training], steps: int, more: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train; then go on in a training that was built afresh, as another process would. Both ends."""
    seed()
    first = build()
    with ended(first):
        captured, parameters, end = _until_the_move(first, steps, more)
    torch.manual_seed(999)
    random.seed(999)
    second = build()
    with ended(second):
        second.state.restore(pickle.loads(captured))
        with torch.no_grad():
            for (name, parameter), (known, saved) in zip(second.state.parameters(), parameters, strict=True):
                assert name == known
                parameter.copy_(saved)
        _finish(second, more)
        return end, {**everything(second.state), "seen": bits(second.seen)}


def _until_the_move(first: Training, steps: int, more: int) -> tuple[bytes, list[tuple[str, Tensor]], dict[str, Any]]:
    _finish(first, steps)
    captured = pickle.dumps(first.state.capture())
    parameters = [(name, parameter.detach().clone()) for name, parameter in first.state.parameters()]
    first.seen.clear()
    _finish(first, more)
    end = {**everything(first.state), "seen": bits(first.seen)}
    return captured, parameters, end


def _finish(training: Training, steps: int) -> None:
    for _ in range(steps):
        training.step(lambda: None)
        training.state.step += 1
        training.state.finish_step()
        training.between()


def seed() -> None:
    torch.manual_seed(7)
    random.seed(7)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(7)


def _raise() -> None:
    raise Interrupted
