"""Scripts that break a rule, or that only look strange: each has an end that was meant, and says why in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jobs_under_test
import pytest
from jobs_under_test import Done
from swap_jobs import Swapped, calm, job

from phoenix_launch.errors import EXIT_WORKER_FAILED

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).parent / "bad_script.py"
STEPS = 8
IN_PLACE, FROM_SLOTS = 1, 2


def ended(case: str, folder: Path, env: Mapping[str, str] | None = None) -> Done:
    """A small job to its end, whatever that is."""
    return jobs_under_test.run(folder, "--nproc-per-node", 2, SCRIPT, case, STEPS, env=env, seconds=180)


def repaired(case: str, folder: Path, *options: object, faults: list[str]) -> Swapped:
    """A job that has met all of these faults, and has the bits of a calm one."""
    found = job(case, STEPS, folder, *options, faults=faults, script=SCRIPT)
    assert found.digests == calm("Script", STEPS, script=SCRIPT)
    return found


# --- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_refused_is_named_and_the_job_can_go_on(tmp_path: Path) -> None:
    done = ended("Refused", tmp_path)
    assert done.code == 0, done.err
    for words in (
        "phoenix cannot swap mpi communicators",
        "init_process_group was called, but there is a default group already",
        "run_step was called inside run_step",
        "step 5 ended without an optimizer step and left a gradient in model.module.0.weight",
        "init_process_group was called again after destroy_process_group",
    ):
        assert done.out.count(words) == 2, (words, done.out)


@pytest.mark.slow
def test_a_script_that_starts_torch_by_itself_is_told_that_it_is_not_repaired(tmp_path: Path) -> None:
    done = ended("TorchsOwnStart", tmp_path)
    assert done.code == 0, done.err
    assert done.err.count("phoenix_runtime.init_process_group was not called: a failure starts all workers again") == 1


# --- what makes a repair in place impossible -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_group_that_is_made_in_the_middle_is_said_and_a_failure_starts_all_again(tmp_path: Path) -> None:
    found = repaired("LateGroup", tmp_path, faults=["between,0,5"])
    assert found.rungs == [FROM_SLOTS]
    assert "was made after the first step: from now on a failure starts all processes again" in found.done.err


@pytest.mark.slow
def test_a_group_of_another_backend_is_said_and_a_failure_starts_all_again(tmp_path: Path) -> None:
    found = repaired("ForeignGroup", tmp_path, faults=["between,0,5"])
    assert found.rungs == [FROM_SLOTS]
    assert "a process group has the backend gloo: a failure starts all processes again" in found.done.err


def test_who_communicates_outside_of_a_step_when_another_dies_starts_again_with_all(tmp_path: Path) -> None:
    (tmp_path / "faults").mkdir()
    done = ended("Outside", tmp_path, env={"PHOENIX_FAULTS": f"{tmp_path}/faults:outside,1,4"})
    assert done.code == 0, done.err
    assert [swap["rung"] for swap in done.events("swap")] == [FROM_SLOTS]
    assert "cannot be repaired in place: it was in a collective outside of run_step and run_section" in done.err
    assert len(done.out.splitlines()) == 2


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_bug_of_one_rank_ends_the_job_when_it_comes_again_and_its_traceback_comes_last(tmp_path: Path) -> None:
    done = ended("OwnError", tmp_path)
    assert done.code == EXIT_WORKER_FAILED
    assert "rank 1 on node0 exited with code 1, for the second time in step 4" in done.err
    assert done.err.rstrip().endswith("ZeroDivisionError: my own bug")
    assert [fault["ranks"] for fault in done.events("fault")] == [[1], [1]]


@pytest.mark.slow
def test_a_bug_of_all_ranks_ends_the_job(tmp_path: Path) -> None:
    done = ended("ErrorOnAll", tmp_path)
    assert done.code == EXIT_WORKER_FAILED
    assert done.err.rstrip().endswith("ZeroDivisionError: everybody's bug")


@pytest.mark.slow
def test_errors_that_follow_from_an_aborted_step_are_none_of_the_job(tmp_path: Path) -> None:
    """A rank that cannot say anything for two seconds in it is waited for."""
    found = repaired("Rough", tmp_path, faults=["summed,1,2", "between,1,5", "holds,2,4", "summed,0,6"])
    assert found.rungs == [IN_PLACE] * 3
    assert "Traceback" not in found.done.err
    assert [swap["lost_ranks"] for swap in found.swaps] == [[1], [1], [0]]


def test_a_replacement_starts_while_others_still_leave_their_step(tmp_path: Path) -> None:
    (tmp_path / "faults").mkdir()
    done = ended("SlowToLeave", tmp_path, env={"PHOENIX_FAULTS": f"{tmp_path}/faults:between,1,3"})
    assert done.code == 0, done.err
    (swap,) = done.events("swap")
    assert swap["rung"] == IN_PLACE
    assert swap["total"] < 20, "it waited for who waited for it"


# --- exits -----------------------------------------------------------------------------------------------------------


def test_a_rank_that_leaves_without_a_word_is_replaced_and_the_second_time_ends_the_job(tmp_path: Path) -> None:
    done = ended("HardExit", tmp_path)
    assert done.code == EXIT_WORKER_FAILED
    assert "rank 1 on node0 ended in the middle of the job with exit code 0, for the second time in step 4" in done.err
    assert done.out == ""


def test_a_rank_that_exits_in_the_middle_ends_the_job_with_both_steps(tmp_path: Path) -> None:
    done = ended("EarlyExit", tmp_path)
    assert done.code == EXIT_WORKER_FAILED
    assert "rank 1 ended after step 3, while rank 0 is in step 4\n  hint: all ranks have to run the same" in done.err
    assert done.out == ""


# --- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_that_exit_hard_at_their_very_end_have_ended_well(tmp_path: Path) -> None:
    done = ended("HardExitAtTheEnd", tmp_path)
    assert done.code == 0, done.err
    assert done.events("fault") == []


@pytest.mark.slow
def test_a_long_evaluation_of_one_rank_after_the_last_step_is_waited_for(tmp_path: Path) -> None:
    done = ended("LateEvaluation", tmp_path)
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 2


@pytest.mark.slow
def test_a_rank_that_cannot_leave_its_collectives_in_time_is_replaced(tmp_path: Path) -> None:
    found = repaired("RoughAndLong", tmp_path, faults=["between,1,5", "holds,2,4"])
    assert "rank 2 on node1 is still in a collective 5 s after the notice" in found.done.err
    assert [sorted(swap["lost_ranks"]) for swap in found.swaps] == [[1, 2]]


@pytest.mark.slow
def test_a_script_that_catches_everything_is_repaired_all_the_same(tmp_path: Path) -> None:
    found = repaired("CatchesEverything", tmp_path, faults=["between,1,3", "entry,0,5", "before-optimizer,2,6"])
    assert found.rungs == [IN_PLACE] * 3
