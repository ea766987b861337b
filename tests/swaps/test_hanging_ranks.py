"""Ranks that hang in all ways at once in one job: each is named, its stacks are kept, and a spare takes its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from swap_jobs import calm, job

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).parent / "hang_script.py"
STEPS = 20
HANGS = {
    "hang in step,1,4": "in step",
    "hang with the lock,0,10": "hang_script.py",
    "hang stopped,3,13": "it is stopped (as by SIGSTOP)",
}


@pytest.mark.slow  # one hang is found in test_drilled_job.py
def test_who_hangs_is_named_and_replaced(tmp_path: Path) -> None:
    found = job("Hanging", STEPS, tmp_path, "--hang-timeout", 5, faults=list(HANGS), script=SCRIPT)
    assert found.digests == calm("Hanging", STEPS, script=SCRIPT)
    faults = found.done.events("fault")
    assert [(fault["kind"], fault["ranks"]) for fault in faults] == [("hang", [rank]) for rank in (1, 0, 3)]
    for fault, place in zip(faults, HANGS.values(), strict=True):
        others = [rank for rank in range(4) if rank not in fault["ranks"]]
        assert fault["detail"].startswith("hangs for ") and " s: ranks " in fault["detail"], fault
        assert place in fault["detail"], fault
        assert len(others) == 3
    assert found.rungs == [1] * len(HANGS)
    for rank in range(4):
        assert list((found.done.job / "stacks").glob(f"rank{rank}-*.txt")), rank


@pytest.mark.slow
def test_one_that_hangs_between_two_steps_and_one_in_a_collective_of_its_own_are_found_too(tmp_path: Path) -> None:
    faults = ["hang between,2,4", "hang in a collective,1,8"]
    found = job("Hanging", STEPS, tmp_path, "--hang-timeout", 3, faults=faults, script=SCRIPT)
    assert found.digests == calm("Hanging", STEPS, script=SCRIPT)
    assert [fault["ranks"] for fault in found.done.events("fault")] == [[2], [1]]
