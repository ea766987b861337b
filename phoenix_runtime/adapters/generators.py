"""Random number generators that the script named: torch's, numpy's and python's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from phoenix_runtime.adapters.part import LATE
from phoenix_runtime.adapters.values import copied


def is_generator(value: object) -> bool:
    """One whose state can be read and set."""
    if isinstance(value, torch.Generator | random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, numpy.Generator | numpy.RandomState | numpy.BitGenerator)


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """The state in the form of the generator's own library."""

    order: ClassVar[int] = LATE
    state: Any


class GeneratorPart:
    """A generator, set back in place."""

    captures: ClassVar[type] = GeneratorState

    def __init__(self, value: Any) -> None:
        self.value = value

    def capture(self) -> GeneratorState:
        generator = self.value
        if isinstance(generator, torch.Generator):
            return GeneratorState(generator.get_state().clone())
        if isinstance(generator, random.Random):
            return GeneratorState(generator.getstate())
        if hasattr(generator, "get_state"):
            return GeneratorState(copied(generator.get_state(legacy=False)))
        return GeneratorState(copied(getattr(generator, "bit_generator", generator).state))

    def restore(self, captured: GeneratorState) -> None:
        generator, state = self.value, captured.state
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif hasattr(generator, "set_state"):
            generator.set_state(copied(state))
        else:
            getattr(generator, "bit_generator", generator).state = copied(state)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())


def generators_of(loader: Any) -> list[GeneratorPart]:
    """Those that a data loader draws from by itself: its own, its samplers', its dataset's."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    ]
    found = {
        id(owner.generator): owner.generator for owner in owners if is_generator(getattr(owner, "generator", None))
    }
    return [GeneratorPart(generator) for generator in found.values()]
