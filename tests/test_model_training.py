"""The commit rule and the plan of a recovery hold in every state of a small job; and each of them is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from model.exploration import Broken, Exploration, explore, wander
from model.training import Rules, Training
from model.worlds import replicated, sharded

from phoenix_launch.copies import Slot
from phoenix_launch.job import commit, recovery
from phoenix_launch.job.commit import CopyPlan, Lineage, Round, SlotPair, Vote

LIMIT = 200_000
WALKS = 60
WALK = 120  # moves: some five steps
NO_NODE, NO_VERSION, NO_SLOT = "no node", "no version", "no slot"


def explored(model: Training) -> Exploration:
    found = explore(model.start, model.moves, model.goal, LIMIT)
    print(f"{found.states} states, {found.moves} moves, {found.faulty} of them faults, {found.ends} ends")
    return found


def test_without_a_fault_training_goes_on_for_ever() -> None:
    found = explored(Training(replicated(2), faults=0))
    assert found.states > 300
    assert found.ends == 0


@pytest.mark.parametrize(
    ("bundles", "at_least", "ends"),
    [(sharded(2), 10_000, {NO_NODE, NO_VERSION}), (replicated(2), 40_000, {NO_NODE, NO_VERSION, NO_SLOT})],
    ids=["shards", "replicas-and-private-state"],
)
def test_two_faults_at_any_moment_leave_a_common_version_or_a_bundle_without_any_copy(
    bundles: tuple[commit.Bundle, ...], at_least: int, ends: set[str]
) -> None:
    """Or with one that no slot has yet: until the first version of a generation is complete, the state of a rank that lives is
    out of reach for others."""
    model = Training(bundles, faults=2)
    found = explored(model)
    assert found.states > at_least
    assert model.ends == ends


def test_leaving_out_versions_loses_no_more_than_the_interval() -> None:
    found = explored(Training(sharded(2), faults=1, skips=True))
    assert found.states > 4_000


@pytest.mark.parametrize(
    ("bundles", "rules", "ends"),
    [
        (sharded(3), Rules(), {NO_NODE, NO_VERSION}),
        (replicated(3), Rules(), {NO_NODE, NO_VERSION, NO_SLOT}),
        (replicated(3), Rules(plan=recovery.plan), {NO_NODE, NO_VERSION}),
    ],
    ids=["shards", "replicas-and-private-state", "replicas-that-are-given-away"],
)
def test_random_ways_of_a_job_of_three_nodes_with_three_faults_keep_the_promises(
    bundles: tuple[commit.Bundle, ...], rules: Rules, ends: set[str]
) -> None:
    model = Training(bundles, faults=3, rules=rules)
    moves = sum(wander(model.start, model.moves, model.goal, seed, length=WALK, calm=0.99) for seed in range(WALKS))
    assert moves > WALKS * WALK / 2
    assert model.ends == ends


# --- each piece of the rule is needed: with something wrong in its place the exploration finds a way to lose the job -------


def own_slots_only(plan: CopyPlan, node: int, decided: Round | None, kept: commit.Kept, lineage: Lineage) -> bool:
    return commit.may_step(CopyPlan(tuple(c for c in plan.copies if c.node == c.origin)), node, decided, kept, lineage)


def no_waiting(plan: CopyPlan, node: int, decided: Round | None, kept: commit.Kept, lineage: Lineage) -> bool:
    return decided is not None


def no_second_round(plan: CopyPlan, node: int, decided: Round | None, kept: commit.Kept, lineage: Lineage) -> bool:
    return commit.may_step(plan, node, decided and replace(decided, first=False), kept, lineage)


def any_slot(pair: SlotPair, complete: int, lineage: Lineage) -> int | None:
    """The newest copy, complete or not, is overwritten."""
    return max((0, 1), key=lambda index: -1 if pair[index] is None else pair[index].stamp.version)  # type: ignore[union-attr]


def free_at_once(its: Slot | None, complete: int, lineage: Lineage) -> bool:
    return True


def first_version_left_out(votes: Sequence[Vote], resume: int) -> Round:
    return replace(commit.agreed(votes, resume=commit.NO_VERSION), first=False)


def newest_of_each(*given: object) -> recovery.Recovery | None:
    """Every rank takes the newest that it finds, whatever the others take: here, the survivor keeps what it has."""
    found = recovery.plan(*given, from_holders=False)  # type: ignore[arg-type]
    if found is None:
        return None
    survivors: Sequence[recovery.Survivor] = given[1]  # type: ignore[assignment]
    live = [s.live for s in survivors if s.live is not None]
    return replace(found, stamp=max(live)) if live else found


@dataclass(frozen=True, slots=True)
class Mistake:
    name: str
    rules: Rules
    found: str  # what the exploration says


MISTAKES = (
    Mistake("the first optimizer waits for its own slots only", Rules(may_step=own_slots_only), "steps are lost"),
    Mistake("the first optimizer does not wait", Rules(may_step=no_waiting), "changes what is being copied"),
    Mistake("no second round on the first version", Rules(may_step=no_second_round), "nothing is complete"),
    Mistake("the newest slot is overwritten", Rules(slot_to_fill=any_slot), "nothing is complete"),
    Mistake("each rank decides for itself what it copies", Rules(local_decisions=True), "nothing is complete"),
    Mistake("a survivor offers what its optimizer has begun to change", Rules(dirty_offers=True), "is not there"),
    Mistake("a survivor that is ahead stays there", Rules(plan=newest_of_each), "is not there"),
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_in_the_rules_is_found(mistake: Mistake) -> None:
    model = Training(sharded(2), faults=1, rules=mistake.rules)
    with pytest.raises(Broken, match=mistake.found):
        explore(model.start, model.moves, model.goal, LIMIT)


def test_a_first_version_that_may_be_left_out_is_found() -> None:
    model = Training(sharded(2), faults=1, skips=True, rules=Rules(agreed=first_version_left_out))
    with pytest.raises(Broken, match="stuck"):
        explore(model.start, model.moves, model.goal, LIMIT)


def test_a_rule_without_lineage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit.Lineage, "loadable", lambda *_: True)
    model = Training(sharded(2), faults=2)
    with pytest.raises(Broken, match="a version is lost that was complete"):
        explore(model.start, model.moves, model.goal, LIMIT)


def test_a_generation_that_keeps_all_it_found_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "complete_at_resume", lambda *_: commit.NO_VERSION)
    model = Training(sharded(2), faults=1)
    with pytest.raises(Broken, match="stuck"):
        explore(model.start, model.moves, model.goal, LIMIT)


def test_a_source_that_is_freed_too_early_is_found() -> None:
    """Only with three nodes is there a place that keeps what a swap needs and that the new plan does not name."""
    model = Training(sharded(3), faults=3, rules=Rules(may_free=free_at_once))
    with pytest.raises(Broken, match="slots alone have no common version"):
        for seed in range(WALKS):
            wander(model.start, model.moves, model.goal, seed, length=WALK, calm=0.99)
