"""Drills say whom they hit, and bad ones are refused in one line with an example."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phoenix_launch.command_messages import DrillKind, FaultRequest
from phoenix_launch.errors import UsageError
from phoenix_launch.job.drills import DrillPlan, Target, find_target, is_due, lasting, parse_kind, parse_plan
from phoenix_launch.job.placement import Seat
from phoenix_launch.job.state import Holder, Member, NodeState, Rules, State
from phoenix_launch.messages import RuntimeReport
from phoenix_launch.wire import Generation


def member(index: int, state: NodeState = NodeState.READY) -> Member:
    name = f"node{index}"
    return Member(index=index, name=name, domain=name, slots=2, incarnation=name, state=state)


def job(*members: Member) -> State:
    return State(
        rules=Rules(seats_min=2, seats_max=2),
        generation=Generation(1, 1),
        members={m.index: m for m in members},
        lineup=(Seat(0, 2), Seat(1, 2)),
    )


def test_a_plan_is_read() -> None:
    assert parse_plan("kill-node --node 1 --after 20") == DrillPlan(kind=DrillKind.KILL_NODE, node="1", after=20.0)
    assert parse_plan("kill-worker --rank 3") == DrillPlan(kind=DrillKind.KILL_WORKER, rank=3)
    assert parse_plan("kill-supervisor --at-step 4") == DrillPlan(kind=DrillKind.KILL_SUPERVISOR, at_step=4)
    slow = DrillPlan(kind=DrillKind.SLOW, rank=1, value=3.5, duration=2.0, after=1.0)
    assert parse_plan("slow 3.5 --rank 1 --duration 2 --after 1") == slow
    assert slow.request == FaultRequest(DrillKind.SLOW, rank=1, value=3.5, duration=2.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kill-node",
        "kill-node --node",
        "kill-node --node 1 --rank 2",
        "kill-worker --node 1",
        "kill-worker --rank -1",
        "kill-worker --rank x",
        "kill-node --node 1 --after -3",
        "kill-node --node 1 --after nan",
        "kill-node --node 1 --when 3",
        "kill-node --node '1",
        "kill-supervisor --node 1",
        "slow --rank 1",
        "slow 0.5 --rank 1",
        "exit 256 --rank 1",
        "exit x --rank 1",
        "hang 3 --rank 1",
        "hang --node 1",
        "freeze",
        "hang --rank 1 --at-step 1.5",
        "hang --rank 1 --duration -1",
        "delay-bus --node 1",
        "delay-bus 0 --node 1",
        "oom --node 1",
        "flip-bits --node 1",
        "partition",
    ],
)
def test_a_bad_plan_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_plan(text)
    assert refused.value.hint and "\n" not in refused.value.message


def test_the_nearest_kind_is_named() -> None:
    with pytest.raises(UsageError) as refused:
        parse_kind("kil-node")
    assert refused.value.hint == "did you mean kill-node?"


def test_a_node_is_found_by_index_by_name_and_by_one_of_its_ranks() -> None:
    state = job(member(0), member(1))
    for rank, node in ((-1, "1"), (-1, "node1"), (3, "")):
        target = find_target(state, DrillKind.KILL_NODE, rank, node)
        assert (target.node, target.rank, target.text) == (1, -1, "node1 (ranks 2-3)")


def test_a_worker_is_found_by_its_rank() -> None:
    target = find_target(job(member(0), member(1)), DrillKind.KILL_WORKER, 1, "")
    assert (target.node, target.rank, target.text) == (0, 1, "rank 1 on node0")


@pytest.mark.parametrize(("rank", "node"), [(9, ""), (-1, "node7"), (-1, "1")])
def test_what_is_not_there_or_dead_already_is_no_target(rank: int, node: str) -> None:
    with pytest.raises(UsageError):
        find_target(job(member(0), member(1, NodeState.LOST)), DrillKind.KILL_NODE, rank, node)


def test_a_rank_that_does_not_know_the_runtime_cannot_harm_itself() -> None:
    state = job(member(0), member(1))
    assert find_target(state, DrillKind.FREEZE, 1, "").text == "rank 1 on node0"
    assert find_target(state, DrillKind.FREEZE, -1, "node0").rank == -1
    with pytest.raises(UsageError, match="hang: rank 1 does not know phoenix_runtime"):
        find_target(state, DrillKind.HANG, 1, "")
    held = Holder(rank=1, node=0, born=Generation(1, 1), runtime=RuntimeReport())
    told = replace(state, holders={1: held})
    assert find_target(told, DrillKind.SLOW, 1, "", 3.0).text == "3 on rank 1 on node0"


def test_a_drill_is_due_when_its_time_and_its_step_have_come() -> None:
    born = Generation(1, 1)
    state = replace(job(member(0)), holders={r: Holder(rank=r, node=0, born=born, step=5 + r) for r in range(2)})
    assert not is_due(DrillPlan(kind=DrillKind.HANG, rank=0), state, -1.0)
    assert is_due(DrillPlan(kind=DrillKind.HANG, rank=0), state, 0.0)
    assert not is_due(DrillPlan(kind=DrillKind.HANG, rank=0, after=2.0), state, 1.0)
    assert is_due(DrillPlan(kind=DrillKind.HANG, rank=0, at_step=5), state, 0.0)
    assert not is_due(DrillPlan(kind=DrillKind.HANG, rank=0, at_step=6), state, 0.0), "not all have done it"


@pytest.mark.parametrize(
    ("kind", "duration", "lasts"),
    [
        (DrillKind.PARTITION, 0.0, 10.0),
        (DrillKind.DROP_BUS, 3.0, 3.0),
        (DrillKind.FILL_DISK, 0.0, 10.0),
        (DrillKind.SLOW, 0.0, 0.0),
        (DrillKind.KILL_NODE, 0.0, 0.0),
    ],
)
def test_what_would_never_end_by_itself_ends_after_a_while(kind: DrillKind, duration: float, lasts: float) -> None:
    assert lasting(kind, duration) == lasts


def test_what_lies_between_a_node_and_others_is_harmed_by_its_name_or_one_of_its_ranks() -> None:
    state = job(member(0), member(1))
    for kind in (DrillKind.DROP_BUS, DrillKind.PARTITION):
        assert (
            find_target(state, kind, 3, "")
            == find_target(state, kind, -1, "node1")
            == Target(1, -1, "node1 (ranks 2-3)")
        )
    assert find_target(state, DrillKind.DELAY_BUS, -1, "1", 0.5).text == "0.5 on node1 (ranks 2-3)"
    assert parse_plan("delay-bus 0.5 --node 1").value == 0.5


def test_a_disk_can_only_be_full_where_something_is_written() -> None:
    state = job(member(0), member(1))
    with pytest.raises(UsageError, match="writes no checkpoints to disk"):
        find_target(state, DrillKind.FILL_DISK, -1, "node1")
    writes = replace(state, rules=replace(state.rules, save_timeout=60.0))
    assert find_target(writes, DrillKind.FILL_DISK, -1, "node1").rank == -1
