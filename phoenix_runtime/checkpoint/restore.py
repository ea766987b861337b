"""The way back: a rank's bundles from slots into the objects of its TrainState, in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phoenix_launch.checkpoint.pairs import SlotRefusedError
from phoenix_launch.checkpoint.slots import SlotReader
from phoenix_launch.copies import Source, SourceKind, Stamp
from phoenix_runtime.adapters.optimizers import OptimizerPart
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
_OWN = -1  # node: no other than one's own


class Slots(Protocol):
    """Who has copies to be read: the node's checkpoint server, or a folder."""

    def read(self, bundle: str, stamp: Stamp, node: int = -1) -> SlotReader:
        """The caller's to close. Raises OSError, SlotRefusedError."""

    def damaged(self, bundle: str, stamp: Stamp) -> None:
        """What was read is not what was written: nobody shall have it."""


def restore(
    state: TrainState,
    sources: Iterable[Source],
    stamp: Stamp,
    link: Slots,
    *,
    rank: int,
    world: int,
    nodes: Sequence[int] = (),
) -> Private | None:
    """Load every bundle that is not ITSELF. Main thread; `link` is the caller's, with its generation set.

    `nodes`: who else may have a copy, when the one that is named is damaged.

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
        with closing(_intact(link, source, stamp, nodes)) as reader:
            if source.bundle == own:
                private = decoded(reader, state)
                withdraw(state, private.withdrawn)
            else:
                here = here or {bundle.key: bundle for bundle in bundled(state, rank, world)}
                places.take(reader, here.get(source.bundle))
            if not reader.still_sealed():
                raise SlotRefusedError(f"version {stamp.version} of bundle {source.bundle!r} was overwritten meanwhile")
    return private


def _intact(link: Slots, source: Source, stamp: Stamp, nodes: Sequence[int]) -> SlotReader:
    """The first copy that has the bits that were written. Raises OSError, SlotRefusedError."""
    first = source.node if source.kind is SourceKind.OTHER_NODE else _OWN
    refusal: SlotRefusedError | None = None
    for node in dict.fromkeys((first, *nodes)):
        try:
            reader = link.read(source.bundle, stamp, node)
        except SlotRefusedError as error:
            refusal = refusal or error
            continue
        if is_whole(reader):
            return reader
        reader.close()
        link.damaged(source.bundle, stamp)  # not to be offered any more; the next one is kept in its place
        remark(f"version {stamp.version} of bundle {source.bundle!r} was damaged in memory: another copy is taken")
        refusal = SlotRefusedError(f"version {stamp.version} of bundle {source.bundle!r} is damaged")
    assert refusal is not None
    raise refusal


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

    def take(self, reader: SlotReader, present: Bundle | None) -> None:
        """Everything of one bundle, bit for bit; optimizer state that is not in it goes."""
        rows = {row.name: row for row in reader.layout.tensors}
        for name in [name for name, _ in present.tensors if name not in rows] if present is not None else []:
            self.drop(name)
        for row in reader.layout.tensors:
            known = self.parameters.get(row.name)
            part = local(self.state(row.name, row.dtype, row.shape) if known is None else known)
            if tuple(part.shape) != row.shape or part.dtype != type_of(row.dtype):
                raise ScriptError(
                    f"{row.name} is {part.dtype}{list(part.shape)} here and was copied as {row.dtype}{list(row.shape)}",
                    hint="build the same model and optimizer in every process before the first step",
                )
            load(reader.tensor(row), part.detach())

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
