"""Ranks that are slow while they train: named, told apart from those that wait for them, and moved where that was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import jobs_under_test
import pytest

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

SCRIPT = Path(__file__).parent / "paced_script.py"
SECONDS = 300.0


def digests(out: str) -> set[tuple[int, int]]:
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {(line["rank"], line["digest"]) for line in lines}


def test_a_slow_rank_is_named_and_moved_and_the_result_is_the_same(tmp_path: Path) -> None:
    args = ("--nodes", 2, "--nproc-per-node", 2, "--spares", 1)
    training = (SCRIPT, "ddp", 120, 40)
    options = ("--replace-stragglers", "--drill", "slow 5 --rank 2 --at-step 15")
    done = jobs_under_test.run(tmp_path / "slow", *args, *options, *training, seconds=SECONDS)
    assert done.code == 0, done.err
    found = [event for event in done.events("straggler") if not event["over"]]
    assert [(event["rank"], event["node"]) for event in found] == [(2, "node1")], done.err
    assert found[0]["compute_s"] > 1.5 * found[0]["median_s"]
    assert [(fault["kind"], fault["ranks"]) for fault in done.events("fault")] == [("straggler", [2, 3])]
    (swap,) = done.events("swap")
    assert swap["rung"] == 1
    assert {(move["rank"], move["from_node"], move["to_node"]) for move in swap["moves"]} == {
        (2, "node1", "node2"), (3, "node1", "node2")
    }  # fmt: skip
    calm = jobs_under_test.run(tmp_path / "calm", *args, *training, seconds=SECONDS)
    assert calm.events("straggler") == []
    assert digests(done.out) == digests(calm.out)


def test_the_slower_stage_of_a_pipeline_is_no_straggler_but_a_slow_rank_of_it_is(tmp_path: Path) -> None:
    args = ("--nodes", 2, "--nproc-per-node", 2, "--drill", "slow 5 --rank 3 --at-step 15")
    done = jobs_under_test.run(tmp_path, *args, SCRIPT, "pipeline", 80, 40, seconds=SECONDS)
    assert done.code == 0, done.err
    assert {event["rank"] for event in done.events("straggler")} == {3}, done.err
