"""Whether a job hangs and who is to blame, and what follows: pure decisions, no process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_membership import PAIR
from test_membership_swaps import G1, Swaps

from phoenix_launch.job import events as job_events
from phoenix_launch.job import hangs
from phoenix_launch.job.state import Phase, Rung
from phoenix_launch.job.wishes import wish_for
from phoenix_launch.messages import RankReport, Standstill
from phoenix_launch.node.stacks import scripts_line

RULES = replace(PAIR, heartbeat_timeout=1e9, hang_timeout=30.0, first_step_timeout=600.0, stacks_timeout=2.0)
WORLD, ROW, OTHER_ROW = 2, 4, 6  # keys of groups


def still(
    begun: dict[int, int], waits_for: tuple[int, int] = (0, 0), age: float = 40.0, typical: float = 1.0, **said: float
) -> Standstill:
    return Standstill(age, typical, said.get("allowed", 0.0), waits_for, begun)


# --- who ---


def test_the_rank_that_did_not_come_to_the_collective_is_named() -> None:
    waiting = still({WORLD: 8}, (WORLD, 8))
    assert hangs.culprits({0: waiting, 1: still({WORLD: 7}), 2: waiting, 3: waiting}) == (1,)


def test_who_waits_in_cpp_is_ahead_all_the_same() -> None:
    assert hangs.culprits({0: still({WORLD: 8}), 1: still({WORLD: 7}), 2: still({WORLD: 8})}) == (1,)


def test_a_victim_in_another_group_is_not_named() -> None:
    """Rank 3 hangs; rank 2 waits for it in their row and so did not come to the collective in which 0 and 1 wait."""
    found = {
        0: still({WORLD: 5, ROW: 3}, (WORLD, 5)),
        1: still({WORLD: 5, ROW: 3}, (WORLD, 5)),
        2: still({WORLD: 4, OTHER_ROW: 4}, (OTHER_ROW, 4)),
        3: still({WORLD: 4, OTHER_ROW: 3}),
    }
    assert hangs.culprits(found) == (3,)


def test_a_pipeline_stage_that_waits_for_the_one_before_is_not_named() -> None:
    """Stage 0 has asked for gradients in advance: it does not wait for them."""
    forward, backward = 21, 23
    found = {0: still({forward: 3, backward: 4}), 1: still({forward: 4, backward: 3}, (forward, 4))}
    assert hangs.culprits(found) == (0,)


def test_a_ring_of_waits_names_nobody() -> None:
    assert hangs.culprits({0: still({2: 2, 4: 1}, (2, 2)), 1: still({2: 1, 4: 2}, (4, 2))}) == ()


def test_a_collective_that_all_have_begun_names_nobody() -> None:
    assert hangs.culprits({rank: still({WORLD: 8}, (WORLD, 8)) for rank in range(4)}) == ()


@given(st.integers(2, 8), st.data())
def test_one_that_is_late_is_always_named_alone(ranks: int, data: st.DataObject) -> None:
    late = data.draw(st.integers(0, ranks - 1))
    number = data.draw(st.integers(1, 1000))
    says = data.draw(st.lists(st.booleans(), min_size=ranks, max_size=ranks))
    found = {
        rank: still({WORLD: number}, (WORLD, number) if says[rank] else (0, 0)) for rank in range(ranks) if rank != late
    }
    assert hangs.culprits({**found, late: still({WORLD: number - 1})}) == (late,)


# --- when ---


class Still(Swaps):
    """Both nodes report, at the clock's next second, that their ranks stand still."""

    def __init__(self, **options: int) -> None:
        super().__init__(RULES, **options)

    def stand(self, *each: Standstill | None, inside: int = 6, insides: tuple[int, ...] = (), **said: object) -> None:
        by_node: dict[int, list[RankReport]] = {}
        for place, what in zip(self.state.places, each, strict=True):
            within = insides[place.rank] if insides else inside
            report = self.rank(place.rank, inside=within, **said)  # type: ignore[arg-type]
            fields = {name: getattr(report, name) for name in RankReport.__struct_fields__}
            by_node.setdefault(place.node, []).append(RankReport(**{**fields, "still": what}))
        for node, ranks in by_node.items():
            self.say(node, *ranks)

    def taken(self, *wheres: str) -> None:
        for place, where in zip(self.state.places, wheres, strict=True):
            born = self.state.holders[place.rank].born
            self.tell(job_events.StacksTaken(place.node, place.rank, born, where, last=True))

    def of(self, kind: type) -> list[object]:
        return [action for action in self.actions if isinstance(action, kind)]


HUNG = still({WORLD: 7})
WAITS = still({WORLD: 8}, (WORLD, 8))


@pytest.mark.parametrize(
    ("first", "second", "inside", "hung"),
    [
        (HUNG, WAITS, 6, True),
        (HUNG, None, 6, False),  # one moves
        (still({WORLD: 7}, age=29.0), WAITS, 6, False),
        (still({WORLD: 7}, typical=9.0), still({WORLD: 8}, typical=9.0), 6, False),  # ten steps are more than 40 s
        (still({WORLD: 7}, typical=0.0), WAITS, 6, False),  # it may compile
        (still({WORLD: 7}, age=700, typical=0.0), still({WORLD: 8}, age=700), 6, True),
        (still({WORLD: 7}, allowed=90.0), WAITS, -1, False),  # a section that says how long it takes
        (still({WORLD: 7}, age=99, allowed=90.0), still({WORLD: 8}, age=99), -1, True),
        (HUNG, WAITS, -1, False),  # between two steps a script may do anything
        (still({WORLD: 7}, age=301), still({WORLD: 8}, age=301), -1, True),
        (WAITS, WAITS, 6, True),
        (WAITS, WAITS, -1, False),
    ],
)
def test_how_long_nobody_may_move(first: Standstill, second: Standstill, inside: int, hung: bool) -> None:
    job = Still()
    job.stand(first, second, inside=inside)
    assert bool(job.of(job_events.StacksWanted)) is hung


def test_who_is_between_two_steps_may_take_longer_though_the_others_wait_in_one() -> None:
    for age, hung in ((40.0, False), (301.0, True)):
        job = Still()
        job.stand(still({WORLD: 7}, age=age), still({WORLD: 8}, (WORLD, 8), age=age), insides=(-1, 6))
        assert bool(job.of(job_events.StacksWanted)) is hung


def test_ranks_whose_scripts_are_over_do_not_hang() -> None:
    job = Still()
    job.stand(HUNG, WAITS, leaving=True, finished=6)
    assert not job.of(job_events.StacksWanted)


def test_nobody_is_ended_before_the_stacks_are_there_and_then_the_culprit_is() -> None:
    job = Still()
    job.stand(HUNG, WAITS)
    assert not job.of(job_events.FaultFound)
    assert not any(wish_for(job.state, node).condemned for node in (0, 1))
    job.taken("it is at train.py:12 in load", "it is at train.py:30 in step")
    (fault,) = job.of(job_events.FaultFound)
    assert isinstance(fault, job_events.FaultFound)
    assert (fault.kind, fault.ranks, fault.after) == ("hang", (0,), 40.0)
    assert fault.detail == "hangs for 40 s: rank 1 waits for it; it is at train.py:12 in load"
    assert wish_for(job.state, 0).condemned == ((0, G1),)
    assert wish_for(job.state, 1).condemned == ()


def test_a_node_that_sends_no_stacks_is_waited_for_no_longer_than_that() -> None:
    job = Still()
    job.stand(HUNG, WAITS)
    job.pass_time(2.5)
    assert wish_for(job.state, 0).condemned


def test_who_moves_again_is_left_alone() -> None:
    job = Still()
    job.stand(HUNG, WAITS)
    job.stand(None, None)
    job.pass_time(2.5)
    assert not job.of(job_events.FaultFound)
    assert job.phase() is Phase.RUNNING


def test_its_end_is_one_fault_and_a_swap_in_place() -> None:
    job = Still(spares=1)
    job.stand(HUNG, WAITS)
    job.taken("", "")
    job.train(0, rank0=-9)
    assert len(job.of(job_events.FaultFound)) == 1
    assert (job.phase(), job.state.rung) == (Phase.SWAPPING, Rung.IN_PLACE)
    assert not job.state.condemned


def test_when_nobody_can_be_named_all_start_from_the_copies() -> None:
    job = Still()
    job.stand(WAITS, WAITS)
    job.taken("", "")
    (fault,) = job.of(job_events.FaultFound)
    assert isinstance(fault, job_events.FaultFound)
    assert fault.node == -1
    assert (
        fault.detail == "no rank has moved for 40 s, 2 ranks of 2 in a collective that does not end; none can be named"
    )
    assert [wish_for(job.state, node).condemned for node in (0, 1)] == [((0, G1),), ((1, G1),)]
    job.train(0, rank0=-9)
    assert job.phase() is Phase.RUNNING, "the end of all of them is one fault"
    job.train(1, rank1=-9)
    assert (job.phase(), job.state.rung) == (Phase.QUIESCING, Rung.FROM_SLOTS)
    assert len(job.of(job_events.FaultFound)) == 1


def test_who_is_stopped_is_named_though_it_has_begun_what_the_others_wait_for() -> None:
    stopped = Standstill(40.0, 1.0, 0.0, (WORLD, 8), {WORLD: 8}, stopped=True)
    assert hangs.culprits({0: WAITS, 1: stopped, 2: WAITS}) == (1,)


def test_one_that_came_to_its_end_after_all_does_not_blind_us_to_the_next_hang() -> None:
    job = Still(spares=1)
    job.stand(HUNG, WAITS)
    job.taken("", "")
    job.say(0, job.rank(0, 0, leaving=True))
    assert job.phase() is Phase.RUNNING
    assert not job.state.condemned


def test_a_node_with_a_process_that_cannot_be_ended_is_given_up() -> None:
    job = Still(spares=1)
    job.stand(HUNG, WAITS)
    job.taken("", "")
    job.pass_time(RULES.teardown_timeout + 1)
    (_, fault) = job.of(job_events.FaultFound)
    assert isinstance(fault, job_events.FaultFound)
    assert (fault.kind, fault.node) == ("node", 0)


# --- where ---


def test_the_scripts_own_line_is_told(tmp_path: Path) -> None:
    text = (
        "Thread 0x00007f0000000001 (most recent call first):\n"
        '  File "/home/me/other.py", line 3 in beside\n'
        "\n"
        "Current thread 0x00007f0000000002 (most recent call first):\n"
        '  File "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", line 9 in forward\n'
        '  File "/home/me/train.py", line 88 in load_batch\n'
        '  File "/home/me/train.py", line 120 in <module>\n'
    )
    assert scripts_line(text) == "train.py:88 in load_batch"
    assert scripts_line("") == ""
