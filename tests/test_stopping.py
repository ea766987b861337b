"""A job that is stopped: with a folder for checkpoints, all ranks first come to one version that is complete."""

from __future__ import annotations

import signal
from dataclasses import replace

from test_membership import PAIR
from test_membership_swaps import Swaps

from phoenix_launch.copies import Stamp
from phoenix_launch.job import events as job_events
from phoenix_launch.job.state import Phase
from phoenix_launch.messages import PlanPhase

SAVING = replace(PAIR, save_timeout=60.0, shutdown_timeout=30.0)


def asked(rules: object = SAVING) -> Swaps:
    job = Swaps(SAVING if rules is SAVING else PAIR, spares=1)
    job.tell(job_events.StopAsked(signal.SIGTERM))
    return job


def halted(job: Swaps, index: int, version: int = 7) -> None:
    job.say(index, *(job.rank(rank, halted=Stamp(job.state.generation, version)) for rank in job.here(index)))


def test_workers_hear_of_the_signal_when_what_they_have_done_is_copied_everywhere() -> None:
    job = asked()
    assert job.phase() is Phase.RUNNING
    assert job.plan(0).halt and job.plan(0).phase is PlanPhase.RUN
    job.pass_time(2.0, alive=(0, 1, 2))
    halted(job, 0)
    assert job.phase() is Phase.RUNNING
    halted(job, 1)
    assert (job.phase(), job.wish(0).phase, job.wish(0).signal) == (Phase.STOPPING, PlanPhase.STOP, signal.SIGTERM)
    assert job.wish(0).grace == 28.0, "all together it takes no longer"
    assert job.state.outcome is not None and job.state.outcome.exit_code == 143


def test_they_hear_of_it_at_once_when_nothing_would_be_saved() -> None:
    assert asked(PAIR).phase() is Phase.STOPPING


def test_they_hear_of_it_at_half_of_their_time_at_the_latest() -> None:
    job = asked()
    job.pass_time(14.0, alive=(0, 1, 2))
    assert job.phase() is Phase.RUNNING
    job.pass_time(1.5, alive=(0, 1, 2))
    assert job.phase() is Phase.STOPPING
    assert job.wish(0).grace <= 15.0


def test_a_second_request_waits_for_no_copy() -> None:
    job = asked()
    job.tell(job_events.StopAsked(signal.SIGTERM))
    assert (job.phase(), job.wish(0).grace) == (Phase.STOPPING, 3.0)


def test_a_failure_meanwhile_is_not_repaired_any_more() -> None:
    for lose in (lambda job: job.train(1, rank1=-9), lambda job: job.lose(1)):
        job = asked()
        lose(job)
        assert job.phase() is Phase.STOPPING
        assert job.state.outcome is not None and job.state.outcome.exit_code == 143


def test_scripts_that_come_to_their_end_are_not_waited_for() -> None:
    job = asked()
    job.say(0, *(job.rank(rank, leaving=True, finished=6) for rank in job.here(0)))
    assert job.phase() is Phase.STOPPING


def test_a_job_in_a_swap_is_stopped_at_once() -> None:
    job = Swaps(SAVING, spares=1)
    job.train(1, rank1=-9)
    job.tell(job_events.StopAsked(signal.SIGTERM))
    assert job.phase() is Phase.STOPPING
