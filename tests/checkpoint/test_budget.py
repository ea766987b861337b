"""Copies that would not fit into a node's memory are refused before anything is overwritten, with the arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phoenix_launch.checkpoint.budget import RESERVE_BYTES, Demand, shortage

GIB = 1 << 30


def test_what_fits_is_not_spoken_of() -> None:
    assert shortage([Demand(GIB, 0)], 2 * GIB + RESERVE_BYTES) is None


def test_both_slots_of_a_pair_are_counted_and_what_is_there_already_is_not_asked_for_twice() -> None:
    assert shortage([Demand(GIB, GIB)], GIB + RESERVE_BYTES) is None
    assert shortage([Demand(GIB, GIB)], GIB + RESERVE_BYTES - 1)


def test_the_arithmetic_says_what_makes_up_the_need() -> None:
    pairs = [Demand(3 * GIB, 0), Demand(GIB, 2 * GIB), Demand(2 * GIB, 0, replica=True)]
    found = shortage(pairs, 5 * GIB)
    assert found is not None and found.words == (
        "copies in memory need 12 GiB (2 x 4 GiB for its own ranks + 2 x 2 GiB for replicas of other nodes), "
        "of which 2 GiB are there, 5 GiB are free and 256 MiB of it are not touched"
    )
    assert (found.need, found.limited, found.replicas) == (12 * GIB, False, True)


def test_the_users_own_limit_is_named_when_it_is_what_is_too_small() -> None:
    found = shortage([Demand(GIB, 0)], 100 * GIB, limit=GIB)
    assert found is not None and (found.need, found.limited, found.replicas) == (2 * GIB, True, False)
    assert found.words == "copies in memory need 2 GiB (2 x 1 GiB for its own ranks), --copy-memory allows 1 GiB"
    assert shortage([Demand(GIB, GIB)], 100 * GIB, limit=2 * GIB) is None


@pytest.mark.parametrize("free", [0.0, -1.0])
def test_no_memory_at_all_is_said_as_that(free: float) -> None:
    found = shortage([Demand(1, 0)], free)
    assert found is not None and "0 B are free" in found.words


@given(st.lists(st.builds(Demand, st.integers(0, 1 << 40), st.integers(0, 1 << 41), st.booleans())), st.integers(0))
def test_it_fits_exactly_when_what_is_missing_is_free(pairs: list[Demand], free: int) -> None:
    missing = sum(max(0, 2 * pair.slot - pair.present) for pair in pairs)
    assert (shortage(pairs, free) is None) == (missing <= free - RESERVE_BYTES)
