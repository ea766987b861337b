"""The table of a slot is the same on every node, cheap for many small tensors, and never points outside its data."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phoenix_launch.checkpoint.layout import ALIGNMENT, Entry, Layout, Tensor

NAMES = st.text(max_size=12)
ENTRIES = st.lists(
    st.builds(Entry, NAMES, st.sampled_from(["float32", "int64"]), st.tuples(), st.integers(0, 1000)),
    unique_by=lambda entry: entry.name,
    max_size=20,
)


@given(ENTRIES)
def test_tensors_lie_one_after_the_other_each_aligned(entries: list[Entry]) -> None:
    layout = Layout.of(entries)
    end = 0
    for entry, tensor in zip(entries, layout.tensors, strict=True):
        assert tensor.offset % ALIGNMENT == 0 and end <= tensor.offset < end + ALIGNMENT
        assert (tensor.name, tensor.size) == (entry.name, entry.size)
        end = tensor.offset + tensor.size
    assert layout.size == end


@given(ENTRIES)
def test_a_table_comes_back_as_it_was(entries: list[Entry]) -> None:
    layout = Layout.of(entries)
    again = Layout.decode(layout.table)
    assert again == layout and again.digest == layout.digest


@given(ENTRIES, ENTRIES)
def test_only_equal_entries_have_equal_digests(one: list[Entry], other: list[Entry]) -> None:
    assert (Layout.of(one).digest == Layout.of(other).digest) == (one == other)


@given(st.binary(max_size=200))
def test_random_bytes_are_no_table_or_a_sound_one(data: bytes) -> None:
    try:
        layout = Layout.decode(data)
    except ValueError:
        return
    assert all(0 <= t.offset <= t.offset + t.size <= layout.size for t in layout.tensors)


@pytest.mark.parametrize(
    "row",
    [
        Tensor("a", "f", (1,), 0, -4),
        Tensor("a", "f", (1,), 64, 4),
        Tensor("a", "f", (-1,), 0, 4),
        Tensor("a", "f", (1,), -64, 4),
    ],
)
def test_a_tensor_outside_its_place_is_refused(row: Tensor) -> None:
    with pytest.raises(ValueError, match="cannot lie"):
        Layout.decode(msgspec.msgpack.encode((row,)))


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="same name"):
        Layout.of([Entry("a", "f", (), 4), Entry("a", "f", (), 8)])


def test_ten_thousand_small_tensors_are_cheap() -> None:
    entries = [Entry(f"layers.{i}.attention.weight", "float32", (4, 4), 64) for i in range(10_000)]
    began = time.process_time()
    layout = Layout.of(entries)
    assert Layout.decode(layout.table).digest == layout.digest
    assert time.process_time() - began < 1.0  # 0.03 s on an idle machine
