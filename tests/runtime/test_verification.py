"""Who has other bits than most holders: a strict majority names them, and where there is none nobody is blamed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_fingerprints import bundle, exchanged
from torch import Tensor, nn

from phoenix_launch.messages import Ground
from phoenix_runtime.checkpoint.bundles import Bundle, private_bundle
from phoenix_runtime.checkpoint.copies import copies_of, sound
from phoenix_runtime.checkpoint.verification import Verdict, blamed_of, is_due, odd_ones, verified
from phoenix_runtime.drills import flip_bits

ALL = ("ranks 0-3", (0, 1, 2, 3))


def verdicts(held: list[list[Bundle]]) -> list[Verdict]:
    return exchanged(verified, held)


def spoilt(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    flip_bits([copy])
    return copy


def test_equal_replicas_need_one_exchange_and_blame_nobody() -> None:
    w = torch.randn(9)
    assert verdicts([[bundle(*ALL, w=w.clone())] for _ in range(4)]) == [Verdict()] * 4


def test_the_odd_one_is_named_with_its_tensor_by_all_and_known_to_those_who_hold_nothing_of_it() -> None:
    w, v = torch.randn(9), torch.randn(5)
    three = ("ranks 0-2", (0, 1, 2))
    held = [
        [bundle(*three, v=v, w=w)],
        [bundle(*three, v=v, w=spoilt(w))],
        [bundle(*three, v=v, w=w)],
        [bundle("rank 3", (3,), x=w)],
    ]
    *of_holders, other = verdicts(held)
    for verdict in of_holders:
        assert verdict.blamed == {1}
        assert [(f.bundle, f.tensors, f.odd) for f in verdict.findings] == [("ranks 0-2", ("w",), (1,))]
        assert verdict.unclear == {}
    assert other == Verdict((), frozenset({1}))


@pytest.mark.parametrize("holders", [(0, 1), (0, 1, 2, 3)])
def test_without_a_strict_majority_nobody_is_blamed(holders: tuple[int, ...]) -> None:
    w = torch.randn(9)
    half = len(holders) // 2
    held = [[bundle("shared", holders, w=w if rank < half else spoilt(w))] for rank in holders]
    for verdict in verdicts(held):
        assert verdict.blamed == frozenset()
        assert verdict.unclear == {"shared": ("w",)}


@given(st.integers(3, 9), st.data())
def test_fewer_than_half_are_always_found_out(ranks: int, data: st.DataObject) -> None:
    odd = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=(ranks - 1) // 2))
    rows = [[(7, 100 + (rank if rank in odd else -1)), (8, 5)] for rank in range(ranks)]
    assert odd_ones(rows) == {7: odd}
    assert blamed_of(rows, odd_ones(rows)) == odd


def test_nobody_is_blamed_where_no_majority_of_holders_would_be_left() -> None:
    rows = [[(number, 1 if number == rank else 0) for number in range(3)] for rank in range(3)]
    assert odd_ones(rows) == {0: {0}, 1: {1}, 2: {2}}
    assert blamed_of(rows, odd_ones(rows)) == frozenset()


def test_it_is_due_every_so_many_versions_after_the_first_ones() -> None:
    assert [version for version in range(9) if is_due(version, 1)] == [4, 5, 6, 7, 8]
    assert [version for version in range(31) if is_due(version, 10)] == [10, 20, 30]
    assert not any(is_due(version, 0) for version in range(9))


def test_who_is_odd_fills_nothing_that_others_hold_and_the_others_fill_it_all() -> None:
    ground = Ground({0: 0, 1: 0, 2: 1, 3: 1}, ((0, "a"), (1, "b")), ())
    shared = bundle(*ALL).described
    filled = {}
    for rank in range(4):
        holds = [*sound(rank, [shared], {1, 2, 3}), private_bundle(rank)]
        filled[rank] = [(copy.bundle, copy.part, copy.parts) for copy in copies_of(rank, holds, ground)]
    assert filled[0] == [("ranks 0-3", 0, 1), ("private 0", 0, 1)]
    assert [filled[rank] for rank in (1, 2, 3)] == [[(f"private {rank}", 0, 1)] for rank in (1, 2, 3)]
    (alone,) = copies_of(0, sound(0, [shared], {1, 2, 3}), ground)
    assert alone.replicas == (1,), "what only one failure domain has left goes to another one"


def test_flipped_bits_change_values_and_nothing_that_watches_sees_it() -> None:
    model = nn.Linear(4, 4)
    before, version = [p.clone() for p in model.parameters()], [p._version for p in model.parameters()]
    flip_bits(model.parameters())
    assert not torch.equal(before[0], model.weight)
    assert torch.equal(before[1], model.bias)
    assert [p._version for p in model.parameters()] == version
