"""Bits that change in a rank's memory while it trains: who has others than most is replaced before they count."""

from __future__ import annotations

from pathlib import Path

import pytest
from swap_jobs import calm, job

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

STEPS = 40


@pytest.mark.parametrize("rank", [0, 3])
def test_the_odd_one_is_replaced_and_the_result_is_that_of_a_calm_run(rank: int, tmp_path: Path) -> None:
    found = job("ddp", STEPS, tmp_path, "--verify-replicas", 1, "--drill", f"flip-bits --rank {rank} --at-step 10")
    (event,) = found.done.events("corruption")
    assert event["ranks"] == [rank] and event["holders"] == [0, 1, 2, 3]
    assert [(fault["kind"], fault["ranks"]) for fault in found.done.events("fault")] == [("corruption", [rank])]
    (swap,) = found.swaps
    assert (swap["rung"], swap["resumed_step"], swap["lost_steps"]) == (1, event["step"], 0)
    assert found.digests == calm("ddp", STEPS)
    (ended,) = found.done.events("drill_ended")
    assert ended["detection"] < 10 and ended["recovery"] is not None


def test_what_was_compared_is_what_all_go_back_to_whatever_the_interval_of_copies_is(tmp_path: Path) -> None:
    options = ("--verify-replicas", 7, "--snapshot-interval", 5, "--drill", "flip-bits --rank 2 --at-step 10")
    found = job("ddp", STEPS, tmp_path, *options)
    (event,) = found.done.events("corruption")  # the comparisons that follow find nothing: the replicas are equal again
    assert (event["ranks"], (event["step"] - 1) % 7) == ([2], 0)
    assert found.swaps[0]["resumed_step"] == event["step"], "the version that was compared was copied"


def test_of_two_holders_none_is_blamed_and_the_job_goes_on(tmp_path: Path) -> None:
    options = ("--nodes", 1, "--spares", 0, "--verify-replicas", 1, "--drill", "flip-bits --rank 1 --at-step 10")
    found = job("ddp", STEPS, tmp_path, *options)
    (event,) = found.done.events("corruption")
    assert (event["ranks"], event["holders"]) == ([], [0, 1])
    assert found.swaps == []
    assert "whose cannot be said, and nobody is replaced" in found.done.err
