"""What is fixed for the whole job is decided when its nodes are known, by the smallest of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from phoenix_launch.bus.keys import KeyPair
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.job.state import Member, NodeState, Phase, Rules, State
from phoenix_launch.messages import Prepare
from phoenix_launch.records.folders import JobFolder
from phoenix_launch.settings import RunSettings
from phoenix_launch.supervision.muster import Muster, Recruit
from phoenix_launch.supervision.opening import Job, Joining
from phoenix_launch.supervision.preparation import Preparation, gathered
from phoenix_launch.wire import Generation
from tests.test_preflight import fact

KEYS = KeyPair("public", "secret")


def state(nodes: int, phase: Phase = Phase.STARTING) -> State:
    members = {
        i: Member(index=i, name=f"h{i}", domain="d", slots=1, incarnation=f"i{i}", state=NodeState.STARTING)
        for i in range(nodes)
    }
    rules = Rules(seats_min=1, seats_max=2, join_timeout=600)
    return State(rules=rules, generation=Generation(1, 0), phase=phase, since=100.0, members=members)


class Crew:
    """What is read of a Muster: nodes by (machine, cores, workers)."""

    def __init__(self, *nodes: tuple[str, int, int], host: bool = False) -> None:
        self.recruits = {
            f"i{index}": Recruit(
                NodeSpec(index=index, name=f"n{index}", host=f"{machine}.example" if host else "", slots=workers),
                f"i{index}", KEYS, facts=fact(hostname=machine, cores=cores),
            )
            for index, (machine, cores, workers) in enumerate(nodes)
        }  # fmt: skip


def prepare(crew: Crew, given: State, *, joins: bool, said: list[str] | None = None) -> Prepare | None:
    joining = Joining((1, 2), KEYS) if joins else None
    job = Job(RunSettings(script="x"), {}, JobFolder(Path("/nowhere/job-1")), (), KEYS, "127.0.0.1", 0, joining)
    recruit = next(iter(crew.recruits.values()))
    told: list[Any] = [] if said is None else said
    return Preparation(job, cast(Muster, crew)).prepare(recruit, given, 110.0, told.append)


@pytest.mark.parametrize(
    ("nodes", "threads"),
    [
        ([("a", 64, 8), ("b", 16, 8)], "2"),
        ([("a", 16, 8), ("b", 64, 8)], "2"),
        ([("a", 64, 8), ("a", 64, 8)], "4"),  # one machine under two names
        ([("a", 4, 8), ("b", 64, 8)], "1"),
        ([("a", 8, 1), ("b", 16, 1)], None),
    ],
)
def test_the_smallest_of_the_hosts_that_joined_decides_on_threads(
    nodes: list[tuple[str, int, int]], threads: str | None
) -> None:
    told = prepare(Crew(*nodes), state(2), joins=True)
    assert told is not None and told.environment.get("OMP_NUM_THREADS") == threads
    assert prepare(Crew(*nodes), state(2), joins=False) == told


def test_nobody_loads_torch_before_it_is_decided() -> None:
    said: list[str] = []
    assert prepare(Crew(("a", 64, 8)), state(1), joins=True, said=said) is None
    assert said == []
    assert prepare(Crew(("a", 64, 8)), state(1), joins=False) is not None


def test_all_have_come_or_the_time_is_over_or_the_job_runs() -> None:
    assert not gathered(state(1), 700.0)
    assert gathered(state(2), 100.0)
    assert gathered(state(1), 700.1)
    assert gathered(state(1, Phase.RUNNING), 100.0)


def test_hosts_behind_ssh_count_each_for_itself() -> None:
    told = prepare(Crew(("a", 8, 4), ("b", 16, 4), host=True), state(2), joins=False)
    assert told is not None and told.environment["OMP_NUM_THREADS"] == "2"
