"""Who writes which tensor of a checkpoint on disk, and by which name."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from phoenix_runtime.checkpoint import pieces
from phoenix_runtime.checkpoint.bundles import Bundle
from phoenix_runtime.checkpoint.pieces import Mention, Said


@given(st.lists(st.integers(0, 1000)), st.sets(st.integers(0, 30), min_size=1))
def test_each_tensor_is_written_by_one_of_its_holders(sizes: list[int], holders: set[int]) -> None:
    shares = [pieces.share(sizes, sorted(holders), rank) for rank in holders]
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0) + len(sizes)


def test_a_rank_that_holds_nothing_of_a_bundle_writes_nothing_of_it() -> None:
    assert pieces.share([4, 4], (0, 1), 2) == []


def mention(name: str, rank: int, same: str) -> Mention:
    return Mention(name, f"rank {rank}", (rank,), same, "")


def test_a_name_that_means_one_tensor_stays_what_it_is() -> None:
    said = [Said("", (mention("w", 0, "a"),)), Said("", (mention("w", 1, "a"), mention("v", 1, "b")))]
    answers, owners, _ = pieces.decide(said)
    assert all(not answer.ambiguous for answer in answers)
    assert owners == {}


def test_a_name_that_means_several_tensors_gets_its_owners_word() -> None:
    said = [Said("", (Mention("w", "rank 0", (0,), "a", "on the cpu"),)), Said("", (mention("w", 1, "b"),))]
    answers, owners, words = pieces.decide(said)
    assert answers[0].ambiguous == answers[1].ambiguous == frozenset({"w"})
    assert owners == {"rank 0": (0,), "rank 1": (1,)}
    assert words == {"w @ rank 0": "on the cpu"}
    assert pieces.parted("w @ rank 0") == ("w", "rank 0")
    assert pieces.parted("w") == ("w", "")


def test_a_buffer_is_written_by_the_first_rank_that_has_it() -> None:
    answers, _, _ = pieces.decide([Said("", (), ("a", "b")), Said("", (), ("b", "c"))])
    assert [answer.buffers for answer in answers] == [("a", "b"), ("c",)]


def test_copies_stay_as_they_were() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    (piece,) = pieces.copies([Bundle("rank 0", (0,), [("w", tensor)], [""])], 0, 2, lambda: None, {})
    tensor.zero_()
    assert piece.copy.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert piece.owner == "rank 0"


def test_memory_is_used_again_where_it_fits() -> None:
    tensors = [("a", torch.ones(3)), ("b", torch.ones(4)), ("c", torch.ones(0))]
    memory = {"a": torch.zeros(3), "b": torch.zeros(3)}
    found = {
        piece.name: piece.copy
        for piece in pieces.copies([Bundle("rank 0", (0,), tensors, [""] * 3)], 0, 1, lambda: None, memory)
    }
    assert found["a"] is memory["a"] and found["b"] is not memory["b"]
    assert [found[name].tolist() for name, _ in tensors] == [[1.0] * 3, [1.0] * 4, []]
