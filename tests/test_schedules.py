"""Drills one after the other: when, whom, from which file; and what is said of each in the end."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phoenix_launch.command_messages import DrillKind
from phoenix_launch.errors import UsageError
from phoenix_launch.job.drills import DrillPlan
from phoenix_launch.job.schedules import Aim, Drilled, Schedule, is_ready, read_plans, summary
from phoenix_launch.status import JobState, JobStatus, NodeStatus, RankStatus


def status(ranks: int = 4, step: int | None = 7, **changed: str) -> JobStatus:
    nodes = tuple(
        NodeStatus(
            index=i, name=f"node{i}", role="spare" if i == 2 else "training", state=changed.get(f"node{i}", "ready"),
            spares=2 if i == 2 else 0,
        )
        for i in range(3)
    )  # fmt: skip
    said = tuple(
        RankStatus(rank=r, node=f"node{r // 2}", pid=r, state=changed.get(f"rank{r}", "running")) for r in range(ranks)
    )
    return JobStatus(job="j", state=JobState.RUNNING, step=step, nodes=nodes, ranks=said)


# --- when ---


def test_every_so_many_seconds_so_often() -> None:
    assert list(Schedule(every=3.0, count=4).delays()) == [3.0] * 4
    assert list(itertools.islice(Schedule(every=3.0).delays(), 99)) == [3.0] * 99


@given(st.integers(0, 1000), st.floats(0.01, 1000.0))
def test_random_times_are_the_same_for_the_same_seed(seed: int, mtbf: float) -> None:
    first, second = (list(Schedule(mtbf=mtbf, seed=seed, count=20).delays()) for _ in range(2))
    assert first == second
    assert first != list(Schedule(mtbf=mtbf, seed=seed + 1, count=20).delays())
    assert all(delay >= 0 for delay in first)


def test_random_times_are_so_far_apart_on_average() -> None:
    assert statistics.mean(Schedule(mtbf=10.0, seed=3, count=5000).delays()) == pytest.approx(10.0, rel=0.05)


def test_a_drill_of_a_file_waits_for_its_time_and_its_step() -> None:
    plan = DrillPlan(kind=DrillKind.HANG, rank=0, after=2.0, at_step=7)
    assert not is_ready(plan, status(step=7), 1.9)
    assert not is_ready(plan, status(step=6), 9.0)
    assert not is_ready(plan, status(step=None), 9.0)
    assert is_ready(plan, status(step=7), 2.0)


# --- whom ---


@pytest.mark.parametrize("kind", list(DrillKind))
def test_random_targets_are_the_same_for_the_same_seed_and_live(kind: DrillKind) -> None:
    now = status(rank1="gone", node1="lost")
    first, second = ([aim.choose(kind, now) for _ in range(30)] for aim in (Aim(5), Aim(5)))
    assert first == second
    for target in first:
        assert target is not None
        rank, node = target
        assert (rank in (0, 2, 3)) != (node in ("node0", "node2"))


def test_nodes_without_ranks_are_hit_by_what_harms_spares_only() -> None:
    now = status()
    assert {Aim(seed).choose(DrillKind.KILL_NODE, now) for seed in range(40)} == {(-1, "node0"), (-1, "node1")}
    assert {Aim(seed).choose(DrillKind.FAIL_SPARE, now) for seed in range(40)} == {(-1, "node2")}
    assert {Aim(seed).choose(DrillKind.KILL_WORKER, now) for seed in range(40)} == {(rank, "") for rank in range(4)}
    assert Aim(0).choose(DrillKind.KILL_WORKER, status(ranks=0)) is None


# --- files ---


def test_a_file_has_one_drill_a_line_and_comments() -> None:
    text = "# morning\n\nkill-node --node 1 --after 20   # power\n  slow 3 --rank 0 --duration 5\n"
    assert read_plans(text, "f") == [
        DrillPlan(kind=DrillKind.KILL_NODE, node="1", after=20.0),
        DrillPlan(kind=DrillKind.SLOW, rank=0, value=3.0, duration=5.0),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "f has no drill in it"),
        ("# nothing\n", "f has no drill in it"),
        ("hang --rank 0\nkil-node --node 1", "f, line 2: no such drill: kil-node"),
        ("kill-supervisor", "f, line 1: without its supervisor nobody sees"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_with_its_line(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        read_plans(text, "f")
    assert caught.value.hint


# --- what is said ---


@pytest.mark.parametrize(
    ("drilled", "line", "recovered"),
    [
        (
            Drilled("exit rank 1 on node0", 0.02, 1.5, 0.5, 1, over=True),
            "exit rank 1 on node0: detected in 0.02 s, recovered in 1.50 s, 1 steps lost, fully redundant 0.50 s later",
            True,
        ),
        (Drilled("hang rank 1"), "hang rank 1: not over in time", False),
        (Drilled("hang rank 1", over=True), "hang rank 1: nobody was disturbed, not recovered", False),
        (Drilled("slow 3 on rank 1", 6.0, over=True, harmless=True), "slow 3 on rank 1: noticed in 6.00 s", True),
        (Drilled("fail-spare node2", over=True, harmless=True), "fail-spare node2: nobody was disturbed", True),
        (Drilled("exit", why="there is no rank 9"), "exit: there is no rank 9", False),
    ],
)
def test_each_drill_has_its_line(drilled: Drilled, line: str, recovered: bool) -> None:
    assert (drilled.line(), drilled.recovered) == (line, recovered)


def test_in_the_end_all_are_summed_up() -> None:
    drills = [Drilled("a", 0.1, 1.0, 0.1, 1, over=True), Drilled("b", 0.1, 2.5, 0.1, 0, over=True), Drilled("c")]
    assert summary(drills) == "2 of 3 drills recovered, 1 steps lost, the longest recovery took 2.50 s"
