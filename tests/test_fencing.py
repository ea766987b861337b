"""Nodes without a supervisor: who goes on, who ends its workers, how long a node waits."""

from __future__ import annotations

import pytest

from phoenix_launch.messages import (
    ExitReport,
    NodePlan,
    PlanPhase,
    ProcessState,
    RankReport,
    RuntimeReport,
    Standstill,
)
from phoenix_launch.node.fencing import must_end, patience, stands
from phoenix_launch.wire import Generation

G1 = Generation(1, 1)
HEARTBEAT, FIRST = 3.0, 600.0
KNOWS = RuntimeReport(holds=("a",))


def still(age: float, typical: float = 0.1, allowed: float = 0.0) -> Standstill:
    return Standstill(age, typical, allowed, (0, 0), {})


def rank(its: Standstill | None, runtime: RuntimeReport | None = KNOWS, ended: ExitReport | None = None) -> RankReport:
    return RankReport(0, G1, 7, ProcessState.RUNNING, 3, ended, runtime, 4, None, its)


@pytest.mark.parametrize(
    ("its", "expected"),
    [
        (still(2.9), False), (still(3.0), True),
        (still(20.0, typical=10.0), False), (still(30.0, typical=10.0), True),
        (still(50.0, allowed=60.0), False), (still(60.0, allowed=60.0), True),
        (still(500.0, typical=0.0), False), (still(600.0, typical=0.0), True),
    ],
)  # fmt: skip
def test_a_worker_stands_after_a_heartbeat_and_three_steps_or_what_it_has_asked_for(
    its: Standstill, expected: bool
) -> None:
    assert stands(its, HEARTBEAT, FIRST) is expected


def test_a_node_ends_its_workers_when_none_moves_and_nobody_supervises() -> None:
    stuck, moves = rank(still(10.0)), rank(None)
    assert must_end(3.0, [stuck, stuck], HEARTBEAT, FIRST)
    assert not must_end(2.9, [stuck, stuck], HEARTBEAT, FIRST)
    assert not must_end(100.0, [stuck, moves], HEARTBEAT, FIRST)
    assert not must_end(100.0, [], HEARTBEAT, FIRST)


def test_who_has_ended_is_over_or_says_nothing_is_not_asked() -> None:
    stuck, over = rank(still(10.0)), rank(still(10.0), RuntimeReport(leaving=True))
    plain, ended = rank(still(10.0), None), rank(None, KNOWS, ExitReport(-9, 0.0))
    assert not must_end(10.0, [over, plain, ended], HEARTBEAT, FIRST)
    assert must_end(10.0, [over, plain, ended, stuck], HEARTBEAT, FIRST)


def test_only_a_job_that_has_begun_is_worth_waiting_for() -> None:
    assert patience(None, HEARTBEAT, 600.0) == 15.0 == patience(NodePlan(Generation(1, 0), PlanPhase.PARK), 3.0, 600.0)
    assert patience(NodePlan(G1, PlanPhase.RUN), HEARTBEAT, 600.0) == 600.0
    assert patience(None, HEARTBEAT, 2.0) == 2.0
