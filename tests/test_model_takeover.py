"""A supervisor may die at any moment, and another one take over: never do two generations compute, and all goes on."""

from __future__ import annotations

import pytest
from model.exploration import Broken, Exploration, explore
from model.takeover import Claims, Node, Takeover

from phoenix_launch.job import resuming
from phoenix_launch.job.state import Rung, State
from phoenix_launch.node.fencing import Allegiance
from phoenix_launch.wire import Generation

LIMIT = 150_000


def explored(model: Takeover) -> Exploration:
    found = explore(model.begin, model.ways, model.over, LIMIT)
    print(f"{found.states} states, {found.moves} moves; taken over as it was {model.adopted}, anew {model.anew}")
    return found


def test_a_job_goes_on_whenever_its_supervisor_dies() -> None:
    model = Takeover(faults=0)
    assert explored(model).states > 1_000
    assert model.adopted and model.anew
    assert model.rungs >= {Rung.START, Rung.IN_PLACE, Rung.FROM_SLOTS}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fault_before_or_after_its_death_or_a_plan_that_is_half_sent_lose_nothing() -> None:
    model = Takeover(faults=1)
    assert explored(model).states > 50_000
    assert model.adopted and model.anew


def lost_somewhere(model: Takeover) -> str:
    with pytest.raises(Broken) as broken:
        explored(model)
    print(broken.value)
    return str(broken.value)


def test_going_on_with_a_plan_that_is_half_sent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "runs", lambda *_: True)
    assert lost_somewhere(Takeover(faults=1))


@pytest.mark.slow
def test_a_takeover_in_the_old_term_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "following", property(lambda its: Generation(1, its.generation.n + 1)))
    assert lost_somewhere(Takeover(faults=1))


def test_fewer_than_most_nodes_are_not_enough() -> None:
    assert "compute at once" in lost_somewhere(Takeover(faults=0, nodes=4, quorum=2, trains=False))


@pytest.mark.slow
def test_most_nodes_are_not_enough_when_none_of_them_trains() -> None:
    assert "compute at once" in lost_somewhere(Takeover(faults=0, nodes=5, trains=False))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "broken", [{"deaf": False}, {"fences": False}], ids=["old plans are heard", "nothing is fenced"]
)
def test_nodes_that_hear_the_old_supervisor_or_never_end_what_cannot_go_on_are_found(broken: dict[str, bool]) -> None:
    assert lost_somewhere(Takeover(faults=1, deaf=broken.get("deaf", True), fences=broken.get("fences", True)))


@pytest.mark.parametrize("terms", [(2, 2), (2, 3)])
def test_of_two_that_take_over_at_once_no_two_have_one_term(terms: tuple[int, int]) -> None:
    model = Claims(terms)
    assert explore(model.start, model.moves, lambda _: True, LIMIT).states > 100


def test_a_term_that_may_be_promised_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def promise(its: Allegiance, term: int, claimant: str) -> bool:
        if term < max(its.term, its.promised):
            return False
        its.promised, its.claimant = term, claimant
        return True

    def follow(its: Allegiance, term: int, _: str) -> bool:
        if term < its.promised:
            return False
        its.term = its.promised = term
        return True

    monkeypatch.setattr(Allegiance, "promise", promise)
    monkeypatch.setattr(Allegiance, "follow", follow)
    model = Claims((2, 2))
    with pytest.raises(Broken, match="one term"):
        explore(model.start, model.moves, lambda _: True, LIMIT)


def test_a_node_takes_no_lower_term_after_a_higher_one() -> None:
    node, granted = Node().asked(3, "b", take=False)
    assert granted and not node.asked(2, "a", take=True)[1] and not node.asked(3, "a", take=True)[1]
    assert node.asked(3, "b", take=True) == (Node(3, 3, "b"), True)
    assert node.asked(4, "a", take=False)[1]
