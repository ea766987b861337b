"""The way back from disk: a rank's state out of a checkpoint that as many ranks have written, or another number of them.

With as many ranks everything is bit for bit what it was. With more or fewer, parameters and optimizer state are spread anew by
torch.distributed.checkpoint; what each rank had for itself is that of the same rank, or of rank 0 where there was none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from phoenix_launch.checkpoint import folders, saved
from phoenix_launch.checkpoint.folders import Manifest
from phoenix_launch.checkpoint.pairs import SlotRefusedError
from phoenix_launch.copies import Source, SourceKind, Stamp
from phoenix_launch.wire import NO_GENERATION
from phoenix_runtime import randomness
from phoenix_runtime.adapters.containers import Items
from phoenix_runtime.checkpoint import private_files
from phoenix_runtime.checkpoint.bundles import LIKE_PARAMETER, bundled, private_bundle, withdraw
from phoenix_runtime.checkpoint.memory import local, type_word
from phoenix_runtime.checkpoint.pieces import buffers_of, parted, qualified
from phoenix_runtime.checkpoint.private import Private
from phoenix_runtime.checkpoint.restore import Places, restore
from phoenix_runtime.data import Position
from phoenix_runtime.errors import ScriptError
from phoenix_runtime.state import Captured, TrainState

_OLDER: Final = "remove this folder: --resume then takes the newest checkpoint"
_SAME: Final = "build the same model and optimizer as the job that wrote it"


def load(folder: Path, state: TrainState, rank: int, world: int) -> Captured:
    """Parameters and optimizer state are in place afterwards; the rest is given to the caller, for `state.restore`.

    Raises ScriptError: it is not a checkpoint of this script, or is damaged.
    """
    manifest = folders.read_manifest(folder)
    if manifest is None:
        raise ScriptError(
            f"{folder} is no whole checkpoint", hint="give --checkpoint-dir the folder that holds step-..."
        )
    source = rank if rank < manifest.world else 0
    stamp = Stamp(manifest.generation, manifest.step)
    path = folders.private_path(folder, source)
    private = private_files.read(path, manifest.job, source, stamp, state)
    captured = private.captured
    if world == manifest.world:
        withdraw(state, private.withdrawn)
    try:
        _load_tensors(folder, manifest, private, state, rank, world)
    except (OSError, CheckpointException, RuntimeError) as error:
        if isinstance(error, ScriptError):
            raise
        raise ScriptError(f"{folder} cannot be loaded: {error}", hint=_SAME) from error
    if world == manifest.world:
        return captured
    count = sum(1 for _ in state.parameters())
    if len(captured.without_gradient) != count:
        raise ScriptError(
            f"{folder} was written by {manifest.world} ranks of which each had {len(captured.without_gradient)} parameters;"
            f" of {world} ranks this one has {count}",
            hint=f"a job of this kind goes on with {manifest.world} ranks",
        )
    return _adapted(captured, manifest.world, world, is_new=rank >= manifest.world)


def load_saved(folder: Path, state: TrainState, rank: int, world: int) -> Captured:
    """The same, from slots that nodes saved when their job had to stop; as many ranks as there were. Raises ScriptError."""
    found = saved.of_job(folder)
    if found is None or found.world != world:
        raise ScriptError(f"{folder} has no version that is whole", hint=_OLDER)
    stamp = Stamp(NO_GENERATION, found.version)

    def bring(*keys: str) -> Private | None:
        sources = [Source(key, SourceKind.OWN_NODE, -1) for key in keys]
        return restore(state, sources, stamp, found, rank=rank, world=world)

    try:
        private = bring(private_bundle(rank).key)  # it says what is in the others
        bring(*(bundle.key for bundle in bundled(state, rank, world)))
    except SlotRefusedError as error:
        raise ScriptError(str(error), hint=_OLDER) from error
    assert private is not None
    return private.captured


def _load_tensors(folder: Path, manifest: Manifest, private: Private, state: TrainState, rank: int, world: int) -> None:
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    stored = metadata.state_dict_metadata
    places = Places(state)
    names = dict(_names(stored, manifest, rank, world))
    missing = [name for name in places.parameters if name not in names]
    if missing:
        raise ScriptError(f"{folder} has no {missing[0]}, which the script has built here", hint=_SAME)
    buffers = {name for name, _ in buffers_of(private.captured)}
    for name in [name for bundle in bundled(state, rank, world) for name, _ in bundle.tensors if name not in names]:
        places.drop(name)
    wanted: dict[str, Tensor] = {}
    for name in _ordered(names, private.more.get(private_files.NAMES, [])):
        key = names[name]
        kind = stored[key]
        if name in buffers or not isinstance(kind, TensorStorageMetadata):
            continue
        tensor = places.parameters.get(name)
        if tensor is None:
            tensor = _state(places, name, kind, manifest.words.get(key, ""))
        if tensor is None:
            continue  # of another rank's part of the model
        if tuple(tensor.shape) != tuple(kind.size) or tensor.dtype != kind.properties.dtype:
            raise ScriptError(
                f"{name} is {tensor.dtype}{list(tensor.shape)} here and {kind.properties.dtype}{list(kind.size)} in {folder}",
                hint=_SAME,
            )
        wanted[key] = tensor.detach()
    _read(reader, metadata, wanted)


def _read(reader: FileSystemReader, metadata: Metadata, wanted: dict[str, Tensor]) -> None:
    """Into these tensors, without a word to other ranks: each one reads what it needs."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(wanted), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    local_plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([local_plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _ordered(names: Iterable[str], order: Iterable[str]) -> list[str]:
    """As the optimizers made them: what lies in a state in another order is another state to who saves it."""
    places = {name: place for place, name in enumerate(order)}
    return sorted(names, key=lambda name: places.get(name, len(places)))


def _state(places: Places, name: str, kind: TensorStorageMetadata, word: str) -> Tensor | None:
    """A piece of an optimizer's state, made if need be; None: of a parameter whose state others keep."""
    parameter = places.keeps(name)
    if parameter is None:
        return None
    shape = tuple(local(parameter).shape) if word == LIKE_PARAMETER else tuple(kind.size)
    return places.state(name, f"{type_word(kind.properties.dtype)} {word}".rstrip(), shape)


def _names(stored: Iterable[str], manifest: Manifest, rank: int, world: int) -> Iterator[tuple[str, str]]:
    """Each name with the one on disk that means it for this rank."""
    owned: dict[str, list[str]] = {}
    for key in stored:
        name, owner = parted(key)
        if owner in manifest.owners:
            owned.setdefault(name, []).append(owner)
        else:
            yield key, key
    for name, owners in owned.items():
        mine = [owner for owner in owners if rank in manifest.owners[owner]]
        if world != manifest.world and (len(owners) > 1 or not mine):
            raise ScriptError(
                f"{name} was another one on each of several ranks, and {manifest.world} ranks have written it",
                hint=f"a job of this kind goes on with {manifest.world} ranks",
            )
        if mine:
            yield name, qualified(name, mine[0])


def _adapted(captured: Captured, before: int, now: int, *, is_new: bool) -> Captured:
    """For another number of ranks: a rank that was not there draws its own random numbers; data goes on at about the place."""
    return dataclasses.replace(
        captured,
        parts=_scaled(captured.parts, before, now),
        randomness=randomness.capture() if is_new else captured.randomness,
    )


def _scaled(captured: Any, before: int, now: int) -> Any:
    if isinstance(captured, Items):
        return dataclasses.replace(
            captured, items=tuple([(key, _scaled(item, before, now)) for key, item in captured.items])
        )
    if isinstance(captured, Position) and captured.begin is not None:
        return dataclasses.replace(
            captured,
            served=captured.served * before // now,
            total=captured.total * before // now,
            loader=None,
            approximate=True,
        )
    return captured
