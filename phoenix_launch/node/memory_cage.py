"""A memory control group for one process, in which the kernel's out-of-memory killer ends it and nobody else: for a drill."""

from __future__ import annotations

import contextlib
from pathlib import Path, PurePosixPath
from typing import Final

CAGE_BYTES: Final = 256 << 20  # what the process may still allocate; what it has already is charged where it was
# controller -> limit, limit with swap, counter of kills
_FILES: Final = {
    "": ("memory.max", "memory.swap.max", "memory.events"),
    "memory": ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control"),
}


class CageError(Exception):
    """No such group can be made here."""


def make(places: dict[str, list[PurePosixPath]], pid: int, limit: int = CAGE_BYTES) -> Path:
    """A group with this process in it. `places`: by controller ("" for version 2), our own groups, innermost first.

    Returns its folder, which is empty of processes when that has ended. Raises CageError.
    """
    why = "no memory control group is mounted"
    for controller, (most, with_swap, _) in _FILES.items():
        for place in places.get(controller, []):
            parent = Path(place)
            if controller == "" and "memory" not in _words(parent / "cgroup.subtree_control"):
                why = f"the groups below {parent} have no memory controller"
                continue
            folder = parent / f"phoenix-drill-{pid}"
            try:
                folder.mkdir()
            except OSError as error:
                why = f"{folder}: {error.strerror}"
                continue
            try:
                (folder / most).write_text(str(limit))
                with contextlib.suppress(OSError):  # there may be no swap to be counted
                    (folder / with_swap).write_text("0" if controller == "" else str(limit))
                (folder / "cgroup.procs").write_text(str(pid))
            except OSError as error:
                why = f"{folder}: {error.strerror}"
                remove(folder)
                continue
            return folder
    raise CageError(why)


def kills_file(folder: Path) -> Path:
    """Where it is counted how many processes of it the kernel has killed."""
    for _, _, name in _FILES.values():
        if (folder / name).exists():
            return folder / name
    return folder / _FILES[""][2]


def remove(folder: Path) -> bool:
    """Whether it is gone: one with processes in it stays."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
