"""Drills that wear a node down within bounds: memory, disk, and the ways between it and others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from swap_jobs import calm, job

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

STEPS = 400
DRILLS = (
    "delay-bus 0.2 --node 1 --at-step 5 --duration 2",
    "drop-bus --rank 0 --at-step 30 --duration 1",
    "fill-disk --node 0 --at-step 60 --duration 3",
    "partition --node 1 --at-step 160 --duration 6",
)


def drilled(*drills: str) -> list[str]:
    return [word for drill in drills for word in ("--drill", drill)]


def test_what_is_slow_full_or_cut_off_leaves_no_trace(tmp_path: Path) -> None:
    options = ("--checkpoint-dir", tmp_path / "ck", "--checkpoint-interval", 5, *drilled(*DRILLS))
    found = job("ddp", STEPS, tmp_path, *options)
    assert found.digests == calm("ddp", STEPS)
    assert [(fault["kind"], fault["node"]) for fault in found.done.events("fault")] == [("node", "node1")], (
        found.done.err
    )
    ended = {event["kind"]: event for event in found.done.events("drill_ended")}
    assert set(ended) == {drill.split()[0] for drill in DRILLS}
    assert [ended[kind]["detection"] for kind in ("delay-bus", "drop-bus", "fill-disk")] == [None] * 3
    assert ended["partition"]["recovery"] is not None
    assert "No space left on device (a drill)" in found.done.err
    assert "checkpoints can be written again" in found.done.err
    assert sorted((tmp_path / "ck").glob("step-*"))


def test_a_worker_that_the_kernel_kills_for_want_of_memory_is_replaced_and_told_so(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("memory control groups need root")
    found = job("ddp", 60, tmp_path, *drilled("oom --rank 3 --at-step 5"))
    if "none can be made here" in found.done.err:
        pytest.skip("no memory control group can be made here")
    (fault,) = found.done.events("fault")
    assert (fault["ranks"], fault["detail"]) == ([3], "was killed by SIGKILL by the kernel, for want of memory")
    assert found.rungs == [1]
    assert found.digests == calm("ddp", 60)
    assert not list(Path("/sys/fs/cgroup").rglob("phoenix-drill-*"))


def test_what_cannot_be_done_is_refused_in_one_line(tmp_path: Path) -> None:
    found = job("ddp", 20, tmp_path, *drilled("fill-disk --node 0 --at-step 5"))
    assert "phoenix-run: drill: fill-disk: this job writes no checkpoints to disk" in found.done.err
    assert found.done.events("drill") == []
