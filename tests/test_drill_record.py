"""What is told of a drill when it is over."""

from __future__ import annotations

from phoenix_launch.job.redundancy import DEGRADED, FULL, RESTORING, Redundancy
from phoenix_launch.supervision.drill_record import Drilled, DrillRecord


def drilled(kind: str = "kill-worker", rank: int = 1, at: float = 10.0) -> Drilled:
    return Drilled(kind, f"rank {rank} on node0" if rank >= 0 else "node0 (ranks 0-1)", 0, rank, at)


def test_a_drill_is_over_when_the_job_is_fully_redundant_again() -> None:
    record = DrillRecord()
    record.began(drilled())
    assert record.redundant(Redundancy(FULL), 10.01) == []
    record.fault(0, (1,), 10.02)
    assert record.redundant(Redundancy(FULL), 10.03) == []
    record.ran(10.52, 1)
    assert record.redundant(Redundancy(RESTORING), 10.6) == []
    (done,) = record.redundant(Redundancy(FULL), 11.02)
    assert done.told() == (
        "kill-worker rank 1 on node0: found after 0.02 s, all ran again 0.50 s later, 1 step lost, fully redundant 0.50 s later"
    )
    assert record.ended() == []


def test_a_fault_belongs_to_the_earliest_drill_that_hit_there() -> None:
    record = DrillRecord()
    for each in (drilled("hang"), drilled("exit", at=11.0), drilled("kill-node", -1, 12.0)):
        record.began(each)
    record.fault(0, (0,), 12.4)  # no drill hit that
    record.fault(0, (), 12.5)
    record.fault(0, (1,), 13.0)
    record.ran(14.0, None)
    assert [(each.kind, each.found) for each in record.ended()] == [("hang", 13.0), ("exit", None), ("kill-node", 12.5)]


def test_what_never_became_a_fault_or_was_never_safe_again_is_said_so() -> None:
    record = DrillRecord()
    record.began(drilled("slow"))
    assert record.ended()[0].told() == "slow rank 1 on node0: no fault was found"
    record.began(drilled())
    record.fault(0, (1,), 10.5)
    record.ran(11.0, 0)
    assert record.redundant(Redundancy(DEGRADED, "one failure domain"), 12.0) == []
    assert record.ended()[0].told().endswith("0 steps lost, not fully redundant since")


def test_what_harms_nobody_is_over_after_its_duration() -> None:
    record = DrillRecord()
    record.began(Drilled("slow", "3 on rank 1 on node0", 0, 1, 10.0, duration=5.0))
    record.began(Drilled("slow", "3 on rank 0 on node0", 0, 0, 10.0))  # to the end of the job
    record.began(Drilled("fail-spare", "node0", 0, -1, 10.0))
    assert record.redundant(Redundancy(FULL), 11.0) == []
    assert [each.kind for each in record.redundant(Redundancy(FULL), 12.5)] == ["fail-spare"]
    record.noticed((1,), 13.0)
    (slow,) = record.redundant(Redundancy(FULL), 15.0)
    assert slow.told() == "slow 3 on rank 1 on node0: noticed after 3.00 s"
    assert [each.rank for each in record.ended()] == [0]


def test_what_was_noticed_without_anybody_failing_is_over() -> None:
    record = DrillRecord()
    record.began(drilled("flip-bits"))
    record.noticed((0, 1), 10.5)
    (done,) = record.redundant(Redundancy(FULL), 10.6)
    assert (done.detection, done.recovery) == (0.5, None)


def test_a_job_that_was_not_redundant_before_need_not_be_so_after() -> None:
    record = DrillRecord()
    record.began(Drilled("exit", "rank 1 on node0", 0, 1, 10.0, before=DEGRADED))
    record.fault(0, (1,), 10.5)
    record.ran(11.0, 0)
    assert record.redundant(Redundancy(RESTORING), 11.1) == []
    assert len(record.redundant(Redundancy(DEGRADED, "1 failure domain for 1 replica"), 11.2)) == 1
