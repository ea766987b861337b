"""Which node gets which ranks, at the start and after a loss."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phoenix_launch.job.placement import Candidate, RankPlace, Seat, first_lineup, places, refilled


def node(index: int, slots: int = 1, domain: str = "", **more: object) -> Candidate:
    return Candidate(index=index, slots=slots, domain=domain or f"rack{index}", **more)  # type: ignore[arg-type]


def nodes_of(lineup: tuple[Seat, ...] | None) -> list[int] | None:
    return None if lineup is None else [seat.node for seat in lineup]


# --- the first line-up -----------------------------------------------------------------------------------------------


def test_nodes_sit_in_the_order_of_their_indices_whatever_order_they_came_in() -> None:
    assert nodes_of(first_lineup([node(2), node(0), node(1)], 3)) == [0, 1, 2]


def test_there_is_no_lineup_while_nodes_are_missing() -> None:
    assert first_lineup([node(0)], 2) is None


def test_a_spare_node_gets_a_seat_only_where_a_training_node_is_missing() -> None:
    spare = node(2, spare=True)
    assert nodes_of(first_lineup([node(0), node(1), spare], 2)) == [0, 1]
    assert nodes_of(first_lineup([node(1), spare], 2)) == [1, 2]


def test_a_fixed_node_rank_is_the_seat() -> None:
    assert nodes_of(first_lineup([node(0, group_rank=1), node(1, group_rank=0)], 2)) == [1, 0]


def test_nodes_without_a_fixed_rank_fill_the_seats_between_the_fixed_ones() -> None:
    assert nodes_of(first_lineup([node(0), node(1, group_rank=0), node(2)], 3)) == [1, 0, 2]


@pytest.mark.parametrize("rank", [2, 7])
def test_a_fixed_rank_beyond_the_last_seat_is_any_seat(rank: int) -> None:
    assert nodes_of(first_lineup([node(0, group_rank=rank), node(1)], 2)) == [0, 1]


def test_of_two_nodes_that_claim_one_rank_both_get_a_seat() -> None:
    assert sorted(nodes_of(first_lineup([node(0, group_rank=1), node(1, group_rank=1)], 2)) or []) == [0, 1]


# --- after a loss ----------------------------------------------------------------------------------------------------

PAIR = (Seat(0, 2), Seat(1, 2))


def test_the_spare_takes_the_seat_of_the_lost_node_and_nobody_else_moves() -> None:
    assert refilled(PAIR, [node(1, 2), node(2, 2)], 2) == (Seat(2, 2), Seat(1, 2))


def test_a_spare_with_too_few_slots_takes_nothing() -> None:
    assert refilled(PAIR, [node(1, 2), node(2, 1)], 2) is None


def test_a_spare_that_is_larger_runs_no_more_ranks_than_were_lost() -> None:
    assert refilled(PAIR, [node(1, 2), node(2, 8)], 2) == (Seat(2, 2), Seat(1, 2))


def test_the_spare_with_the_fewest_slots_to_spare_is_taken() -> None:
    assert nodes_of(refilled(PAIR, [node(1, 2), node(2, 8), node(3, 2)], 2)) == [3, 1]


def test_the_spread_over_failure_domains_is_kept() -> None:
    near, far = node(2, 2, "rack1"), node(3, 4, "rack2")
    assert nodes_of(refilled(PAIR, [node(1, 2, "rack1"), near, far], 2)) == [3, 1]


def test_two_lost_nodes_are_replaced_in_two_failure_domains() -> None:
    spares = [node(2, 2, "a"), node(3, 2, "a"), node(4, 2, "b")]
    assert nodes_of(refilled(PAIR, spares, 2)) == [2, 4]


def test_a_node_that_is_not_ready_keeps_its_seat() -> None:
    assert refilled(PAIR, [node(0, 2, ready=False), node(1, 2), node(2, 2)], 2) == PAIR


def test_a_node_that_is_not_ready_takes_no_other_seat() -> None:
    assert refilled(PAIR, [node(1, 2), node(2, 2, ready=False)], 2) is None


def test_an_elastic_lineup_closes_up_over_the_empty_seat() -> None:
    assert refilled((Seat(0, 2), Seat(1, 2), Seat(2, 2)), [node(0, 2), node(2, 2)], 2) == (Seat(0, 2), Seat(2, 2))


def test_an_elastic_lineup_takes_the_spares_there_are_before_it_shrinks() -> None:
    lineup = (Seat(0, 1), Seat(1, 1), Seat(2, 1))
    assert nodes_of(refilled(lineup, [node(2), node(3)], 1)) == [3, 2]


def test_an_elastic_lineup_does_not_shrink_below_its_minimum() -> None:
    assert refilled((Seat(0, 1), Seat(1, 1), Seat(2, 1)), [node(2)], 2) is None


# --- ranks -----------------------------------------------------------------------------------------------------------


def test_ranks_are_dealt_out_seat_by_seat() -> None:
    assert places((Seat(4, 2), Seat(1, 1))) == (
        RankPlace(0, 0, 4, 0, 2),
        RankPlace(1, 1, 4, 0, 2),
        RankPlace(2, 0, 1, 1, 1),
    )


@st.composite
def _candidates(draw: st.DrawFn) -> list[Candidate]:
    indices = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True))
    return [
        node(
            index,
            draw(st.integers(1, 4)),
            draw(st.sampled_from("abc")),
            group_rank=draw(st.integers(-1, 4)),
            spare=draw(st.booleans()),
            ready=draw(st.booleans()),
        )
        for index in indices
    ]


@settings(max_examples=60, derandomize=True, deadline=None, print_blob=True)
@given(_candidates(), st.integers(1, 6))
def test_a_first_lineup_gives_each_seat_to_another_node(candidates: list[Candidate], seats: int) -> None:
    lineup = first_lineup(candidates, seats)
    if lineup is None:
        assert len(candidates) < seats
        return
    assert len(lineup) == len({seat.node for seat in lineup}) == seats
    slots = {c.index: c.slots for c in candidates}
    assert all(slots[seat.node] == seat.slots for seat in lineup)


@settings(max_examples=60, derandomize=True, deadline=None, print_blob=True)
@given(_candidates(), _candidates(), st.integers(1, 4))
def test_a_refilled_lineup_moves_nobody_who_lives(
    before: list[Candidate], alive: list[Candidate], at_least: int
) -> None:
    lineup = tuple(Seat(c.index, c.slots) for c in before)
    result = refilled(lineup, alive, at_least)
    living = {c.index: c for c in alive}
    stayed = [seat for seat in lineup if seat.node in living]
    if result is None:
        assert len(stayed) < at_least
        return
    assert len(result) == len({seat.node for seat in result}) >= at_least
    assert [seat for seat in result if seat in stayed] == stayed
    for seat in result:
        if seat not in stayed:
            assert living[seat.node].ready and living[seat.node].slots >= seat.slots
    assert len(places(result)) == sum(seat.slots for seat in result)
