"""A process or a node dies at any moment: the job ends with the bits of a calm one, or with the words that belong to it."""

from __future__ import annotations

from pathlib import Path

import jobs_under_test
import pytest
from swap_jobs import Swapped, calm, job

from phoenix_launch.errors import EXIT_DO_NOT_REQUEUE, EXIT_WORKER_FAILED

pytestmark = pytest.mark.timeout(600)  # jobs with many swaps, and their calm counterpart

SCRIPT = Path(__file__).parent / "faulty_script.py"
STEPS = 26
IN_PLACE, FROM_SLOTS, FROM_SCRIPT = 1, 2, 3


def repaired(folder: Path, *options: object, faults: list[str], kind: str = "ddp") -> Swapped:
    """A job that has met all of these faults, and has the bits of one that met none."""
    found = job(kind, STEPS, folder, *options, faults=faults, script=SCRIPT)
    assert found.digests == calm("ddp", STEPS, script=SCRIPT)
    return found


def test_a_rank_may_die_while_it_starts_in_each_phase_of_its_step_and_of_the_copying(tmp_path: Path) -> None:
    """While one copies the others may get a step ahead, and have two of them to run again."""
    at_start = ["built,1,-1"]
    in_step = ["collective 1,2,2", "optimizer 1,0,4", "between optimizers,2,6", "optimizer 2,3,8", "replicated,0,10"]
    copying = ["voting,0,12", "agreed,1,15", "copying,2,18", "sealed,3,21"]
    found = repaired(tmp_path, faults=[*at_start, *in_step, *copying])
    assert found.rungs == [FROM_SCRIPT] + [IN_PLACE] * (len(in_step) + len(copying))
    assert all(swap["rung"] < FROM_SCRIPT and swap["lost_steps"] <= 1 for swap in found.swaps[1:])


def test_a_survivor_or_the_replacement_may_die_in_each_phase_of_a_swap(tmp_path: Path) -> None:
    faults = ["between,3,2", "alone,3,-1", "between,0,5", "coming in,0,3/4", "between,1,9", "joined,2,8/9", "between,0,12",
              "restored,3,11/12", "between,1,15", "connected,0,14/15"]  # fmt: skip
    found = repaired(tmp_path, faults=faults)
    assert len(found.swaps) >= 5
    assert all(swap["rung"] < FROM_SCRIPT and swap["lost_steps"] <= 1 for swap in found.swaps)


@pytest.mark.slow
def test_ranks_may_die_together_one_right_after_the_other_and_at_the_very_end(tmp_path: Path) -> None:
    """Two of two nodes, both of a node, 0.1 s apart, in three steps one after the other; in the last step, after the loop, and
    while one waits for the others."""
    together = ["between,1,3", "between,2,3", "between,0,6", "between,1,6", "between,1,9", "soon,2,9"]
    one_by_one = ["between,1,12", "between,2,13", "between,3,14"]
    end = [f"collective 1,3,{STEPS - 1}", f"finished,1,{STEPS}", f"after,0,{STEPS}", f"leave,2,{STEPS}"]
    found = repaired(tmp_path, faults=[*together, *one_by_one, *end])
    assert all(swap["rung"] < FROM_SCRIPT and swap["lost_steps"] <= 1 for swap in found.swaps)


@pytest.mark.slow
def test_what_serves_a_node_may_die_and_ranks_after_it(tmp_path: Path) -> None:
    """Its checkpoint server with all that it kept, a process that waits, the fork server, the agent."""
    faults = ["checkpoint server,0,2", "between,1,4", "spare,0,6", "between,0,8", "fork server,2,10", "between,3,12",
              "agent,1,14", "between,2,18"]  # fmt: skip
    found = repaired(tmp_path, "--local-spares", 1, faults=faults)
    assert found.rungs == [IN_PLACE] * 5


@pytest.mark.slow
def test_one_node_after_the_other_may_be_lost_and_the_new_holder_before_its_first_copy(tmp_path: Path) -> None:
    """First the one that hosts the store, then its partner; then the rank that took the place dies, with nothing sealed."""
    found = repaired(tmp_path, "--spares", 2, faults=["node,0,3", "node,2,9", "connected,3,7/8"])
    assert all(swap["rung"] < FROM_SCRIPT and swap["lost_steps"] <= 1 for swap in found.swaps)


@pytest.mark.slow
def test_a_node_that_slept_over_a_swap_does_no_harm_when_it_wakes(tmp_path: Path) -> None:
    found = repaired(tmp_path, faults=["node sleeps,2,3", "node wakes,0,12"])
    assert found.rungs == [IN_PLACE]


def test_without_a_spare_node_survivors_wait_and_the_end_says_how_things_stand(tmp_path: Path) -> None:
    happened = tmp_path / "faults"
    happened.mkdir()
    args = ("--nodes", 2, "--nproc-per-node", 2, "--spare-timeout", 0.1, SCRIPT, "ddp", STEPS)
    done = jobs_under_test.run(tmp_path / "home", *args, env={"PHOENIX_FAULTS": f"{happened}:node,2,3"})
    assert done.code == EXIT_DO_NOT_REQUEUE, done.err
    assert "no spare node for node1: waiting up to 0.1 s" in done.err
    assert (
        "node1 lost and no spare node came within 0.1 s; ranks 0-1 waited with the training state in memory" in done.err
    )
    assert done.out == ""


# --- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_node_that_comes_back_in_time_takes_its_ranks_again(tmp_path: Path) -> None:
    found = repaired(tmp_path, "--spares", 0, faults=["node,2,3"])
    assert found.rungs == [IN_PLACE]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "rung"),
    [
        (["entry,3,0"], FROM_SCRIPT),
        (["collective 4,0,0"], None),  # three of them prepare the first step,
        (["copying,1,0"], None),
        (["before-optimizer,0,0"], None),
        (["optimizer 1,0,0"], None),
        (["between optimizers,2,0"], None),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_rank_may_die_at_any_place_of_the_first_step(faults: list[str], rung: int | None, tmp_path: Path) -> None:
    (found,) = repaired(tmp_path, faults=faults).rungs
    assert rung in (None, found)


@pytest.mark.slow
def test_a_spare_node_may_die_while_it_waits_and_then_a_node(tmp_path: Path) -> None:
    found = repaired(tmp_path, faults=["spare elsewhere,0,2", "spare node,0,4", "node,2,9"])
    assert found.rungs == [IN_PLACE]


@pytest.mark.slow
def test_a_node_and_its_partner_lost_together_leave_the_scripts_own_checkpoint(tmp_path: Path) -> None:
    found = repaired(tmp_path, "--spares", 2, faults=["both nodes,0,3"])
    assert found.rungs == [FROM_SCRIPT]


@pytest.mark.slow
def test_a_rank_may_die_in_a_section(tmp_path: Path) -> None:
    found = repaired(tmp_path, faults=["in section,1,4", "between,0,7", "in section,2,10"], kind="sections")
    assert found.rungs == [FROM_SLOTS, IN_PLACE, FROM_SLOTS]


@pytest.mark.slow
def test_a_rank_that_is_killed_twice_in_the_same_step_ends_the_job(tmp_path: Path) -> None:
    happened = tmp_path / "faults"
    happened.mkdir()
    args = ("--nodes", 2, "--nproc-per-node", 2, SCRIPT, "ddp", STEPS)
    faults = {"PHOENIX_FAULTS": f"{happened}:between,0,3;copying,0,3"}
    done = jobs_under_test.run(tmp_path / "home", *args, env=faults)
    assert done.code == EXIT_WORKER_FAILED, done.err
    assert "rank 0 on node0 was killed by SIGKILL, for the second time in step 4" in done.err
