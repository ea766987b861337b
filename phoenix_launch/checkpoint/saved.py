"""Slots on disk: what a node's server saves when the job must stop, and which version all of it together still has.

`emergency-JOB/node-N/` holds the slots of one node as files, byte for byte, each with a checksum; it gets its name when all of
it is there. Nobody plans while a job ends: what the folders of all nodes are good for is worked out when a job is resumed.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from phoenix_launch.checkpoint import folders, header
from phoenix_launch.checkpoint.pairs import SlotPairs, SlotRefusedError
from phoenix_launch.checkpoint.slots import SlotReader
from phoenix_launch.copies import Stamp

PREFIX: Final = "emergency-"
_CONTENTS: Final = "slots.json"
_FORMAT: Final = 1
_PRIVATE: Final = re.compile(r"private (\d+)")  # the bundle that a rank has for itself
_PIECE_BYTES: Final = 16 << 20


class SavedSlot(msgspec.Struct, frozen=True):
    bundle: str
    stamp: Stamp
    file: str
    crc: int  # of its data


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Of one node's folder. `world`: the number of ranks of the job."""

    format: int = _FORMAT
    job: str
    node: int
    world: int
    slots: tuple[SavedSlot, ...]


def save(pairs: SlotPairs, root: Path, node: int, world: int) -> Path:
    """Write all sealed slots down to the disk. Raises OSError."""
    folder = root / f"{PREFIX}{pairs.job}" / f"node-{node}"
    pending = folder.with_name(f".{folder.name}.pending")
    shutil.rmtree(pending, ignore_errors=True)
    pending.mkdir(parents=True)
    saved = []
    for number, kept in enumerate(pairs.kept()[1]):
        with pairs.reading(kept.bundle, kept.slot.stamp) as memory:
            crc = _write(pending / str(number), memory.view) if memory is not None else None
            if crc is not None:
                saved.append(SavedSlot(kept.bundle, kept.slot.stamp, str(number), crc))
    contents = Contents(job=pairs.job, node=node, world=world, slots=tuple(saved))
    with open(pending / _CONTENTS, "wb") as file:
        file.write(msgspec.json.encode(contents))
        file.flush()
        os.fsync(file.fileno())
    folders.sync_folder(pending)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(pending, folder)
    folders.sync_folder(folder.parent)
    folders.sync_folder(root)
    return folder


def _write(path: Path, memory: memoryview) -> int | None:
    """The slot as it is. Returns the checksum of its data; None: it is not whole any more."""
    found = header.read(memory)
    if found is None:
        return None
    total = found.extent.total
    with open(path, "wb") as file:
        for start in range(0, total, _PIECE_BYTES):
            file.write(memory[start : min(start + _PIECE_BYTES, total)])
        file.flush()
        os.fsync(file.fileno())
    return zlib.crc32(memory[found.extent.data_offset : total])


# --- the way back ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """What the nodes of one job have saved, and the newest version of which every rank has its own bundle."""

    folder: Path
    job: str
    world: int
    version: int
    copies: dict[str, tuple[tuple[Path, SavedSlot], ...]]  # of that version, by bundle

    def read(self, bundle: str, stamp: Stamp, node: int = -1, *, keep: bool = False) -> SlotReader:
        """A whole copy of this bundle, the caller's to close; whichever is. Raises SlotRefusedError."""
        for path, slot in self.copies.get(bundle, ()):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    reader = SlotReader.attach(descriptor, self.job, bundle, slot.stamp)
                finally:
                    os.close(descriptor)
            except OSError:
                continue
            if reader is not None and reader.checksum() == slot.crc:
                return reader
            if reader is not None:
                reader.close()
        raise SlotRefusedError(f"{self.folder} has no whole copy of bundle {bundle!r} at step {self.version}")

    def damaged(self, bundle: str, stamp: Stamp) -> None:
        """Files stay as they are."""


def newest(root: Path, world: int | None = None) -> Saved | None:
    """Of all jobs that have saved something here; `world`: with that many ranks. Raises OSError."""
    every = [saved for folder in _listed(root) if (saved := of_job(folder)) is not None]
    found = [saved for saved in every if world in (None, saved.world)]
    return max(found, key=lambda saved: saved.version, default=None)


def of_job(folder: Path) -> Saved | None:
    """None: nothing that is whole."""
    nodes = [(path, contents) for path in _listed(folder, "node-") if (contents := _contents(path)) is not None]
    if not nodes:
        return None
    first = nodes[0][1]
    slots = [(path / slot.file, slot) for path, contents in nodes for slot in contents.slots]
    version = newest_version((slot for _, slot in slots), first.world)
    if version is None:
        return None
    copies: dict[str, tuple[tuple[Path, SavedSlot], ...]] = {}
    for path, slot in slots:
        if slot.stamp.version == version:
            copies[slot.bundle] = (*copies.get(slot.bundle, ()), (path, slot))
    return Saved(folder, first.job, first.world, version, copies)


def newest_version(slots: Iterable[SavedSlot], world: int) -> int | None:
    """The newest that has every bundle which any version has, and of each rank what only it had; None: there is none."""
    versions: dict[int, set[str]] = {}
    for slot in slots:
        versions.setdefault(slot.stamp.version, set()).add(slot.bundle)
    every = set().union(*versions.values()) if versions else set()
    ranks = {int(found[1]) for bundle in every if (found := _PRIVATE.fullmatch(bundle))}
    if ranks < set(range(world)) or not every:
        return None
    return max((version for version, bundles in versions.items() if bundles == every), default=None)


def forget(root: Path, step: int) -> None:
    """Remove what a checkpoint of this step has overtaken."""
    for folder in _listed(root):
        saved = of_job(folder)
        if saved is not None and saved.version <= step:
            shutil.rmtree(folder, ignore_errors=True)


def _contents(folder: Path) -> Contents | None:
    try:
        found = msgspec.json.decode((folder / _CONTENTS).read_bytes(), type=Contents)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if found.format == _FORMAT else None


def _listed(root: Path, prefix: str = PREFIX) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if path.name.startswith(prefix))
    except (FileNotFoundError, NotADirectoryError):
        return []
