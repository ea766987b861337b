"""A node of a whole job is drained: its ranks move, no step is run twice, and the job ends as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jobs_under_test
import pytest
from jobs_under_test import Done

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).parent / "gated_script.py"
STEPS, GATE = 30, 12
Eventually = Callable[..., object]


def digests(done: Done) -> dict[int, str]:
    lines = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    return {line["rank"]: line["digest"] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp", "zero"])
def test_a_node_is_drained_and_no_step_that_was_done_is_run_again(
    kind: str, tmp_path: Path, eventually: Eventually
) -> None:
    folder, home = tmp_path / "gates", tmp_path / "home"
    folder.mkdir()
    options = ("--nodes", 2, "--spares", 1)
    with jobs_under_test.started(home, (*options, SCRIPT, kind, STEPS, folder, GATE)) as running:
        eventually(lambda: len(list(folder.glob(f"at-{GATE}-*"))) == 2, 60, "both ranks are at the gate")
        with jobs_under_test.started(home, ("drain", "node1")) as drain:
            assert drain.process.stdout is not None
            assert drain.process.stdout.readline() == "node1 is being drained: its rank 1 moves to another node\n"
            assert not running.events("fault"), "between two steps nobody is ended"
            (folder / f"open-{GATE}").touch()
            drained = drain.wait(60)
        done = running.wait(60)
    assert drained.code == 0 and drained.out.splitlines()[-1] == "node1 is drained", drained.err
    assert done.code == 0, done.err
    (swap,) = done.events("swap")
    assert (swap["rung"], swap["lost_ranks"], swap["lost_steps"], swap["resumed_step"]) == (1, [1], 0, GATE + 1)
    assert [event["node"] for event in done.events("node_drained")] == ["node1"]
    assert [(fault["kind"], fault["ranks"]) for fault in done.events("fault")] == [("drain", [1])]
    (folder / f"open-{GATE}").touch()
    calm = jobs_under_test.run(tmp_path / "calm", "--nodes", 2, SCRIPT, kind, STEPS, folder)
    assert digests(done) == digests(calm)
