"""The way back: a rank's bundles from slots into the objects of its TrainState, in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phoenix_launch.checkpoint.layout import Layout
from phoenix_launch.checkpoint.pairs import SlotRefusedError
from phoenix_launch.checkpoint.slots import SlotReader
from phoenix_launch.checkpoint.streams import StreamReader
from phoenix_launch.copies import Source, SourceKind, Stamp
from phoenix_runtime.adapters.optimizers import OptimizerPart
from phoenix_runtime.checkpoint.arriving import arrive, whole
from phoenix_runtime.checkpoint.bundles import (
    LIKE_PARAMETER,
    ON_CPU,
    Bundle,
    bundled,
    private_bundle,
    state_name,
    withdraw,
)
from phoenix_runtime.checkpoint.memory import is_whole, load, local, type_of
from phoenix_runtime.checkpoint.private import Private, decoded
from phoenix_runtime.errors import ScriptError
from phoenix_runtime.link import remark
from phoenix_runtime.state import TrainState

_SLOTS = (SourceKind.OWN_NODE, SourceKind.OTHER_NODE)
T = TypeVar("T")
_OWN = -1  # node: no other than one's own


class Slots(Protocol):
    """Who has copies to be read: the node's checkpoint server, or a folder."""

    def read(self, bundle: str, stamp: Stamp, node: int = -1, *, keep: bool = False) -> SlotReader | StreamReader:
        """The caller's to close. `keep`: others here are going to read it, too. Raises OSError, SlotRefusedError."""

    def damaged(self, bundle: str, stamp: Stamp) -> None:
        """What was read here is not what was written: nobody shall have it."""


def restore(
    state: TrainState,
    sources: Iterable[Source],
    stamp: Stamp,
    link: Slots,
    *,
    rank: int,
    world: int,
    nodes: Sequence[int] = (),
    beside: Collection[int] = (),
) -> Private | None:
    """Load every bundle that is not ITSELF. Main thread; `link` is the caller's, with its generation set.

    `nodes`: who else may have a copy, when the one that is named is damaged; `beside`: the other ranks of this node.
    After an error the state may hold anything: what comes from another node is stored before it is known to be intact.

    Returns the private bundle when it was among them: the caller gives its `captured` to `state.restore`, after this.

    Raises:
        OSError: the checkpoint server is gone.
        SlotRefusedError: nobody has an intact copy of what the node was said to have.
        ScriptError: the script built something else here than what was copied.
    """
    private: Private | None = None
    own = private_bundle(rank).key
    here: dict[str, Bundle] = {}
    places = Places(state)
    for source in sorted(sources, key=lambda source: source.bundle != own):  # it says what is in the others
        if source.kind is SourceKind.ITSELF:
            continue
        if source.kind not in _SLOTS:
            raise SlotRefusedError(
                f"bundle {source.bundle!r} would have to come from rank {source.holder}, not from a slot"
            )
        if source.bundle == own:
            private = _first_intact(link, source, stamp, nodes, lambda copy: _private(copy, state))
            withdraw(state, private.withdrawn)
        else:
            here = here or {bundle.key: bundle for bundle in bundled(state, rank, world)}
            present = here.get(source.bundle)
            keep = present is not None and any(holder in beside for holder in present.holders)
            _first_intact(link, source, stamp, nodes, partial(places.take, present=present), keep=keep)
    return private


def _first_intact(
    link: Slots,
    source: Source,
    stamp: Stamp,
    nodes: Sequence[int],
    take: Callable[[SlotReader | StreamReader], T | None],
    *,
    keep: bool = False,
) -> T:
    """What `take` makes of the first copy that has the bits that were written; of others it makes None.

    Raises OSError, SlotRefusedError.
    """
    words = f"version {stamp.version} of bundle {source.bundle!r}"
    first = source.node if source.kind is SourceKind.OTHER_NODE else _OWN
    refusal: SlotRefusedError | None = None
    for node in dict.fromkeys((first, *nodes)):
        try:
            with closing(link.read(source.bundle, stamp, node, keep=keep)) as copy:
                taken = take(copy)
                overwritten = isinstance(copy, SlotReader) and not copy.still_sealed()
        except SlotRefusedError as error:
            refusal = refusal or error
            continue
        if taken is not None and overwritten:
            raise SlotRefusedError(f"{words} was overwritten meanwhile")
        if taken is not None:
            return taken
        # A copy of this node's is not to be offered any more. Another node's may be as good as ever: its bits may have
        # flipped here or on the way, and whoever is told to forget what is whole may have had the last one.
        if isinstance(copy, SlotReader):
            link.damaged(source.bundle, stamp)
        remark(f"{words} was damaged in memory: another copy is taken")
        refusal = SlotRefusedError(f"{words} is damaged")
    assert refusal is not None
    raise refusal


def _private(copy: SlotReader | StreamReader, state: TrainState) -> Private | None:
    found = whole(copy)
    return decoded(found, state) if found is not None else None


class Places:
    """Where a tensor goes, by its name in a table; what an optimizer has not made yet is made here."""

    def __init__(self, state: TrainState) -> None:
        self.parameters: dict[str, Tensor] = dict(state.parameters())
        known = {id(parameter) for parameter in self.parameters.values()}
        self.parameters.update((name, it) for name, it in state.optimized_parameters() if id(it) not in known)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._states: dict[str, tuple[OptimizerPart, Tensor]] = {}
        for optimizer, part in state.optimizer_parts():
            for index, parameter in enumerate(part.parameters()):
                prefix = state_name(optimizer, names.get(id(parameter), str(index)), "")
                self._states[prefix] = (part, parameter)

    def take(self, copy: SlotReader | StreamReader, present: Bundle | None) -> bool | None:
        """Everything of one bundle, bit for bit; optimizer state that is not in it goes. None: the copy is damaged."""
        if isinstance(copy, StreamReader):
            return arrive(copy, self.targets(copy.layout, present)) or None
        if not is_whole(copy):
            return None
        for row, target in zip(copy.layout.tensors, self.targets(copy.layout, present), strict=True):
            load(copy.tensor(row), target)
        return True

    def targets(self, layout: Layout, present: Bundle | None) -> list[Tensor]:
        """This rank's parts of the tensors in a copy, by its rows; optimizer state that is not in it goes."""
        rows = {row.name: row for row in layout.tensors}
        for name in [name for name, _ in present.tensors if name not in rows] if present is not None else []:
            self.drop(name)
        found = []
        for row in layout.tensors:
            known = self.parameters.get(row.name)
            part = local(self.state(row.name, row.dtype, row.shape) if known is None else known)
            if tuple(part.shape) != row.shape or part.dtype != type_of(row.dtype):
                raise ScriptError(
                    f"{row.name} is {part.dtype}{list(part.shape)} here and was copied as {row.dtype}{list(row.shape)}",
                    hint="build the same model and optimizer in every process before the first step",
                )
            found.append(part.detach())
        return found

    def _owner(self, name: str) -> tuple[OptimizerPart, Tensor, str]:
        prefix, _, key = name.rpartition("].")
        found = self._states.get(f"{prefix}]")
        if found is None:
            raise ScriptError(
                f"{name} is not both in the copy of the training state and in what the script has built here",
                hint="build the same model and optimizer in every process before the first step",
            )
        return (*found, key)

    def keeps(self, name: str) -> Tensor | None:
        """The parameter to which a piece of an optimizer's state belongs; None: no optimizer here keeps that."""
        found = self._states.get(f"{name.rpartition('].')[0]}]")
        return found[1] if found is not None else None

    def state(self, name: str, word: str, shape: tuple[int, ...]) -> Tensor:
        """A piece of an optimizer's state; one that is missing is made as the optimizer would make it, with any values.

        `word`: its type and what else is known of it; `shape`: of this rank's part.
        """
        part, parameter, key = self._owner(name)
        entry = part.stepping.state[parameter]
        tensor = entry.get(key)
        kind = type_of(word)
        if isinstance(tensor, Tensor) and tuple(local(tensor).shape) == shape and tensor.dtype == kind:
            return tensor
        device = torch.device("cpu") if word.endswith(ON_CPU) else parameter.device
        if word.endswith(LIKE_PARAMETER):
            made = torch.empty_like(parameter, dtype=kind, requires_grad=False)
        elif not isinstance(parameter, DTensor) and tuple(parameter.shape) == shape:
            made = torch.empty_like(parameter, dtype=kind, device=device, requires_grad=False)
        else:
            made = torch.empty(shape, dtype=kind, device=device)
        entry[key] = made
        return made

    def drop(self, name: str) -> None:
        part, parameter, key = self._owner(name)
        entry = part.stepping.state[parameter]
        entry.pop(key, None)
        if not entry:
            del part.stepping.state[parameter]
