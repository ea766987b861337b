"""Whether a node's copies fit into its memory: what they need when all pairs have grown, and what is free. Pure.

Each bundle has a pair of slots. The first copy, before an optimizer has made its state, is small; a copy says how large the
next ones are going to be, as far as that is known. So the answer is an estimate at the first version and exact from the
second one on, and in both cases it comes before anything is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phoenix_launch.wording import size_named

RESERVE_BYTES: Final = 256 << 20  # left to everybody else on the machine
SLOTS: Final = 2


@dataclass(frozen=True, slots=True)
class Demand:
    """One pair. `slot`: bytes that each of its slots needs in the end; `present`: bytes that it has already; `replica`: the
    copy of another node's bundle."""

    slot: int
    present: int
    replica: bool = False

    @property
    def total(self) -> int:
        return max(SLOTS * self.slot, self.present)

    @property
    def missing(self) -> int:
        return self.total - self.present


@dataclass(frozen=True, slots=True)
class Shortage:
    """`words`: the arithmetic, as one line; `need`: bytes that all pairs take in the end; `limited`: the user's own limit is
    what is too small, and not the memory; `replicas`: some of it is for other nodes."""

    words: str
    need: int
    limited: bool
    replicas: bool


def shortage(demands: Iterable[Demand], free: float, limit: int = 0) -> Shortage | None:
    """What is wrong when the pairs do not fit; None when they do.

    Args:
        free: bytes that this node could still allocate.
        limit: bytes that all copies of the node together may take, 0: as many as are free.
    """
    pairs = list(demands)
    missing, present = (sum(getattr(pair, name) for pair in pairs) for name in ("missing", "present"))
    room = free - RESERVE_BYTES
    if limit:
        room = min(room, limit - present)
    if missing <= room:
        return None
    own, replicas = (sum(pair.total for pair in pairs if pair.replica is kind) for kind in (False, True))
    kinds = [f"{SLOTS} x {size_named(own // SLOTS)} for its own ranks"]
    if replicas:
        kinds.append(f"{SLOTS} x {size_named(replicas // SLOTS)} for replicas of other nodes")
    there = f"of which {size_named(present)} are there, " if present else ""
    limited = bool(limit) and limit < free + present
    bound = f"--copy-memory allows {size_named(limit)}" if limited else ""
    words = (
        f"copies in memory need {size_named(own + replicas)} ({' + '.join(kinds)}), {there}"
        f"{bound or f'{size_named(max(0.0, free))} are free and {size_named(RESERVE_BYTES)} of it are not touched'}"
    )
    return Shortage(words, own + replicas, limited, replicas > 0)
