"""Copies that come from another node as a stream: into the tensors themselves, piece by piece, or small ones into memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from phoenix_launch.checkpoint.slots import SlotReader
from phoenix_launch.checkpoint.streams import HeldCopy, StreamReader
from phoenix_runtime.checkpoint.memory import DataSum, bytes_of, is_whole

_PIECE_BYTES: Final = 31 * (
    8 << 10
)  # summed while in a processor's cache; of more torch would make work for several threads


def arrive(stream: StreamReader, targets: Sequence[Tensor]) -> bool:
    """Store the data in these tensors (local parts, one for each row of the layout) while it comes: whether it is what was
    written. Before that is known, and if it is not, they hold anything.

    Raises SlotRefusedError when the stream breaks off, OSError when the checkpoint server is gone.
    """
    return _arrive(stream, _places(stream, targets))


def whole(copy: SlotReader | StreamReader) -> SlotReader | HeldCopy | None:
    """A small copy, of which nothing is to be looked at before all of it is known to be what was written; None: it is not.

    Raises as `arrive` does.
    """
    if isinstance(copy, SlotReader):
        return copy if is_whole(copy) else None
    data = memoryview(bytearray(copy.size))
    return HeldCopy(copy.layout, copy.extras, data) if _arrive(copy, [data]) else None


def _arrive(stream: StreamReader, places: Sequence[memoryview] | Iterator[memoryview]) -> bool:
    total, crc = DataSum(stream.size), 0
    for place in places:
        for start in range(0, len(place), _PIECE_BYTES):
            piece = place[start : start + _PIECE_BYTES]
            stream.fill(piece)
            if stream.data_sum:
                total.update(piece)
            else:
                crc = zlib.crc32(piece, crc)
    stream.end()
    return total.hexdigest() == stream.data_sum if stream.data_sum else crc == stream.data_crc


def _places(stream: StreamReader, targets: Sequence[Tensor]) -> Iterator[memoryview]:
    """Memory for all of the data, in its order. When the next is asked for, the one before has been filled."""
    end = 0
    for row, target in zip(stream.layout.tensors, targets, strict=True):
        if row.offset > end:
            yield memoryview(bytearray(row.offset - end))  # between two rows: summed with the rest
        if target.is_cpu and target.is_contiguous():
            yield bytes_of(target)
        else:
            fresh = torch.empty(target.shape, dtype=target.dtype)
            yield bytes_of(fresh)
            with torch.no_grad():
                target.copy_(fresh)
        end = row.offset + row.size
