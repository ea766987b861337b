"""Ranks that are said to hold the same are compared; what differs is found by name, on all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from phoenix_runtime import TrainState
from phoenix_runtime.checkpoint.bundles import Bundle, bundled, replicated, withdraw, withdrawn
from phoenix_runtime.checkpoint.fingerprints import (
    EVERY,
    FIRST,
    Rows,
    differing,
    is_due,
    tensor_sum,
    unequal,
    withdrawal,
)

SECONDS = 20.0
T = TypeVar("T")


def compared(held: Sequence[Sequence[Bundle]]) -> list[dict[str, tuple[str, ...]]]:
    return exchanged(differing, held)


def exchanged(
    compare: Callable[[Sequence[Bundle], Callable[[Rows], Sequence[Rows]]], T], held: Sequence[Sequence[Bundle]]
) -> list[T]:
    """What each rank finds, and that all took part in the same exchanges."""
    every: list[list[Rows | None]] = []
    meeting = threading.Barrier(len(held), timeout=SECONDS)

    def exchange_of(rank: int) -> Callable[[Rows], Sequence[Rows]]:
        rounds = iter(range(3))

        def exchange(rows: Rows) -> Sequence[Rows]:
            number = next(rounds)
            if meeting.wait() == 0 and len(every) == number:
                every.append([None] * len(held))
            meeting.wait()
            every[number][rank] = rows
            meeting.wait()
            return [rows for rows in every[number] if rows is not None]

        return exchange

    with ThreadPoolExecutor(len(held)) as pool:
        return list(pool.map(lambda rank: compare(held[rank], exchange_of(rank)), range(len(held))))


def bundle(key: str, holders: tuple[int, ...], **tensors: Tensor) -> Bundle:
    return Bundle(key, holders, list(tensors.items()), [""] * len(tensors))


def test_ranks_that_hold_the_same_find_nothing() -> None:
    w = torch.randn(5, 3)
    assert compared([[bundle("ranks 0-1", (0, 1), w=w)], [bundle("ranks 0-1", (0, 1), w=w.clone())]]) == [{}, {}]


def test_what_differs_is_found_by_name_on_all_its_holders_and_on_nobody_else() -> None:
    w, v = torch.randn(5), torch.randn(3)
    shared = ("ranks 0-2", (0, 1, 2))
    held = [
        [bundle(*shared, w=w, v=v), bundle("rank 0", (0,), own=torch.randn(2))],
        [bundle(*shared, w=w, v=v + 1), bundle("ranks 1,3", (1, 3), x=w)],
        [bundle(*shared, w=w, v=v)],
        [bundle("ranks 1,3", (1, 3), x=w)],
    ]
    assert compared(held) == [{"ranks 0-2": ("v",)}] * 3 + [{}]


def test_a_tensor_that_only_some_holders_have_is_let_alone() -> None:
    w = torch.zeros(4)
    one, other = bundle("ranks 0-1", (0, 1), w=w, m=w), bundle("ranks 0-1", (0, 1), w=w)
    assert compared([[one], [other]]) == [{}, {}], "no value is another than somebody else's"


def test_what_a_rank_has_alone_is_not_compared() -> None:
    assert compared([[bundle("rank 0", (0,), w=torch.zeros(2))], [bundle("rank 1", (1,), w=torch.ones(2))]]) == [{}, {}]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(7, 3), torch.randn(9).to(torch.bfloat16)[1:], torch.randint(0, 5, (11,)), torch.tensor(3.0),
        torch.empty(0, 4), torch.randn(4, 6).t(), torch.randn(3, dtype=torch.complex64), torch.ones(3).bool(),
        torch.randn(5, dtype=torch.complex64).conj(), torch.randn(40).half()[3::2],
    ],
)  # fmt: skip
def test_a_fingerprint_is_of_the_values_and_not_of_how_they_lie_in_memory(tensor: Tensor) -> None:
    assert tensor_sum(tensor) == tensor_sum(tensor.clone(memory_format=torch.contiguous_format))
    if tensor.numel():
        changed = torch.cat([tensor.flatten()[:-1], (tensor.flatten()[-1:] * 0 + 7)]).view(tensor.shape)
        assert tensor_sum(changed) != tensor_sum(tensor)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30))
def test_a_fingerprint_fits_into_a_word(values: list[int]) -> None:
    assert -(2**63) <= tensor_sum(torch.tensor(values, dtype=torch.int64)) < 2**63


def test_who_says_nothing_of_a_thing_does_not_differ() -> None:
    assert unequal([[(1, 5), (2, 6)], [(2, 6)], []]) == frozenset()
    assert unequal([[(1, 5), (2, 6)], [(2, 7)], [(1, 5)]]) == {2}


def test_comparisons_come_in_the_first_steps_and_then_now_and_then() -> None:
    assert [version for version in range(2 * EVERY + 2) if is_due(version)] == [*FIRST, EVERY, 2 * EVERY]


def test_a_withdrawn_tensor_is_each_ranks_own() -> None:
    model = nn.Linear(3, 2)
    replicated(model)
    state = TrainState(model=model)
    assert [each.key for each in bundled(state, 1, 4)] == ["ranks 0-3"]
    withdraw(state, ["model.bias"])
    found = {each.key: [name for name, _ in each.tensors] for each in bundled(state, 1, 4)}
    assert found == {"ranks 0-3": ["model.weight"], "rank 1": ["model.bias"]}
    assert withdrawn(state) == ("model.bias",)
    other = TrainState(model=model)
    assert [each.key for each in bundled(other, 1, 4)] == ["ranks 0-3"], "another state's claims stay"


def test_the_user_reads_one_line_with_names() -> None:
    assert withdrawal({"ranks 0-3": ("w",)}) == (
        "w should be equal on ranks 0-3 and is not: from now on each rank's own is copied"
    )
    assert "a, b, c and 2 more should be equal" in withdrawal({"ranks 0-3": ("a", "b", "c", "d", "e")})
