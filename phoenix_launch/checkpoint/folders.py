"""Checkpoints on disk as folders: their names, which are whole, and the one way in which one becomes visible.

`step-00000120` is one that may be loaded. What is being written is hidden, and its name carries the job and the generation:
`.step-00000120.JOB.t1g3.pending`. It gets its visible name by a rename, so that a half-written one is never found.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from phoenix_launch.copies import Stamp
from phoenix_launch.wire import Generation

MANIFEST: Final = "phoenix.json"
METADATA: Final = ".metadata"  # torch.distributed.checkpoint's own, written last of its files
PRIVATE: Final = "private"
_FORMAT: Final = 1
_VISIBLE: Final = re.compile(r"step-(\d{8,})")
_PENDING: Final = re.compile(r"\.step-(\d{8,})\.(.+)\.t(\d+)g(\d+)\.pending")
_GOING: Final = ".going"  # after the name of one that is being removed


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself. `owners`: which ranks are meant by the words that follow a name; `words`: what has to
    be known of a tensor beyond its type and shape."""

    format: int = _FORMAT
    job: str
    generation: Generation
    step: int
    world: int
    owners: dict[str, tuple[int, ...]] = {}
    words: dict[str, str] = {}


def visible_name(step: int) -> str:
    return f"step-{step:08d}"


def pending_name(job: str, stamp: Stamp) -> str:
    """`stamp`: the generation that writes it, and the step."""
    return f".{visible_name(stamp.version)}.{job}.t{stamp.generation.term}g{stamp.generation.n}.pending"


def private_path(folder: Path, rank: int) -> Path:
    """Where a rank's private bundle lies in a checkpoint."""
    return folder / PRIVATE / f"rank-{rank:05d}"


def read_manifest(folder: Path) -> Manifest | None:
    """None unless the folder holds a whole checkpoint that this version can read."""
    try:
        found = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if found.format == _FORMAT and (folder / METADATA).exists() else None


def newest(root: Path, job: str = "") -> Path | None:
    """The whole one with the highest step; with `job`, of that job alone. Raises OSError when the folder cannot be read."""
    for _, folder in sorted(_visible(root), reverse=True):
        manifest = read_manifest(folder)
        if manifest is not None and job in ("", manifest.job):
            return folder
    return None


def publish(root: Path, job: str, stamp: Stamp, keep: int) -> Path:
    """Make a written checkpoint visible for good, and remove the oldest before it beyond `keep`. Raises OSError.

    One of the same step is there already when a later generation ran that step again: its bits are the same.
    """
    pending, folder = root / pending_name(job, stamp), root / visible_name(stamp.version)
    if read_manifest(folder) is not None:
        _remove(pending)
    else:
        if read_manifest(pending) is None:
            raise FileNotFoundError(f"{pending} is no whole checkpoint")
        _remove(folder)
        os.rename(pending, folder)
    sync_folder(root)
    older = sorted(step for step, _ in _visible(root) if step <= stamp.version)
    for step in older[:-keep]:
        _remove(root / visible_name(step))
    sweep(root, job, stamp)
    return folder


def sweep(root: Path, job: str, stamp: Stamp) -> None:
    """Remove what was begun before `stamp` and will never be published: of jobs and generations that are over, or older."""
    for path in _listed(root):
        found = _PENDING.fullmatch(path.name)
        if found is not None:
            begun = Stamp(Generation(int(found[3]), int(found[4])), int(found[1]))
            if found[2] != job or begun < stamp:
                _remove(path)
        elif path.name.endswith(_GOING):
            shutil.rmtree(path, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """What was created, renamed or removed in it outlives a power loss. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Hidden first: what is half removed must not be found."""
    going = folder.with_name(f".{folder.name.removeprefix('.')}{_GOING}")
    with contextlib.suppress(OSError):
        os.rename(folder, going)
    shutil.rmtree(going, ignore_errors=True)


def _visible(root: Path) -> Iterator[tuple[int, Path]]:
    for path in _listed(root):
        found = _VISIBLE.fullmatch(path.name)
        if found is not None:
            yield int(found[1]), path


def _listed(root: Path) -> list[Path]:
    try:
        return sorted(root.iterdir())
    except FileNotFoundError:
        return []
