"""What this process's control groups say: its share of cores and memory, and whether the kernel killed for want of it.

Parsing is pure, over texts; reading looks under both hierarchies (version 1 and 2), here and in the groups above.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import psutil  # type: ignore[import-untyped]

from phoenix_launch.node import memory_cage

EVENTS: Final = "memory.events"
_NO_LIMIT: Final = 1 << 60  # version 1 writes "no limit" as a huge number of whole pages


def parse_groups(text: str) -> dict[str, str]:
    """/proc/PID/cgroup: controller -> path within its hierarchy; the key "" is version 2's."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def parse_mounts(text: str) -> dict[str, tuple[str, str]]:
    """/proc/PID/mountinfo: controller ("" for version 2) -> (mount point, the group that is seen there)."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        where = (fields[4], fields[3])
        if kind[0] == "cgroup2":
            mounts[""] = where
        elif kind[0] == "cgroup":
            for controller in kind[2].split(","):
                mounts.setdefault(controller, where)
    return mounts


def folders(groups: dict[str, str], mounts: dict[str, tuple[str, str]], controller: str) -> list[PurePosixPath]:
    """Where this process's group of a controller and those above it are to be read, innermost first."""
    if controller not in groups or controller not in mounts:
        return []
    point, seen = mounts[controller]
    path = groups[controller]
    inside = path[len(seen.rstrip("/")) :] if path == seen or path.startswith(seen.rstrip("/") + "/") else "/"
    folder = PurePosixPath(point) / inside.strip("/")
    found = [folder]
    while folder != PurePosixPath(point):
        folder = folder.parent
        found.append(folder)
    return found


def parse_cpu_max(text: str) -> float:
    """cpu.max of version 2, in cores; infinite when there is no limit."""
    quota, _, period = text.strip().partition(" ")
    return math.inf if quota in ("max", "") else int(quota) / int(period or 100_000)


def parse_counter(text: str, name: str) -> int | None:
    """`NAME VALUE` in a file of such lines (memory.events, memory.oom_control, memory.stat)."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return None


def parse_limit(text: str) -> float:
    """A memory limit in bytes of either version; infinite when there is none."""
    value = text.strip()
    if not value.isdecimal() or int(value) >= _NO_LIMIT:
        return math.inf
    return int(value)


class ControlGroup:
    """The groups that this process is in, as they were at the start, and those that drills have made."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._groups = parse_groups(_text(proc / "cgroup") or "")
        self._mounts = parse_mounts(_text(proc / "mountinfo") or "")
        self._cages: list[Path] = []
        self._caged_kills = 0  # in those that are gone

    def cores(self) -> int:
        """Cores that this process may use: by affinity and by quota, at least 1."""
        limits = [float(len(os.sched_getaffinity(0)))]
        limits += [parse_cpu_max(text) for text in self._texts("", "cpu.max")]
        for folder in folders(self._groups, self._mounts, "cpu"):
            quota, period = _text(Path(folder) / "cpu.cfs_quota_us"), _text(Path(folder) / "cpu.cfs_period_us")
            if quota and period and int(quota) > 0:
                limits.append(int(quota) / int(period))
        return max(1, int(min(limits)))

    def memory_left(self) -> float:
        """Bytes until the nearest limit of a group is reached, page cache that can be dropped counted as free."""
        left = [math.inf]
        names = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
        for controller, limit_name, used_name in names:
            for folder in folders(self._groups, self._mounts, controller):
                limit, used = _text(Path(folder) / limit_name), _text(Path(folder) / used_name)
                if limit is not None and used is not None:
                    cache = parse_counter(_text(Path(folder) / "memory.stat") or "", "inactive_file") or 0
                    left.append(parse_limit(limit) - int(used) + cache)
        return max(0.0, min(left))

    def oom_kills(self) -> int:
        """How often the kernel has killed a process of this group for want of memory; 0 when nothing says so.

        Version 2 counts those of the groups below, too.
        """
        return self._own_oom_kills() + self._kills_in_cages()

    def cage(self, pid: int) -> None:
        """A drill: what this process allocates from now on is little, or the kernel kills it. Raises CageError."""
        places = {controller: folders(self._groups, self._mounts, controller) for controller in ("", "memory")}
        self._cages.append(memory_cage.make(places, pid))

    def _kills_in_cages(self) -> int:
        """Those whose process has ended are removed."""
        found = 0
        for folder in list(self._cages):
            counted = any(Path(own) in folder.parents and (Path(own) / EVENTS).exists() for own in self._own_groups())
            kills = 0 if counted else parse_counter(_text(memory_cage.kills_file(folder)) or "", "oom_kill") or 0
            if memory_cage.remove(folder):
                self._cages.remove(folder)
                self._caged_kills += kills
            else:
                found += kills
        return found + self._caged_kills

    def _own_groups(self) -> list[PurePosixPath]:
        return folders(self._groups, self._mounts, "")[:1]

    def _own_oom_kills(self) -> int:
        for controller, name in (("", EVENTS), ("memory", "memory.oom_control")):
            for text in self._texts(controller, name):
                count = parse_counter(text, "oom_kill")
                if count is not None:
                    return count
        return 0

    def _texts(self, controller: str, name: str) -> Iterator[str]:
        for folder in folders(self._groups, self._mounts, controller):
            text = _text(Path(folder) / name)
            if text is not None:
                yield text


def memory_free(groups: ControlGroup) -> float:
    """Bytes that a process of these groups could still allocate, on this machine."""
    return min(float(psutil.virtual_memory().available), groups.memory_left())


class OomWatch:
    """Tells a kill by the out-of-memory killer from any other SIGKILL: by the counter having risen, not by guessing."""

    def __init__(self, kills_so_far: int) -> None:
        self._accounted = kills_so_far

    def killed(self, code: int, kills_now: int) -> bool:
        """Whether an exit with this code is one of the kills that were counted; each kill explains one exit."""
        if code != -9 or kills_now <= self._accounted:
            return False
        self._accounted += 1
        return True


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
