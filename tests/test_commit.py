"""The commit rule piece by piece; that the pieces together keep a common version is shown in test_model_training.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phoenix_launch.copies import Slot, Stamp
from phoenix_launch.job.commit import (
    EMPTY,
    NO_VERSION,
    Bundle,
    Copy,
    CopyPlan,
    Lineage,
    Round,
    SlotPair,
    Vote,
    agreed,
    complete_at_resume,
    complete_version,
    copy_plan,
    holds,
    intact,
    may_free,
    may_step,
    may_write,
    slot_to_fill,
)
from phoenix_launch.wire import Generation

G1, G2, G3 = (Generation(1, n) for n in (1, 2, 3))
FIRST = Lineage()
ALONE = Bundle("own0", (0,), private=True)
EVERYWHERE = Bundle("shared", (0, 1, 2, 3))
PAIRED = Bundle("pair", (0, 1))
PLACES = {0: 0, 1: 0, 2: 1, 3: 2}
DOMAINS = {0: "a", 1: "a", 2: "b"}


def slot(version: int, generation: Generation = G1, *, sealed: bool = True) -> Slot:
    return Slot(Stamp(generation, version), sealed=sealed)


def test_a_bundle_is_kept_once_on_every_node_where_it_lives() -> None:
    plan = copy_plan([EVERYWHERE], PLACES, DOMAINS)
    assert plan == CopyPlan((Copy("shared", 0, 0), Copy("shared", 1, 1), Copy("shared", 2, 2)))


def test_only_what_no_other_failure_domain_holds_goes_over_the_network_and_to_the_next_domain_of_the_ring() -> None:
    plan = copy_plan([ALONE, PAIRED], PLACES, DOMAINS)
    assert [copy for copy in plan.copies if copy.node != copy.origin] == [Copy("own0", 2, 0), Copy("pair", 2, 0)]
    last = copy_plan([Bundle("own3", (3,))], PLACES, DOMAINS)
    assert last.copies == (Copy("own3", 2, 2), Copy("own3", 0, 2))


def test_two_replicas_stand_in_two_domains() -> None:
    ring = {0: "a", 1: "b", 2: "b", 3: "c"}
    plan = copy_plan([Bundle("own", (0,))], {0: 0, 1: 1, 2: 2, 3: 3}, ring, replicas=2)
    assert [copy.node for copy in plan.copies] == [0, 1, 3]


def test_a_job_within_one_failure_domain_is_unprotected() -> None:
    assert copy_plan([ALONE], {0: 0, 1: 1}, {0: "a", 1: "a"}).unprotected == ("own0",)


def test_what_lies_beyond_the_resume_version_of_a_later_generation_is_void() -> None:
    lineage = FIRST.resumed(G2, 7)
    assert lineage.loadable(Stamp(G1, 7))
    assert not lineage.loadable(Stamp(G1, 8))
    assert lineage.loadable(Stamp(G2, 8))


def test_a_lineage_forgets_only_what_a_later_entry_says_too() -> None:
    lineage = FIRST.resumed(G2, 7).resumed(G3, 5)
    assert lineage.resumes == (Stamp(G3, 5),)
    grown = FIRST.resumed(G2, 7).resumed(G3, 9)
    assert not grown.loadable(Stamp(G1, 8))
    assert grown.loadable(Stamp(G2, 9))
    assert not grown.loadable(Stamp(G2, 10))


def test_a_torn_slot_and_an_empty_one_are_not_intact() -> None:
    assert not intact(None, FIRST)
    assert not intact(slot(3, sealed=False), FIRST)
    assert intact(slot(3), FIRST)


def test_only_the_current_generation_writes() -> None:
    assert may_write(G2, G2)
    assert not may_write(G1, G2)
    assert not may_write(G3, G2)


@pytest.mark.parametrize(("ready", "copied"), [((True, True), True), ((True, False), False)])
def test_a_version_is_copied_by_all_or_by_none(ready: tuple[bool, bool], copied: bool) -> None:
    assert agreed([Vote(5, 4, r) for r in ready], resume=0) == Round(5, copied, 4)


def test_the_version_at_which_a_generation_began_is_always_copied() -> None:
    assert agreed([Vote(5, NO_VERSION, ready=False), Vote(5, 5)], resume=5) == Round(5, True, NO_VERSION, first=True)


def test_what_all_have_sealed_is_complete() -> None:
    assert agreed([Vote(6, 4), Vote(6, 5), Vote(6, 5)], resume=0).complete == 4


def test_when_one_rank_knows_that_the_job_stops_all_copy_this_version_and_meet_again() -> None:
    votes = [Vote(6, 4, ready=False), Vote(6, 5, ready=False, halt=True)]
    assert agreed(votes, resume=0) == Round(6, True, 4, halt=True)


def test_votes_of_different_steps_are_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"\[5, 6\]"):
        agreed([Vote(5, 4), Vote(6, 5)], resume=0)


def test_an_optimizer_waits_for_the_round_and_for_every_copy_that_its_node_fills() -> None:
    plan = CopyPlan((Copy("own0", 0, 0), Copy("own0", 1, 0), Copy("own1", 1, 1)))
    own: SlotPair = (slot(4), slot(5))
    assert not may_step(plan, 0, None, {("own0", 0): own, ("own0", 1): own}, FIRST)
    chosen = Round(5, True, 4)
    assert may_step(plan, 0, chosen, {("own0", 0): own, ("own0", 1): own}, FIRST)  # own1 is not its concern
    assert not may_step(plan, 0, chosen, {("own0", 0): own, ("own0", 1): (slot(4), slot(5, sealed=False))}, FIRST)
    assert not may_step(plan, 0, chosen, {("own0", 0): own}, FIRST)


def test_an_optimizer_does_not_wait_for_a_version_that_is_left_out() -> None:
    plan = CopyPlan((Copy("own0", 0, 0),))
    assert may_step(plan, 0, Round(5, False, 4), {}, FIRST)


def test_the_first_optimizer_of_a_generation_waits_until_its_version_is_complete_everywhere() -> None:
    plan = CopyPlan((Copy("own0", 0, 0),))
    kept = {("own0", 0): (slot(5), None)}
    assert not may_step(plan, 0, Round(5, True, NO_VERSION, first=True), kept, FIRST)
    assert may_step(plan, 0, Round(5, True, 5, first=True), kept, FIRST)


def test_only_what_is_older_than_a_complete_version_is_freed() -> None:
    assert may_free(None, NO_VERSION, FIRST)
    assert may_free(slot(4), 5, FIRST)
    assert not may_free(slot(5), 5, FIRST)
    assert may_free(slot(6, sealed=False), 5, FIRST)
    assert may_free(slot(8), 5, FIRST.resumed(G2, 7))


def test_the_next_version_takes_the_slot_that_is_of_no_use() -> None:
    assert slot_to_fill(EMPTY, NO_VERSION, FIRST) == 0
    assert slot_to_fill((slot(5), None), NO_VERSION, FIRST) == 1
    assert slot_to_fill((slot(5), slot(4)), 5, FIRST) == 1
    assert slot_to_fill((slot(5), slot(4)), 4, FIRST) is None
    assert slot_to_fill((slot(8), slot(7)), NO_VERSION, FIRST.resumed(G2, 7)) == 0


def test_a_slot_that_a_swap_restored_from_stays_until_a_later_version_is_complete() -> None:
    lineage = FIRST.resumed(G2, 7)
    source: SlotPair = (slot(6), slot(7))
    begun = complete_at_resume(source, 7, lineage)
    assert [may_free(its, begun, lineage) for its in source] == [False, False]
    assert [may_free(its, 7, lineage) for its in source] == [True, False]
    assert [may_free(its, 8, lineage) for its in source] == [True, True]


def test_a_survivor_that_had_not_copied_the_resume_version_yet_overwrites_the_older_of_its_two() -> None:
    lineage = FIRST.resumed(G2, 7)
    late: SlotPair = (slot(5), slot(6))
    assert slot_to_fill(late, complete_at_resume(late, 7, lineage), lineage) == 0


def test_a_version_that_is_there_need_not_be_copied_again() -> None:
    assert holds((slot(7), None), 7, FIRST.resumed(G2, 7))
    assert not holds((slot(8), None), 8, FIRST.resumed(G2, 7))


def test_complete_means_every_copy_of_the_plan() -> None:
    plan = CopyPlan((Copy("own0", 0, 0), Copy("own0", 1, 0)))
    kept: dict[tuple[str, int], SlotPair] = {("own0", 0): (slot(4), slot(5)), ("own0", 1): (slot(3), slot(4))}
    assert complete_version(plan, kept, FIRST) == 4
    assert complete_version(plan, {}, FIRST) == NO_VERSION


def test_the_nodes_of_a_domain_share_the_replicas_of_another_one() -> None:
    domains = {node: "ab"[node // 4] for node in range(8)}
    places = {rank: rank for rank in range(8)}
    table = [Bundle(f"own{rank}", (rank,)) for rank in range(8)]
    plan = copy_plan(table, places, domains)
    partners = {copy.origin: copy.node for copy in plan.copies if copy.node != copy.origin}
    assert partners == {node: (node + 4) % 8 for node in range(8)}


@given(
    domains=st.lists(st.sampled_from("abcde"), min_size=1, max_size=10),
    replicas=st.integers(0, 4),
    distance=st.integers(1, 12),
)
def test_replicas_stand_in_as_many_other_domains_as_there_are(domains: list[str], replicas: int, distance: int) -> None:
    of_node = dict(enumerate(domains))
    for node in of_node:
        plan = copy_plan([Bundle("own", (0,))], {0: node}, of_node, replicas=replicas, distance=distance)
        where = [of_node[copy.node] for copy in plan.copies]
        assert len(set(where)) == len(where) == 1 + min(replicas, len(set(domains)) - 1)
        assert plan.unprotected == (() if len(where) > 1 else ("own",))
