"""The table of a slot: which tensors a bundle has, and where in the slot's data each of them lies. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import msgspec

ALIGNMENT: Final = 64  # a cache line, and more than any type needs
_DIGEST_BYTES: Final = 16


class Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One row. `dtype` is the runtime's own word for it; `offset` counts from the beginning of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that wants a place. `size` in bytes, 0 is allowed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Tensor, ...])


@dataclass(frozen=True)
class Layout:
    """The same entries in the same order give the same bytes, and the same digest, on every node."""

    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Layout:
        """Raises ValueError for a negative size and for a name that comes twice."""
        offset, tensors = 0, []
        for entry in entries:
            tensors.append(Tensor(entry.name, entry.dtype, entry.shape, offset, entry.size))
            offset = aligned(offset + entry.size, ALIGNMENT)
        layout = cls(tuple(tensors))
        layout._check()
        return layout

    @classmethod
    def decode(cls, table: bytes | memoryview) -> Layout:
        """Raises ValueError for what is no table, or one whose tensors do not lie one after the other."""
        try:
            layout = cls(_decoder.decode(table))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"no table of a slot: {error}") from None
        layout._check()
        return layout

    @cached_property
    def table(self) -> bytes:
        return _encoder.encode(self.tensors)

    @cached_property
    def digest(self) -> str:
        return table_digest(self.table)

    @property
    def size(self) -> int:
        """Bytes of the data: up to the end of the last tensor."""
        return self.tensors[-1].offset + self.tensors[-1].size if self.tensors else 0

    def _check(self) -> None:
        end = 0
        for tensor in self.tensors:
            if tensor.size < 0 or tensor.offset != aligned(end, ALIGNMENT) or min(tensor.shape, default=0) < 0:
                raise ValueError(f"tensor {tensor.name!r} of {tensor.size} bytes cannot lie at {tensor.offset}")
            end = tensor.offset + tensor.size
        names = {tensor.name for tensor in self.tensors}
        if len(names) != len(self.tensors):
            raise ValueError("two tensors of one bundle have the same name")


def table_digest(table: bytes | memoryview) -> str:
    return hashlib.blake2b(table, digest_size=_DIGEST_BYTES).hexdigest()


def aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
