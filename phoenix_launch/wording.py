"""How numbers and ranks read in a sentence: one of a thing, several, and long lists of ranks in short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

MOST_NAMES: Final = 8  # in one line; the rest is counted


def counted(number: int, noun: str) -> str:
    """`1 node`, `3 nodes`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def rank_ranges(ranks: Iterable[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def ranks_named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3,8`, `no rank`."""
    if not ranks:
        return "no rank"
    return f"rank{'s' * (len(ranks) != 1)} {rank_ranges(ranks)}"


def names_listed(names: Sequence[str]) -> str:
    """`a, b, c`, and no more than fit into a line."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def size_named(size: float) -> str:
    """`512 B`, `1.5 KiB`, `24 MiB`, `3.2 GiB`: three digits are enough for anybody."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size /= 1024
        del units[0]
    unit = units[0]
    return f"{size:.0f} {unit}" if size >= 99.5 or size == int(size) else f"{size:.1f} {unit}"
