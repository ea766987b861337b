"""A start that takes long says what it waits for, and each signal to an end under way says what it does."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import cast

import pytest

from phoenix_launch.bus.keys import KeyPair
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.job.state import Member, NodeState, Phase, Rules, State
from phoenix_launch.supervision.muster import Muster, Recruit
from phoenix_launch.supervision.start_words import REPEAT, SLOW, Progress, StartWords, hurried, progress
from phoenix_launch.wire import Generation
from tests.test_preflight import fact


def member(index: int, state: NodeState = NodeState.STARTING) -> Member:
    name = f"h{index}"
    return Member(index=index, name=name, domain=name, slots=1, incarnation=name, state=state)


def job(phase: Phase = Phase.STARTING, members: Mapping[int, Member] | None = None, grace: float = 0.0) -> State:
    rules = Rules(seats_min=1, seats_max=3, join_timeout=600)
    return State(rules=rules, generation=Generation(1, 0), phase=phase, since=100.0, members=members or {}, grace=grace)


class Crew:
    """What is read of a Muster."""

    def __init__(self, *heard: bool, complete: bool = False) -> None:
        self.complete = complete
        self.waiting: list[NodeSpec] = []
        self.recruits = {
            str(index): Recruit(
                NodeSpec(index=index, name=f"h{index}", host=f"h{index}"), str(index), KeyPair("", ""), launched=100.0,
                facts=fact() if here else None,
            )
            for index, here in enumerate(heard)
        }  # fmt: skip

    def given(self) -> Muster:
        return cast(Muster, self)


def test_a_quick_start_needs_no_words() -> None:
    words, waiting = StartWords(), Progress(["a"], 2, 600, 1)
    assert [words.due(waiting, now) for now in (0.0, SLOW - 0.1)] == ["", ""]
    assert words.due(Progress([], 0, 0, 0), SLOW) == ""


def test_a_slow_loading_is_said_once() -> None:
    words, loading = StartWords(), Progress([], 0, 0, 2)
    said = [words.due(loading, now) for now in (5.0, 5.0 + SLOW, 60.0)]
    assert said == ["", "loading torch and the script's imports on 2 nodes ...", ""]


def test_who_is_here_is_said_when_it_changes_and_now_and_then() -> None:
    words = StartWords()
    words.due(Progress(["a"], 3, 600, 0), 0.0)
    first = words.due(Progress(["a"], 3, 598, 0), SLOW)
    assert first == "1 of 3 hosts here (node a); waiting up to 598 s for the others"
    assert words.due(Progress(["a"], 3, 590, 0), SLOW + 8) == ""
    more = words.due(Progress(["a", "b"], 3, 580, 0), SLOW + 10)
    assert more == "2 of 3 hosts here (nodes a, b); waiting up to 580 s for the other"
    assert words.due(Progress(["a", "b"], 3, 560, 0), SLOW + 10 + REPEAT - 1) == ""
    assert words.due(Progress(["a", "b"], 3, 550, 0), SLOW + 10 + REPEAT)
    assert words.due(Progress(["a", "b", "c"], 3, 540, 0), SLOW + 90) == ""


def test_a_long_list_of_hosts_is_cut() -> None:
    words = StartWords(began=0.0)
    assert "h0, h1, h2, h3, h4, h5, h6, h7 and 92 more)" in words.due(
        Progress([f"h{n}" for n in range(100)], 101, 9, 0), SLOW
    )


def test_hosts_that_join_are_counted_against_nnodes_and_nodes_load_that_were_told_to() -> None:
    members = {0: member(0), 1: member(1, NodeState.READY), 2: member(2, NodeState.LOST)}
    found = progress(job(members=members), Crew(complete=True).given(), {"h0", "h1", "h2"}, 110.0, joins=True)
    assert found == Progress(["h0", "h1"], 3, 590.0, 1)
    assert progress(job(Phase.RUNNING), Crew().given(), (), 110.0, joins=True) is None


def test_hosts_behind_ssh_are_waited_for_until_all_have_said_what_they_are() -> None:
    found = progress(job(), Crew(True, False).given(), (), 110.0, joins=False)
    assert found == Progress(["h0"], 2, 20.0, 0)
    done = progress(job(members={0: member(0)}), Crew(True, complete=True).given(), {"h0"}, 110.0, joins=False)
    assert done == Progress((), 0, 0.0, 1)


@pytest.mark.parametrize(
    ("before", "after", "held", "said"),
    [
        (job(Phase.RUNNING), job(Phase.STOPPING, grace=30), False, ""),
        (job(Phase.STOPPING, grace=30), job(Phase.STOPPING, grace=3), False, "SIGINT again: workers have 3 s"),
        (job(Phase.STOPPING, grace=3), job(Phase.STOPPING), False, "SIGINT again: killing at once"),
        (job(Phase.STOPPING), job(Phase.STOPPING), False, ""),
        (job(Phase.LEAVING), job(Phase.LEAVING), False, ""),
        (job(Phase.LEAVING), job(Phase.LEAVING), True, "SIGINT again: not waiting for the reader of the output any longer"),
    ],
)  # fmt: skip
def test_one_more_signal_says_what_it_does(before: State, after: State, held: bool, said: str) -> None:
    assert hurried(signal.SIGINT, before, after, again=True, held=held) == said
