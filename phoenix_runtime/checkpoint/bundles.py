"""Which ranks hold the same bits: the parameters and optimizer state of a rank, by the set of their holders.

The set is known from structure alone: what DDP keeps equal, where a DTensor is replicated, what the script says. That
tensors are equal at one moment proves nothing (momenta begin as zeros everywhere). Whatever is not known to be held by
others counts as this rank's alone; that costs memory and is never wrong. `fingerprints.py` withdraws a claim that is not true.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from phoenix_launch.checkpoint.layout import Layout
from phoenix_launch.job import commit
from phoenix_runtime.adapters.optimizers import OptimizerPart
from phoenix_runtime.adapters.part import joined
from phoenix_runtime.adapters.values import ATOMS
from phoenix_runtime.checkpoint.memory import entry, local
from phoenix_runtime.state import TrainState

LIKE_PARAMETER: Final = "like its parameter"  # of optimizer state: a DTensor, placed as the parameter is
ON_CPU: Final = "on the cpu"  # of optimizer state: there, whatever device the parameter is on
_LONGEST_KEY: Final = 60
_SMALL_BYTES: Final = 64  # of a count of steps and the like, with what aligns it


@dataclass(frozen=True, eq=False)
class Bundle:
    """Tensors of this rank that the same ranks hold, whole DTensors too. As long as nothing has changed in it the same
    object is given again. `words`: what a restore has to know of each beyond its type and shape; `to_come`: bytes that an
    optimizer is going to add in its first step, as far as is known."""

    key: str
    holders: tuple[int, ...]
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    to_come: int = 0

    @property
    def described(self) -> commit.Bundle:
        """In the words of the commit rule."""
        return commit.Bundle(self.key, self.holders)

    @cached_property
    def layout(self) -> Layout:
        """The same on all holders."""
        rows = zip(self.tensors, self.words, strict=True)
        return Layout.of(entry(name, tensor, word) for (name, tensor), word in rows)

    def now(self) -> tuple[Layout, list[Tensor]]:
        """The layout, and this rank's parts of the tensors. (One may have got other memory and stayed the same object.)"""
        parts = [local(tensor) for _, tensor in self.tensors]
        counts = [part.numel() for part in parts]
        if counts != self.__dict__.get("_counts"):
            self.__dict__.pop("layout", None)
            self.__dict__["_counts"] = counts
        return self.layout, parts


@dataclass(frozen=True, slots=True)
class _Found:
    """What was worked out for a state, and what it was worked out from."""

    rank: int
    world: int
    marks: int
    seen: list[Any]
    bundles: list[Bundle]


_found: weakref.WeakKeyDictionary[TrainState, _Found] = weakref.WeakKeyDictionary()
_withdrawn: weakref.WeakKeyDictionary[TrainState, set[str]] = weakref.WeakKeyDictionary()
_marked: WeakIdKeyDictionary = WeakIdKeyDictionary()
_marks = itertools.count(1)
_last_mark = 0


def private_bundle(rank: int) -> commit.Bundle:
    """The bundle of what no other rank has and a forward may change: `private.Private`."""
    return commit.Bundle(f"private {rank}", (rank,), private=True)


def bundled(state: TrainState, rank: int, world: int) -> list[Bundle]:
    """All parameters and optimizer state, without the private bundle. Cheap when nothing is new since it was asked last."""
    seen = _objects(state)
    known = _found.get(state)
    if (
        known is not None
        and (known.rank, known.world, known.marks) == (rank, world, _last_mark)
        and len(known.seen) == len(seen)
        and all(map(operator.is_, known.seen, seen))
    ):
        return known.bundles
    found: dict[tuple[int, ...], Bundle] = {}
    structure = _Structure(state, rank, world)
    alone = _withdrawn.get(state, set())
    for name, tensor, word, claimed in structure.tensors():
        holders = (rank,) if name in alone else claimed
        bundle = found.setdefault(holders, Bundle(key_of(holders), holders))
        bundle.tensors.append((name, tensor))
        bundle.words.append(word)
    for holders, size in structure.to_come():
        bundle = found.get(holders) or Bundle(key_of(holders), holders)
        found[holders] = replace(bundle, to_come=bundle.to_come + size)
    _found[state] = _Found(rank, world, _last_mark, seen, list(found.values()))
    return _found[state].bundles


def replicated(x: Tensor | nn.Module | Optimizer) -> None:
    """Say that this is equal on all ranks of the job, so that one copy of it a node is enough.

    Of DDP's parameters and of DTensors that is known without it.

    Args:
        x: a parameter; a module, which stands for all its parameters; an optimizer, which stands for its state.
    """
    global _last_mark
    if not isinstance(x, Tensor | nn.Module | Optimizer):
        raise TypeError(f"replicated(...) wants a tensor, a module or an optimizer, not a {type(x).__name__}")
    _marked[x] = True
    _last_mark = next(_marks)


def withdraw(state: TrainState, names: Iterable[str]) -> None:
    """Each rank holds these tensors for itself, whatever structure says."""
    global _last_mark
    known = _withdrawn.setdefault(state, set())
    if not known.issuperset(names := set(names)):
        known |= names
        _last_mark = next(_marks)


def withdrawn(state: TrainState) -> tuple[str, ...]:
    return tuple(sorted(_withdrawn.get(state, ())))


def _objects(state: TrainState) -> list[Any]:
    """What decides about the bundles, by identity. Numbers that an optimizer keeps beside its tensors change all the time."""
    seen: list[Any] = list(state.parameters())
    for _, part in state.optimizer_parts():
        seen += part.parameters()
        kept = part.state()
        seen += [item for item in kept if type(item) not in ATOMS] if part.keeps_values else kept
    return seen


class _Structure:
    """One look at everything in a state."""

    def __init__(self, state: TrainState, rank: int, world: int) -> None:
        self._state, self._rank, self._everybody = state, rank, tuple(range(world))
        self._replicas: dict[int, tuple[int, ...]] = {}  # by parameter: what DDP or the script says
        self._on_mesh: dict[Any, tuple[int, ...]] = {}
        for _, module in state.named_modules():
            self._look_into(module)
        for _, part in state.optimizer_parts():
            if isinstance(part.value, PostLocalSGDOptimizer):  # between two averages each rank has its own parameters
                self._replicas.update(dict.fromkeys(map(id, part.parameters()), (rank,)))

    def tensors(self) -> Iterator[tuple[str, Tensor, str, tuple[int, ...]]]:
        """Name, tensor, word and holders of each, in an order that follows from the structure."""
        names: dict[int, str] = {}
        for name, parameter in itertools.chain(self._state.parameters(), self._state.optimized_parameters()):
            if id(parameter) not in names:
                names[id(parameter)] = name
                yield name, parameter, "", self._holders(parameter)
        for optimizer, part in self._state.optimizer_parts():
            parameters = part.parameters()
            for index, key, tensor in part.named_state():
                parameter = parameters[index]
                name = state_name(optimizer, names.get(id(parameter), str(index)), key)
                yield name, tensor, _word(tensor, parameter), self._state_holders(part, tensor, parameter)

    def to_come(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Holders of what optimizers make in their first step, and its bytes: that bundle is there from the beginning, empty,
        so that a rank holds the same bundles at all versions."""
        for _, part in self._state.optimizer_parts():
            if part.value in _marked:
                yield self._everybody, 0
            elif part.stepping is not part.value:
                yield (self._rank,), 0
            for parameter, copies in part.to_come():
                yield self._state_holders(part, parameter, parameter), copies * (local(parameter).nbytes + _SMALL_BYTES)

    def _look_into(self, root: nn.Module) -> None:
        for module in root.modules():
            if isinstance(module, DistributedDataParallel):
                ranks = tuple(sorted(dist.get_process_group_ranks(module.process_group)))
                for name, parameter in module.module.named_parameters():
                    if name not in module.parameters_to_ignore:
                        self._replicas[id(parameter)] = ranks
        for module in root.modules():
            if module in _marked:
                self._replicas.update(dict.fromkeys(map(id, module.parameters()), self._everybody))

    def _holders(self, parameter: Tensor) -> tuple[int, ...]:
        if parameter in _marked:
            return self._everybody
        known = self._replicas.get(id(parameter))
        return known if known is not None else self._mesh_holders(parameter)

    def _state_holders(self, part: OptimizerPart, tensor: Tensor, parameter: Tensor) -> tuple[int, ...]:
        if tensor in _marked or part.value in _marked:
            return self._everybody
        if part.stepping is not part.value:  # it keeps the state of some parameters only, others keep that of the rest
            return (self._rank,)
        if isinstance(tensor, DTensor) and not _alike(tensor, parameter):
            return self._mesh_holders(tensor)
        return self._holders(parameter)

    def _mesh_holders(self, tensor: Tensor) -> tuple[int, ...]:
        """Ranks that differ from this one only along dimensions of the mesh on which the tensor is replicated."""
        if not isinstance(tensor, DTensor) or any(placement.is_partial() for placement in tensor.placements):
            return (self._rank,)
        known = (tensor.device_mesh, tensor.placements)
        if known not in self._on_mesh:
            here = tensor.device_mesh.get_coordinate()
            self._on_mesh[known] = (self._rank,)
            if here is not None:
                placed = zip(tensor.placements, here, strict=True)
                index = tuple(slice(None) if placement.is_replicate() else place for placement, place in placed)
                self._on_mesh[known] = tuple(sorted(tensor.device_mesh.mesh[index].flatten().tolist()))
        return self._on_mesh[known]


def state_name(optimizer: str, parameter: str, key: str) -> str:
    """Of a piece of an optimizer's state; by the parameter's name, since numbers may differ between holders."""
    return joined(f"{optimizer}[{parameter}]", key)


def _word(tensor: Tensor, parameter: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return LIKE_PARAMETER if _alike(tensor, parameter) else ""
    return ON_CPU if tensor.device.type == "cpu" != parameter.device.type else ""


def _alike(tensor: Tensor, parameter: Tensor) -> bool:
    return (
        isinstance(tensor, DTensor)
        and isinstance(parameter, DTensor)
        and (tensor.device_mesh, tensor.placements) == (parameter.device_mesh, parameter.placements)
    )


def key_of(holders: tuple[int, ...]) -> str:
    """rank 2, ranks 0-3, ranks 0-1,4-5; the many of a large job by their first, their number and a digest."""
    if len(holders) == 1:
        return f"rank {holders[0]}"
    runs: list[list[int]] = []
    for rank in holders:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    if len(text) > _LONGEST_KEY:
        text = f"{holders[0]}.. ({len(holders)}, {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"
    return f"ranks {text}"
