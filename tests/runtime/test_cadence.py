"""How often a version is copied: as asked, or as often as copies hide behind the steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phoenix_launch.settings import AUTO
from phoenix_runtime.checkpoint.cadence import ENOUGH, WIDEST, Cadence


@pytest.mark.parametrize(("asked", "ready"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4]), (5, [0, 5])])
def test_every_nth_version_is_copied(asked: int, ready: list[int]) -> None:
    cadence = Cadence(asked)
    assert [version for version in range(6) if cadence.ready(version)] == ready


def copies(cadence: Cadence, waited: float, number: int = ENOUGH) -> int:
    for _ in range(number):
        cadence.copied(waited, 1.0)
    return cadence.interval


def test_a_fixed_interval_stays_whatever_copies_cost() -> None:
    assert copies(Cadence(3), 0.9, 100) == 3


def test_copies_that_hold_up_training_become_rarer_and_more_frequent_again_when_they_hide() -> None:
    cadence = Cadence(AUTO)
    assert copies(cadence, 0.0) == 1
    assert [copies(cadence, 0.1) for _ in range(3)] == [2, 4, 8]
    assert copies(cadence, 0.01) == 8, "neither too much nor little enough for twice as many"
    assert [copies(cadence, 0.0) for _ in range(4)] == [4, 2, 1, 1]


def test_a_single_slow_copy_changes_nothing() -> None:
    cadence = Cadence(AUTO)
    assert copies(cadence, 0.05, 1) == 1
    assert copies(cadence, 0.0, ENOUGH - 1) == 1


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=200))
def test_what_is_found_is_a_power_of_two_within_bounds(measured: list[tuple[float, float]]) -> None:
    cadence = Cadence(AUTO)
    for waited, elapsed in measured:
        cadence.copied(waited, elapsed)
    assert 1 <= cadence.interval <= WIDEST and cadence.interval & (cadence.interval - 1) == 0
