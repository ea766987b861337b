"""A node that is to be left: all ranks halt, its ranks move, and it leaves when nobody needs it."""

from __future__ import annotations

import pytest
from test_membership import PAIR, running
from test_membership_swaps import Swaps

from phoenix_launch.copies import Stamp
from phoenix_launch.errors import UsageError
from phoenix_launch.job import events as job_events
from phoenix_launch.job.draining import to_drain
from phoenix_launch.job.state import NodeState, Phase, Rung
from phoenix_launch.messages import PlanPhase


def halted(job: Swaps, index: int) -> None:
    stamp = Stamp(job.state.generation, 7)
    job.say(index, *(job.rank(rank, halted=stamp) for rank in job.here(index)))


def asked() -> Swaps:
    job = Swaps(PAIR, spares=1)
    assert to_drain(job.state, "node1") == (1, "node1 is being drained: its rank 1 moves to another node")
    job.tell(job_events.DrainAsked(1))
    return job


def drained() -> Swaps:
    job = asked()
    for index in (0, 1):
        halted(job, index)
    job.train(1, rank1=-9)
    return job


def test_nobody_is_ended_before_all_ranks_stand_at_one_version() -> None:
    job = asked()
    assert job.plan(0).halt and job.plan(1).halt
    halted(job, 0)
    assert job.wish(1).condemned == ()
    halted(job, 1)
    assert [rank for rank, _ in job.wish(1).condemned] == [1]
    assert job.wish(0).condemned == ()
    assert not job.plan(0).halt


def test_its_ranks_go_to_the_spare_node_in_place() -> None:
    job = drained()
    assert (job.phase(), job.state.rung) == (Phase.SWAPPING, Rung.IN_PLACE)
    assert job.told(job_events.GenerationBegun)[-1].moved == ((1, 1, 2),)
    assert job.state.members[1].state is NodeState.READY


def test_it_leaves_when_the_first_version_after_the_move_is_complete() -> None:
    job = drained()
    for tell in (job.leave, job.restore):
        for index in (0, 2):
            tell(index)
        job.say(1)
    assert job.phase() is Phase.RUNNING
    assert job.wish(1).phase is PlanPhase.PARK, "it keeps what all have resumed from"
    for index in (0, 2):
        job.say(index, *(job.rank(rank, complete=6) for rank in job.here(index)))
    assert job.state.members[1].state is NodeState.DRAINED
    assert job.told(job_events.NodeDrained) == [job_events.NodeDrained(1)]
    assert job.wish(1).phase is PlanPhase.LEAVE
    for index in (0, 2):
        job.say(index, *(job.rank(rank, complete=6, leaving=True) for rank in job.here(index)))
    assert job.state.leave and job.told(job_events.NodeDrained) == [job_events.NodeDrained(1)]
    job.tell(job_events.AgentEnded(1, job.incarnation(1)))
    assert not [fault for fault in job.told(job_events.FaultFound) if fault.kind == "node"]


def test_a_failure_meanwhile_is_an_ordinary_one() -> None:
    job = asked()
    job.train(0, rank0=-9)
    assert (job.phase(), job.state.halt) == (Phase.SWAPPING, None)


def test_ranks_that_do_not_halt_in_time_are_moved_all_the_same() -> None:
    job = asked()
    job.pass_time(job.state.rules.shutdown_timeout / 2 + 0.5, alive=(0, 1, 2))
    assert [rank for rank, _ in job.wish(1).condemned] == [1]


def test_a_spare_node_leaves_at_once() -> None:
    job = Swaps(PAIR, spares=1)
    job.tell(job_events.DrainAsked(2))
    job.train(0)
    assert job.phase() is Phase.RUNNING and job.wish(0).halt is False


@pytest.mark.parametrize(
    ("spares", "node", "words"),
    [
        (0, "node1", "no spare node can take the ranks of node1"),
        (1, "node7", "there is no node node7"),
        (1, "1", ""),
        (1, "node2", ""),
    ],
)
def test_what_cannot_be_done_is_said(spares: int, node: str, words: str) -> None:
    job = Swaps(PAIR, spares=spares)
    if not words:
        assert str(to_drain(job.state, node)[0]) in node
        return
    with pytest.raises(UsageError, match=words):
        to_drain(job.state, node)


def test_a_script_without_the_runtime_is_not_moved() -> None:
    with pytest.raises(UsageError, match="does not use phoenix_runtime"):
        to_drain(running().state, "node1")
