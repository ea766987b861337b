"""A slot is loaded whole or not at all, whatever its writer, its memory or another job has done to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phoenix_launch.checkpoint import header
from phoenix_launch.checkpoint.header import PAGE_BYTES, Label
from phoenix_launch.checkpoint.layout import Entry, Layout
from phoenix_launch.checkpoint.slots import SlotMemory, SlotReader, SlotWriter, slot_size
from phoenix_launch.copies import Stamp
from phoenix_launch.wire import Generation

G1 = Generation(1, 1)
LAYOUT = Layout.of(
    [Entry("weight", "float32", (5,), 20), Entry("empty", "int8", (0,), 0), Entry("step", "int64", (), 8)]
)
EXTRAS = b"random states"


@pytest.fixture
def memory() -> SlotMemory:
    return SlotMemory(slot_size(LAYOUT, len(EXTRAS)))


def fill(memory: SlotMemory, version: int, *, job: str = "job-1", sealed: bool = True) -> None:
    writer = SlotWriter(memory.descriptor)
    with writer.begin(job, "b", Stamp(G1, version), LAYOUT, EXTRAS) as data:
        for row in LAYOUT.tensors:
            data[row.offset : row.offset + row.size] = bytes([version]) * row.size
    if sealed:
        writer.seal()
    writer.close()


def load(memory: SlotMemory, version: int, *, job: str = "job-1", bundle: str = "b") -> dict[str, bytes] | None:
    descriptor = memory.read_only()
    try:
        reader = SlotReader.attach(descriptor, job, bundle, Stamp(G1, version))
    finally:
        os.close(descriptor)
    if reader is None:
        return None
    assert bytes(reader.extras) == EXTRAS and reader.layout == LAYOUT
    found = {row.name: bytes(reader.tensor(row)) for row in reader.layout.tensors}
    assert reader.still_sealed()
    reader.close()
    return found


def test_what_was_sealed_is_read_bit_for_bit(memory: SlotMemory) -> None:
    fill(memory, 3)
    assert load(memory, 3) == {"weight": b"\3" * 20, "empty": b"", "step": b"\3" * 8}
    fill(memory, 4)
    assert load(memory, 4) == {"weight": b"\4" * 20, "empty": b"", "step": b"\4" * 8}


def test_another_version_job_or_bundle_is_not_read(memory: SlotMemory) -> None:
    fill(memory, 3)
    assert load(memory, 2) is None
    assert load(memory, 3, job="job-2") is None
    assert load(memory, 3, bundle="c") is None


def test_a_fresh_slot_and_one_that_is_being_written_hold_nothing(memory: SlotMemory) -> None:
    assert load(memory, 0) is None
    fill(memory, 3)
    fill(memory, 4, sealed=False)
    assert load(memory, 3) is None and load(memory, 4) is None


def test_a_reader_sees_that_its_slot_was_overwritten_meanwhile(memory: SlotMemory) -> None:
    fill(memory, 3)
    reader = SlotReader.attach(memory.descriptor, "job-1", "b", Stamp(G1, 3))
    assert reader is not None
    fill(memory, 4)
    assert not reader.still_sealed()
    reader.close()


def test_a_copy_that_does_not_fit_leaves_the_slot_as_it_was(memory: SlotMemory) -> None:
    fill(memory, 3)
    writer = SlotWriter(memory.descriptor)
    with pytest.raises(ValueError, match="does not fit"):
        writer.begin("job-1", "b", Stamp(G1, 4), Layout.of([Entry("w", "f", (), memory.size)]))
    with pytest.raises(ValueError, match="does not fit"):
        writer.begin("job-1", "x" * PAGE_BYTES, Stamp(G1, 4), LAYOUT)
    writer.close()
    assert load(memory, 3) is not None


def test_nobody_cuts_a_slot_short_or_writes_through_a_readers_descriptor(memory: SlotMemory) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, PAGE_BYTES)
    descriptor = memory.read_only()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"x")
    os.close(descriptor)


def sealed_bytes() -> bytearray:
    image = bytearray(slot_size(LAYOUT, len(EXTRAS)))
    view = memoryview(image)
    header.write(view, Label("job-1", "b", Stamp(G1, 7), LAYOUT.digest), LAYOUT.table, EXTRAS, LAYOUT.size)
    header.seal(view)
    return image


SEALED = bytes(sealed_bytes())
WHOLE = header.read(memoryview(SEALED))
assert WHOLE is not None
COVERED = [
    *range(PAGE_BYTES + WHOLE.extent.table),
    *range(WHOLE.extent.extras_offset, WHOLE.extent.extras_offset + WHOLE.extent.extras),
]


@given(st.sampled_from(COVERED), st.integers(0, 7))
def test_one_flipped_bit_is_never_taken_for_another_copy(place: int, bit: int) -> None:
    image = bytearray(SEALED)
    image[place] ^= 1 << bit
    found = header.read(memoryview(image))
    assert found is None or found == WHOLE  # what lies between the label and the page's end means nothing


@given(st.integers(0, len(SEALED) - 1))
def test_a_slot_that_was_cut_short_is_not_loaded(length: int) -> None:
    assert header.read(memoryview(SEALED)[:length]) is None


@given(st.integers(0, len(SEALED)))
def test_a_slot_that_is_one_copy_up_to_somewhere_and_an_older_one_beyond_is_not_mixed(place: int) -> None:
    older = bytearray(sealed_bytes())
    header.write(
        memoryview(older), Label("job-1", "b", Stamp(G1, 6), LAYOUT.digest), LAYOUT.table, b"other states!", 28
    )
    header.seal(memoryview(older))
    mixed = bytearray(SEALED[:place] + bytes(older[place:]))
    found = header.read(memoryview(mixed))
    if found is not None:
        extras = mixed[found.extent.extras_offset :][: found.extent.extras]
        assert (found.label.stamp.version, bytes(extras)) in {(7, EXTRAS), (6, b"other states!")}


@given(st.binary(max_size=2 * PAGE_BYTES))
def test_random_bytes_hold_nothing(data: bytes) -> None:
    assert header.read(memoryview(data)) is None
    assert header.read(memoryview(SEALED[:16] + data)) is None


WRITER = """
import sys
from phoenix_launch.checkpoint.layout import Entry, Layout
from phoenix_launch.checkpoint.slots import SlotWriter
from phoenix_launch.copies import Stamp
from phoenix_launch.wire import Generation

layout = Layout.of([Entry("w", "uint8", (1 << 20,), 1 << 20)])
writers = [SlotWriter(int(descriptor)) for descriptor in sys.argv[1:3]]
stop = int(sys.argv[3])
for version in range(1, 4):
    writer = writers[version % 2]
    data = writer.begin("job-1", "b", Stamp(Generation(1, 1), version), layout)
    for start in range(0, len(data), 4096):
        if (version, start) == (3, stop):
            print("in the middle", flush=True)
            sys.stdin.readline()
        data[start:start + 4096] = bytes([version]) * 4096
    if version == 3:
        print("not sealed yet", flush=True)
        sys.stdin.readline()
    writer.seal()
"""
BIG = Layout.of([Entry("w", "uint8", (1 << 20,), 1 << 20)])


@pytest.mark.parametrize("stop", [0, 1 << 19, 1 << 20])
def test_a_writer_killed_in_the_middle_of_a_copy_leaves_the_other_slot_intact(stop: int) -> None:
    pair = [SlotMemory(slot_size(BIG, 0)) for _ in range(2)]
    descriptors = [memory.descriptor for memory in pair]
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, *map(str, descriptors), str(stop)],
        pass_fds=descriptors,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None and writer.stdin is not None
    assert writer.stdout.readline() in (b"in the middle\n", b"not sealed yet\n")
    writer.send_signal(signal.SIGKILL)
    writer.wait(10)
    writer.stdout.close()
    writer.stdin.close()
    reader = SlotReader.attach(pair[0].descriptor, "job-1", "b", Stamp(G1, 2))
    assert reader is not None and bytes(reader.tensor(BIG.tensors[0])) == b"\2" * (1 << 20)
    reader.close()
    assert pair[1].header() is None, "neither the version that was there nor the one that was on its way"
