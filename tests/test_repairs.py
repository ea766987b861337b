"""What is told about a repair follows from the actions of the state machine and the reports that came before."""

from __future__ import annotations

from typing import Any

import pytest
from test_membership_swaps import Swaps

from phoenix_launch.copies import Stamp
from phoenix_launch.job import events as job_events
from phoenix_launch.job.events import Event
from phoenix_launch.status import Move, SwapStatus
from phoenix_launch.supervision.repairs import Repairs
from phoenix_launch.wire import Generation

G1, G2 = Generation(1, 1), Generation(1, 2)


class Told(Swaps):
    """Each event is told on, as the supervisor does."""

    def __init__(self, **more: Any) -> None:
        self.repairs = Repairs()
        self.lines: list[str] = []
        super().__init__(**more)

    def tell(self, event: Event) -> tuple[job_events.Action, ...]:
        if isinstance(event, job_events.Reported):
            self.repairs.observe(event.report)
        actions = super().tell(event)
        for action in actions:
            match action:
                case job_events.FaultFound():
                    self.repairs.fault(action, self.now)
                case job_events.StartsAnew(_, why):
                    self.repairs.because(why)
                case job_events.GenerationBegun():
                    self.repairs.began(self.now)
                case job_events.RecoveryFound(_, found):
                    self.repairs.planned(found, self.now)
                case job_events.CommunicatorsKnown():
                    self.repairs.linked(self.now)
                case job_events.GenerationRuns():
                    self.lines.append(self.repairs.ran(self.state, self.now))
        return actions

    @property
    def last(self) -> SwapStatus:
        assert self.repairs.last is not None
        return self.repairs.last


def test_a_start_is_no_repair() -> None:
    job = Told()
    assert job.lines == [""]
    assert job.repairs.last is None


def test_a_process_that_was_made_anew_on_its_node() -> None:
    job = Told()
    job.train(1, rank1=-9)
    job.now += 0.25
    job.leave(0)
    job.say(1, job.rank(1, joined=G2))
    job.now += 0.5
    job.leave(1)
    job.now += 1
    job.restore(0)
    job.restore(1)
    assert job.lines[-1] == ("swapped in place (g2): rank 1 on node1; step 6 is run again, 0 steps lost, 1.75 s")
    assert job.last.moves == (Move(rank=1, from_node="node1", to_node="node1", source="own-node"),)
    assert (job.last.rung, job.last.lost_ranks, job.last.resumed_step, job.last.lost_steps) == (1, (1,), 6, 0)
    phases = {"detect": 0.0, "plan": 0.0, "quiesce": 0.25, "rebuild": 0.5, "restore": 1.0}
    assert job.last.phases == pytest.approx(phases)
    assert job.last.total == pytest.approx(1.75)


def test_a_rank_that_goes_on_on_a_spare_node_has_its_state_from_another_one() -> None:
    job = Told(spares=1)
    job.lose(1)
    for tell in (job.leave, job.restore):
        for index in (0, 2):
            tell(index)
    assert job.lines[-1].startswith("swapped in place (g2): rank 1 node1 -> node2; step 6 is run again")
    assert job.last.moves == (Move(rank=1, from_node="node1", to_node="node2", source="other-node:node0"),)


def test_a_silence_counts_as_detection() -> None:
    job = Told(spares=1)
    for _ in range(4):
        job.now += 1
        job.train(0)
        job.say(2)
    for tell in (job.leave, job.restore):
        for index in (0, 2):
            tell(index)
    assert job.last.phases["detect"] == pytest.approx(4)
    assert job.last.total == pytest.approx(4)


def test_a_step_that_all_had_completed_and_that_is_run_again_is_lost() -> None:
    job = Told()
    job.step = 6
    job.train(0)
    job.train(1, rank1=-9)
    job.leave(0)
    job.leave(1)
    for index in (0, 1):
        job.restore(index)
    assert (job.last.resumed_step, job.last.lost_steps) == (6, 1)
    assert "step 6 is run again, 1 step lost" in job.lines[-1]


def test_a_lost_nodes_last_report_may_be_an_old_one() -> None:
    job = Told(spares=1)
    job.step = 6
    job.train(0)  # rank 1's node said 5, and is not heard of again
    job.lose(1)
    job.say(0, job.rank(0, joined=G2, live=Stamp(G1, 6), at=6, returns=1, address="at0"))
    job.leave(2)
    for index in (0, 2):
        job.restore(index)
    assert job.last.lost_steps == 1


def test_a_swap_that_came_to_nothing_belongs_to_the_repair() -> None:
    job = Told(slots=2)
    job.say(1, job.rank(2, -9), job.rank(3))
    job.now += 1
    job.say(0, job.rank(0), job.rank(1, -11))
    for tell in (job.leave, job.restore):
        for index in (0, 1):
            tell(index)
    assert job.last.lost_ranks == (1, 2)
    assert [move.rank for move in job.last.moves] == [1, 2]
    assert job.last.phases["plan"] == pytest.approx(1)
    assert "rank 1 on node0, rank 2 on node1; " in job.lines[-1]


def test_new_processes_from_the_slots_say_why_and_that_all_ranks_moved() -> None:
    job = Told()
    job.train(1, rank1=-9)
    job.say(0, job.rank(0, aborted=G2, outside="barrier was aborted outside of a step"), offered=False)
    assert job.repairs.announcement(G2, ()) == (
        "restarting all workers (g2); rank 0 cannot be repaired in place: barrier was aborted outside of a step"
    )
    job.started()
    assert job.last.rung == 2
    assert [(move.rank, move.source) for move in job.last.moves] == [(0, "own-node"), (1, "own-node")]
    assert job.lines[-1].startswith("all workers are started again from the copies in memory (g3): rank 0 cannot")
    assert set(job.last.phases) == {"detect", "plan", "quiesce"}


def test_without_a_common_version_the_scripts_own_checkpoint_is_named() -> None:
    job = Told()
    job.train(1, rank1=-9)
    for index in (0, 1):
        job.say(index, job.rank(index, joined=G2), kept=())
    job.started()
    assert (job.last.rung, job.last.resumed_step, job.last.lost_steps) == (3, None, None)
    assert job.lines[-1].startswith(
        "all workers run the script again, from its newest checkpoint on disk or else from the beginning (g3): "
        "no version of the state is left"
    )
