"""The first page of a slot: what the slot holds, and the seal that makes a torn or mixed one impossible to load. Pure.

A slot is this page, the table, the extras (bytes that only the runtime understands), and from the next page on the data.
The seal is one 64-bit word: 0 while the slot is being written, and the digest of page, table and extras when it is whole.
It is voided by the first store of a new copy and set by the last one. A killed writer leaves what a prefix of its stores
has made of the slot, so no other order has to be enforced: either the seal is 0, or everything before it is there.
The data itself is not part of the digest: that would cost as much as the copy.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

import msgspec

from phoenix_launch.checkpoint.layout import ALIGNMENT, aligned, table_digest
from phoenix_launch.copies import Slot, Stamp

PAGE_BYTES: Final = 4096
FORMAT: Final = 2
_MAGIC: Final = b"phxslot\0"
_FIXED: Final = struct.Struct("<8sQIIQQ")  # magic, seal, then the bytes of label, table, extras, data
_SEALED_FROM: Final = 16  # the seal covers what follows it
_SEAL_WORD: Final = 1  # in words of 64 bits
_UNKNOWN: Final = -1


class Label(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of whom and of when a copy is. `part` of `parts`: holders on one node may copy a slice each (so far always the whole).

    `data_sum`: checksum of the data by the worker that wrote it, which only workers can compare; empty: it made none.
    `data_crc`: CRC-32 of the data where a server has computed it, for what it sent without such a sum; else -1.
    """

    job: str
    bundle: str
    stamp: Stamp
    layout: str
    part: int = 0
    parts: int = 1
    data_sum: str = ""
    data_crc: int = _UNKNOWN
    format: int = FORMAT

    @property
    def slot(self) -> Slot:
        return Slot(self.stamp, self.layout)


@dataclass(frozen=True, slots=True)
class Extent:
    """How many bytes each part of a slot has, and with that where it begins."""

    table: int
    extras: int
    data: int

    @property
    def extras_offset(self) -> int:
        return aligned(PAGE_BYTES + self.table, ALIGNMENT)

    @property
    def data_offset(self) -> int:
        return aligned(self.extras_offset + self.extras, PAGE_BYTES)

    @property
    def total(self) -> int:
        return self.data_offset + self.data


@dataclass(frozen=True, slots=True)
class Header:
    label: Label
    extent: Extent


_encoder = msgspec.msgpack.Encoder()
_labels = msgspec.msgpack.Decoder(Label)


def void(memory: memoryview) -> None:
    """The first store of a new copy: from here on nobody can load the slot."""
    memory[:PAGE_BYTES].cast("Q")[_SEAL_WORD] = 0


def write(memory: memoryview, label: Label, table: bytes | memoryview, extras: bytes | memoryview, size: int) -> Extent:
    """Void the slot and write everything but the `size` bytes of data. Raises ValueError when it does not fit."""
    extent = Extent(len(table), len(extras), size)
    encoded = _encoder.encode(label)
    if extent.total > len(memory) or _FIXED.size + len(encoded) > PAGE_BYTES:
        raise ValueError(f"bundle {label.bundle!r} of {extent.total} bytes does not fit a slot of {len(memory)}")
    void(memory)
    memory[PAGE_BYTES : PAGE_BYTES + len(table)] = table
    memory[extent.extras_offset : extent.extras_offset + len(extras)] = extras
    relabel(memory, label, extent)
    return extent


def relabel(memory: memoryview, label: Label, extent: Extent) -> None:
    """Void the slot and write its first page anew."""
    void(memory)
    encoded = _encoder.encode(label)
    _FIXED.pack_into(memory, 0, _MAGIC, 0, len(encoded), extent.table, extent.extras, extent.data)
    memory[_FIXED.size : _FIXED.size + len(encoded)] = encoded


def seal(memory: memoryview) -> None:
    """The last store of a copy. Raises ValueError when the page was not written by `write`."""
    extent = _extent(memory)
    if extent is None:
        raise ValueError("a slot that was never begun cannot be sealed")
    memory[:PAGE_BYTES].cast("Q")[_SEAL_WORD] = _digest(memory, *extent)


def read(memory: memoryview) -> Header | None:
    """None unless this is a whole, sealed slot of this format: torn, cut short, flipped anywhere but in the data."""
    extent = _extent(memory)
    if extent is None:
        return None
    length, parts = extent
    sealed = memory[:PAGE_BYTES].cast("Q")[_SEAL_WORD]
    if not sealed or sealed != _digest(memory, length, parts):
        return None
    try:
        label = _labels.decode(memory[_FIXED.size : _FIXED.size + length])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    table = memory[PAGE_BYTES : PAGE_BYTES + parts.table]
    return Header(label, parts) if label.format == FORMAT and label.layout == table_digest(table) else None


def _extent(memory: memoryview) -> tuple[int, Extent] | None:
    """The length of the label, and those of the parts, if they all lie within the memory."""
    if len(memory) < PAGE_BYTES:
        return None
    magic, _, length, table, extras, data = _FIXED.unpack_from(memory)
    extent = Extent(table, extras, data)
    if magic != _MAGIC or _FIXED.size + length > PAGE_BYTES or extent.total > len(memory):
        return None
    return length, extent


def _digest(memory: memoryview, length: int, extent: Extent) -> int:
    digest = hashlib.blake2b(memory[_SEALED_FROM : _FIXED.size + length], digest_size=8)
    digest.update(memory[PAGE_BYTES : PAGE_BYTES + extent.table])
    digest.update(memory[extent.extras_offset : extent.extras_offset + extent.extras])
    return int.from_bytes(digest.digest(), "little") or 1  # 0 means: not sealed
