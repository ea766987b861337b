"""Evidence of a kill for want of memory, from files of both versions of control groups; and a real one where one can be had."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from phoenix_launch.node import memory_cage
from phoenix_launch.node.cgroup import ControlGroup, OomWatch
from phoenix_launch.node.memory_cage import CageError

SECONDS = 30
# It is let go by a line on its stdin, then allocates up to 512 MiB.
GREEDY = "import os, sys; sys.stdin.readline(); held = [os.urandom(1 << 20) for _ in range(512)]; print(len(held))"


def grouped(folder: Path, version: int) -> ControlGroup:
    """As /proc and the hierarchy of that version would have it, in files."""
    proc, mount = folder / "proc", folder / "memory"
    (mount / "job").mkdir(parents=True)
    proc.mkdir()
    (proc / "cgroup").write_text("0::/job\n" if version == 2 else "4:memory:/job\n")
    kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
    (proc / "mountinfo").write_text(f"30 20 0:26 / {mount} rw,nosuid - {kind}\n")
    return ControlGroup(proc)


@pytest.mark.parametrize(
    ("version", "name", "before", "after"),
    [
        (2, "memory.events", "low 0\nhigh 0\nmax 9\noom 0\noom_kill 0\n", "low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\n"),
        (1, "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
         "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
    ],
)  # fmt: skip
def test_a_kill_is_told_from_a_signal_by_the_counter_of_either_version(
    tmp_path: Path, version: int, name: str, before: str, after: str
) -> None:
    groups = grouped(tmp_path, version)
    counter = tmp_path / "memory" / "job" / name
    counter.write_text(before)
    watch = OomWatch(groups.oom_kills())
    assert not watch.killed(-9, groups.oom_kills())
    counter.write_text(after)
    assert watch.killed(-9, groups.oom_kills())
    assert not watch.killed(-9, groups.oom_kills()), "a kill explains one exit"


def test_without_a_hierarchy_there_is_no_cage_and_why_is_said(tmp_path: Path) -> None:
    with pytest.raises(CageError, match="no memory control group is mounted"):
        memory_cage.make({}, os.getpid())
    with pytest.raises(CageError, match="have no memory controller"):
        memory_cage.make({"": [PurePosixPath(tmp_path)]}, os.getpid())


def test_a_real_kill_is_bounded_to_one_process_counted_and_leaves_no_group(eventually: Callable[..., object]) -> None:
    groups = ControlGroup()
    watch = OomWatch(groups.oom_kills())
    with subprocess.Popen([sys.executable, "-c", GREEDY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            groups.cage(process.pid)
        except CageError as error:
            process.kill()
            pytest.skip(f"no memory control group can be made here: {error}")
        (folder,) = groups._cages
        out, _ = process.communicate(b"\n", SECONDS)
    assert process.returncode == -9, f"it has allocated {out!r} MiB"
    assert watch.killed(process.returncode, groups.oom_kills())
    eventually(lambda: groups.oom_kills() >= 0 and not folder.exists(), 5, "its group is gone")
    assert not watch.killed(-9, groups.oom_kills())
