"""Drills that workers and servers do to themselves, one after the other in one job that ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import jobs_under_test
import pytest
from swap_jobs import Swapped, calm

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).parent / "bad_script.py"
STEPS = 320
DRILLS = (
    "kill-server --node 1 --at-step 2",
    "fail-spare --node 0 --at-step 2",
    "slow 3 --rank 2 --at-step 2 --duration 0.2",
    "raise --rank 0 --at-step 5",
    "exit 7 --rank 1 --at-step 60",
    "hang-gil --rank 3 --at-step 120",
    "freeze --node 1 --at-step 280 --duration 6",
)


def test_every_drill_is_found_and_none_leaves_a_trace(tmp_path: Path) -> None:
    options = [word for drill in DRILLS for word in ("--drill", drill)]
    args = ("--nodes", 2, "--nproc-per-node", 2, "--spares", 1, "--local-spares", 1, "--hang-timeout", 5)
    done = jobs_under_test.run(tmp_path, *args, *options, SCRIPT, "Script", STEPS, seconds=180)
    assert done.code == 0, done.err
    found = Swapped(done)
    assert found.digests == calm("Script", STEPS, script=SCRIPT)
    assert {event["kind"] for event in done.events("drill")} == {drill.split()[0] for drill in DRILLS}
    faults = [(fault["kind"], fault["ranks"]) for fault in done.events("fault")]
    assert faults == [("worker", [0]), ("worker", [1]), ("hang", [3]), ("node", [2, 3])], done.err
    assert found.rungs == [1] * 4
    ended = {event["kind"]: event for event in done.events("drill_ended")}
    assert set(ended) == {drill.split()[0] for drill in DRILLS}
    for kind in ("raise", "exit", "hang-gil"):
        assert ended[kind]["lost_steps"] in (0, 1), ended[kind]
        assert ended[kind]["recovery"] < 10 and ended[kind]["redundancy"] < 10, ended[kind]
    assert ended["hang-gil"]["detection"] > 5 > ended["exit"]["detection"]
    assert ended["slow"]["detection"] is None
    assert "DrillError: this is a drill" in done.err
