"""Who is slow, when that is said, and what follows: pure decisions, no process."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_membership import PAIR
from test_membership_swaps import G1, G2, Swaps

from phoenix_launch.job import events as job_events
from phoenix_launch.job import stragglers
from phoenix_launch.job.state import Holder, Phase, Rung, Slow
from phoenix_launch.job.wishes import wish_for
from phoenix_launch.messages import RankReport
from phoenix_launch.progress import PaceFigures
from phoenix_launch.records.view import status_text
from phoenix_launch.status import JobState, JobStatus, RankStatus

RULES = replace(PAIR, heartbeat_timeout=1e9, first_step_timeout=1e9)
MOVES = replace(RULES, replace_stragglers=True)


def holder(rank: int, compute: float, role: int = 1, step: int = 50) -> Holder:
    pace = PaceFigures(compute=compute, role=role) if compute else None
    return Holder(rank=rank, node=rank // 2, born=G1, step=step, pace=pace)


def slow_ones(*computes: float, roles: tuple[int, ...] = ()) -> list[int]:
    holders = [holder(rank, compute, roles[rank] if roles else 1) for rank, compute in enumerate(computes)]
    return [rank for rank, verdict in stragglers.verdicts(holders).items() if verdict.slow]


# --- who ---


@pytest.mark.parametrize(
    ("computes", "roles", "slow"),
    [
        ((0.1, 0.1, 0.3, 0.1), (), [2]),
        ((0.1, 0.1, 0.14, 0.1), (), []),  # not so much more
        ((0.001, 0.001, 0.04, 0.001), (), []),  # a few milliseconds are nobody's fault
        ((0.1, 0.3), (), [1]),
        ((0.1, 0.3, 0.1, 0.3), (), [1, 3]),
        ((0.3, 0.3, 0.1, 0.1), (1, 1, 2, 2), []),  # two stages of a pipeline
        ((0.1, 0.3), (1, 2), []),  # no peers
        ((0.1, 0.3, 0.0), (), [1]),  # one of them has not said anything yet
        ((0.3,), (), []),
    ],
)
def test_only_who_computes_much_longer_than_its_peers_is_slow(
    computes: tuple[float, ...], roles: tuple[int, ...], slow: list[int]
) -> None:
    assert slow_ones(*computes, roles=roles) == slow


@given(st.lists(st.floats(0.5, 0.7), min_size=2, max_size=16))
def test_ranks_that_differ_by_less_than_half_are_never_slow(computes: list[float]) -> None:
    assert slow_ones(*computes) == []


@given(st.integers(2, 16), st.floats(0.06, 10.0), st.floats(2.0, 50.0), st.data())
def test_one_that_is_twice_as_slow_is_always_named_alone(
    ranks: int, usual: float, factor: float, data: st.DataObject
) -> None:
    late = data.draw(st.integers(0, ranks - 1))
    computes = [usual * data.draw(st.floats(1.0, 1.2)) * (factor if rank == late else 1.0) for rank in range(ranks)]
    assert slow_ones(*computes) == [late]


@given(st.lists(st.floats(0.001, 100.0), min_size=2, max_size=20), st.data())
def test_the_median_of_the_others_is_found_in_one_order_of_all(computes: list[float], data: st.DataObject) -> None:
    one = data.draw(st.sampled_from(computes))
    others = list(computes)
    others.remove(one)
    assert stragglers.median_without(sorted(computes), one) == pytest.approx(statistics.median(others))


def test_people_see_by_how_much() -> None:
    rank = RankStatus(rank=2, node="node1", pid=7, state="running", step=5, compute_s=0.21, slow=2.1)
    text = status_text(JobStatus(job="j", state=JobState.RUNNING, ranks=(rank,)))
    assert "running, slow 2.1x" in text


# --- when ---


def looks(*each: tuple[float, int, float]) -> list[bool]:
    """By look (seconds, step, compute time of rank 1), whether it is told to be slow."""
    known: dict[int, Slow] = {}
    told = []
    for now, step, compute in each:
        known = stragglers.watched(known, {0: holder(0, 0.1, step=step), 1: holder(1, compute, step=step)}, now)
        told.append(1 in known and known[1].told)
    return told


def test_it_is_told_when_it_has_lasted_both_steps_and_seconds() -> None:
    assert looks((0, 10, 0.3), (4, 30, 0.3), (5, 31, 0.3)) == [False, False, True]
    assert looks((0, 10, 0.3), (9, 19, 0.3), (10, 20, 0.3)) == [False, False, True]


def test_one_that_is_well_in_between_begins_anew() -> None:
    assert looks((0, 10, 0.3), (4, 30, 0.1), (6, 40, 0.3), (9, 60, 0.3), (11, 70, 0.3)) == [False] * 4 + [True]


def test_its_end_has_to_last_as_long() -> None:
    told = (0, 10, 0.3), (5, 20, 0.3)
    assert looks(*told, (6, 30, 0.1), (10, 60, 0.1), (11, 61, 0.1)) == [False, True, True, True, False]
    assert looks(*told, (6, 30, 0.1), (10, 60, 0.3), (12, 70, 0.1), (16, 90, 0.1)) == [False] + [True] * 5
    assert looks(*told, (6, 30, 0.145), (20, 90, 0.145)) == [False, True, True, True], "neither slow nor calm"


def test_a_rank_without_news_is_left_as_it_was() -> None:
    assert looks((0, 10, 0.3), (5, 20, 0.3), (6, 21, 0.0)) == [False, True, True]
    assert looks((0, 10, 0.3), (4, 15, 0.0), (6, 31, 0.3)) == [False, False, False]


# --- what follows ---


class Slowed(Swaps):
    """Two nodes of two ranks; all report what they take for a step."""

    def __init__(self, rules: object = RULES, **options: int) -> None:
        super().__init__(rules, slots=2, **options)  # type: ignore[arg-type]

    def look(self, *computes: float, step: int) -> None:
        for node in {place.node for place in self.state.places}:
            ranks = []
            for rank in self.here(node):
                report = self.rank(rank, step=step)
                fields = {name: getattr(report, name) for name in RankReport.__struct_fields__}
                ranks.append(RankReport(**{**fields, "pace": PaceFigures(compute=computes[rank], role=1)}))
            self.say(node, *ranks)
        self.pass_time(stragglers.LOOK)

    def slow(self, *computes: float) -> None:
        self.look(*computes, step=50)
        self.pass_time(6.0)
        self.look(*computes, step=70)

    def of(self, kind: type) -> list[object]:
        return [action for action in self.actions if isinstance(action, kind)]


EVEN = (0.1, 0.1, 0.1, 0.1)
THIRD = (0.1, 0.1, 0.3, 0.1)


def test_it_is_told_once_and_so_is_its_end() -> None:
    job = Slowed()
    job.slow(*THIRD)
    job.look(*THIRD, step=75)
    (found,) = job.of(job_events.StragglerFound)
    assert found == job_events.StragglerFound(rank=2, node=1, compute=0.3, median=0.1)
    job.slow(*EVEN)
    assert [action.over for action in job.of(job_events.StragglerFound)] == [False, True]  # type: ignore[attr-defined]
    assert not job.of(job_events.FaultFound)
    assert not wish_for(job.state, 1).condemned


def test_a_straggler_stays_where_no_other_node_can_take_its_ranks() -> None:
    job = Slowed(MOVES)
    job.slow(*THIRD)
    assert job.of(job_events.StragglerFound)
    assert not job.of(job_events.FaultFound)


def test_all_ranks_of_its_node_move_to_the_spare_one_which_is_one_fault() -> None:
    job = Slowed(MOVES, spares=1)
    job.slow(*THIRD)
    (fault,) = job.of(job_events.FaultFound)
    assert isinstance(fault, job_events.FaultFound)
    assert (fault.kind, fault.node, fault.ranks) == ("straggler", 1, (2, 3))
    assert wish_for(job.state, 1).condemned == ((2, G1), (3, G1))
    job.train(1, rank2=-9)
    assert job.phase() is Phase.RUNNING, "the end of both is one fault"
    job.train(1, rank2=-9, rank3=-9)
    assert (job.phase(), job.state.rung, job.state.generation) == (Phase.SWAPPING, Rung.IN_PLACE, G2)
    assert {place.rank: place.node for place in job.state.places} == {0: 0, 1: 0, 2: 2, 3: 2}
    assert len(job.of(job_events.FaultFound)) == 1
    assert job.state.members[1].alive, "what it keeps in memory is of use"


def test_a_second_one_is_left_alone_for_a_while() -> None:
    job = Slowed(MOVES, spares=2)
    job.slow(*THIRD)
    job.train(1, rank2=-9, rank3=-9)
    for tell in (job.leave, job.restore):
        for index in (0, 2):
            tell(index)
    assert job.phase() is Phase.RUNNING
    job.slow(0.1, 0.3, 0.1, 0.1)
    assert len(job.of(job_events.FaultFound)) == 1
    job.pass_time(stragglers.PAUSE)
    job.look(0.1, 0.3, 0.1, 0.1, step=90)
    assert len(job.of(job_events.FaultFound)) == 2


def test_the_node_that_was_left_takes_ranks_again_only_where_no_other_is_left() -> None:
    job = Slowed(MOVES, spares=2)
    job.slow(*THIRD)
    job.train(1, rank2=-9, rank3=-9)
    for tell in (job.leave, job.restore):
        for index in (0, 2):
            tell(index)
    job.tell(job_events.AgentEnded(2, job.incarnation(2)))
    assert {place.node for place in job.state.places} == {0, 3}
    job.tell(job_events.AgentEnded(3, job.incarnation(3)))
    assert {place.node for place in job.state.places} == {0, 1}
    assert not job.state.members[1].avoided


def test_a_node_lost_while_a_straggler_is_replaced_leaves_nobody_on_the_node_to_be_left() -> None:
    job = Slowed(MOVES, spares=2)
    job.slow(*THIRD)
    job.tell(job_events.AgentEnded(0, job.incarnation(0)))
    assert job.phase() in (Phase.SWAPPING, Phase.QUIESCING)
    homes = {place.rank: place.node for place in job.state.places}
    assert all(homes[rank] == its.node for rank, its in job.state.holders.items())
    assert 1 not in homes.values()
