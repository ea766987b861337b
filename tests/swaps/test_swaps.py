"""A process or a node dies, wherever the others are: the job ends as if nothing had happened, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from swap_jobs import calm, job

pytestmark = pytest.mark.timeout(600)  # two jobs a test, with many swaps

IN_PLACE, FROM_SLOTS = 1, 2
STEPS = 26


def test_a_rank_of_a_ddp_job_may_die_anywhere_in_a_step(tmp_path: Path) -> None:
    faults = ["between,0,3", "entry,1,6", "collective 1,2,9", "collective 2,3,12", "before-optimizer,0,15",
              "optimizer,1,18", "finished,2,22"]  # fmt: skip
    found = job("ddp", STEPS, tmp_path, faults=faults)
    assert found.digests == calm("ddp", STEPS)
    assert found.rungs == [IN_PLACE] * len(faults)
    assert all(swap["lost_steps"] <= 1 for swap in found.swaps)
    assert found.rings == set()


def test_a_rank_of_an_fsdp_job_may_die_anywhere_in_a_step(tmp_path: Path) -> None:
    faults = ["between,3,3", "entry,2,6", "collective 1,1,9", "collective 7,0,12", "before-optimizer,3,15",
              "optimizer,2,18", "finished,1,22"]  # fmt: skip
    found = job("fsdp", STEPS, tmp_path, faults=faults)
    assert found.digests == calm("fsdp", STEPS)
    assert found.rungs == [IN_PLACE] * len(faults)
    assert found.rings == set()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tp", "1f1b"])
def test_ranks_of_other_kinds_may_die_in_a_step(kind: str, tmp_path: Path) -> None:
    faults = ["collective 1,1,3", "collective 3,2,6", "before-optimizer,3,9"]
    found = job(kind, 14, tmp_path, faults=faults)
    assert found.digests == calm(kind, 14)
    assert found.rungs == [IN_PLACE] * len(faults)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["ddp bucket view", "ddp with buffers and unused", "ddp accumulating", "fsdp unresharded", "fsdp mixed", "hsdp",
     "tp fsdp", "zero", "gpipe"],
)  # fmt: skip
def test_ranks_of_all_other_kinds_may_die_in_a_step(kind: str, tmp_path: Path) -> None:
    faults = ["entry,0,3", "collective 1,1,6", "collective 2,2,9", "before-optimizer,3,12", "optimizer,1,15"]
    found = job(kind, 20, tmp_path, faults=faults)
    assert found.digests == calm(kind, 20)
    assert found.rungs == [IN_PLACE] * len(faults)
