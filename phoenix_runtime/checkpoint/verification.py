"""Silent corruption: whether all holders of a bundle still have the same bits, and who has others (`--verify-replicas`).

The comparison is that of `fingerprints.py`; there it withdraws a claim that a script has broken, here the claim stands and a
strict majority of the holders is right. Where there is none (two holders, say) nobody is blamed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phoenix_runtime.checkpoint.bundles import Bundle
from phoenix_runtime.checkpoint.fingerprints import FIRST, Exchange, Rows, bundle_sum, number_of, tensor_sum, unequal

NOBODY: Final[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one of this rank's bundles. `odd`: holders that have other bits than most, empty: that cannot be said."""

    bundle: str
    holders: tuple[int, ...]
    tensors: tuple[str, ...]  # those that differ, in their order
    odd: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`blamed`: all ranks with other bits than most holders, in the whole job: the same on all ranks."""

    findings: tuple[Finding, ...] = ()
    blamed: frozenset[int] = NOBODY

    @property
    def unclear(self) -> dict[str, tuple[str, ...]]:
        """By bundle, tensors that differ, and nobody can be blamed."""
        return {each.bundle: each.tensors for each in self.findings if not each.odd}


def is_due(version: int, every: int) -> bool:
    """The same answer on all ranks. In the first steps what differs is the script's own doing."""
    return every > 0 and version > FIRST[-1] and version % every == 0


def verified(held: Sequence[Bundle], exchange: Exchange) -> Verdict:
    """All ranks call it. `exchange` is called once, and once more when something differs."""
    shared = [bundle for bundle in held if len(bundle.holders) > 1]
    sums = {bundle.key: [tensor_sum(part) for part in bundle.now()[1]] for bundle in shared}
    wrong = unequal(exchange([(number_of(bundle.key), bundle_sum(bundle, sums[bundle.key])) for bundle in shared]))
    if not wrong:
        return Verdict()
    suspects = [bundle for bundle in shared if number_of(bundle.key) in wrong]
    rows = exchange([
        (number_of(f"{bundle.key} {name}"), found)
        for bundle in suspects
        for (name, _), found in zip(bundle.tensors, sums[bundle.key], strict=True)
    ])  # fmt: skip
    odd = odd_ones(rows)
    blamed = blamed_of(rows, odd)
    findings = []
    for bundle in suspects:
        names = tuple([name for name, _ in bundle.tensors if number_of(f"{bundle.key} {name}") in odd])
        if names:
            ranks = blamed & _named(odd, bundle, names)
            findings.append(Finding(bundle.key, bundle.holders, names, tuple(sorted(ranks))))
    return Verdict(tuple(findings), blamed)


def odd_ones(rows: Sequence[Rows]) -> dict[int, frozenset[int]]:
    """What not all who speak of it say the same of, with those who say something else than most; else nobody."""
    said: dict[int, dict[int, int]] = {}
    for rank, of_rank in enumerate(rows):
        for what, value in of_rank:
            said.setdefault(what, {})[rank] = value
    found = {}
    for what, values in said.items():
        (most, count), *others = Counter(values.values()).most_common(2)
        if others:
            clear = 2 * count > len(values)
            found[what] = frozenset(rank for rank, value in values.items() if value != most) if clear else NOBODY
    return found


def blamed_of(rows: Sequence[Rows], odd: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """All that are odd in anything; nobody, if of something fewer than most would be left."""
    blamed = NOBODY.union(*odd.values())
    for what in odd:
        speak = {rank for rank, of_rank in enumerate(rows) if any(what == number for number, _ in of_rank)}
        if 2 * len(speak - blamed) <= len(speak) and odd[what]:
            return NOBODY
    return blamed


def _named(odd: Mapping[int, frozenset[int]], bundle: Bundle, names: Sequence[str]) -> frozenset[int]:
    return NOBODY.union(*(odd[number_of(f"{bundle.key} {name}")] for name in names))
