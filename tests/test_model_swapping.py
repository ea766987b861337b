"""Swaps come to an end over any bus and with faults at any moment, without two holders of a rank or a mixed state."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from model.exploration import Broken, Exploration, explore, wander
from model.swapping import Swapping

from phoenix_launch.job import holding, membership, swapping
from phoenix_launch.job.state import TRANSITIONS, Holder, Member, Phase, Rung, State
from phoenix_launch.wire import NO_GENERATION

LIMIT = 150_000
WALKS = 150
WALK = 80  # moves


@pytest.fixture(autouse=True)
def _every_change_of_phase_is_allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    enter = membership._Transition._enter

    def checked(self: Any, phase: Phase, **changes: Any) -> None:
        before: State = self.state
        enter(self, phase, **changes)
        assert phase is before.phase or phase in TRANSITIONS[before.phase], f"{before.phase} -> {phase}"

    monkeypatch.setattr(membership._Transition, "_enter", checked)
    yield


def explored(model: Swapping) -> Exploration:
    found = explore(model.start, model.moves, model.goal, LIMIT)
    print(
        f"{found.states} states, {found.moves} moves, {found.faulty} of them faults, {len(model.states)} of membership"
    )
    return found


def test_every_single_fault_is_repaired_in_place() -> None:
    model = Swapping(faults=1)
    assert explored(model).states > 500
    assert model.rungs == {Rung.START, Rung.IN_PLACE}
    assert not model.phases & {Phase.WAITING, Phase.STOPPING, Phase.LEAVING}


def test_two_faults_at_any_moment_are_repaired_or_end_the_job_for_want_of_nodes() -> None:
    model = Swapping(faults=2)
    assert explored(model).states > 60_000
    assert model.rungs == {Rung.START, Rung.IN_PLACE, Rung.FROM_SLOTS}
    assert model.phases >= {Phase.SWAPPING, Phase.WAITING, Phase.QUIESCING, Phase.STOPPING}


def test_two_faults_of_processes_of_which_one_is_rare_are_repaired() -> None:
    model = Swapping(faults=2, lost=False, cut=False, rare=True)
    assert explored(model).states > 4_000
    assert model.rungs == {Rung.START, Rung.IN_PLACE, Rung.FROM_SLOTS}
    assert not model.phases & {Phase.WAITING, Phase.STOPPING, Phase.LEAVING}


def test_random_ways_with_four_faults_keep_the_promises() -> None:
    model = Swapping(faults=4, rare=True)
    moves = sum(wander(model.start, model.moves, model.goal, seed, length=WALK, calm=0.93) for seed in range(WALKS))
    assert moves > 15 * WALKS
    assert model.rungs == set(Rung)


# --- what is needed for that: without it the exploration finds a way to fail --------------------------------------------


def lost_somewhere() -> str:
    model = Swapping(faults=2, cut=False)
    with pytest.raises(Broken) as broken:
        explored(model)
    print(broken.value)
    return str(broken.value)


def test_going_on_before_all_have_restored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership._Transition, "_restored", lambda _: True)
    assert "has not restored" in lost_somewhere()


def test_planning_before_the_nodes_have_said_what_they_keep_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership._Transition, "_not_quiet", lambda _: [])
    assert "given up although" in lost_somewhere()


def test_trusting_what_was_said_to_an_older_generation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "has_joined", lambda _, holder: holder.runtime is not None)
    monkeypatch.setattr(membership._Transition, "_not_quiet", _silent_nodes)
    assert "given up although" in lost_somewhere()


def _silent_nodes(work: membership._Transition) -> list[Member]:
    return [member for member in work.state.members.values() if member.alive and member.offered == NO_GENERATION]


def test_counting_on_a_process_that_may_never_have_been_started_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "Holder", partial(Holder, seen=True))
    assert "stuck" in lost_somewhere()


def test_waiting_for_a_survivor_that_never_comes_to_a_safe_point_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "cannot_stay", lambda _: "")
    with pytest.raises(Broken, match="stuck"):
        explored(Swapping(faults=2, lost=False, cut=False, rare=True))
