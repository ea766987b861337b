"""Whether ranks that are known to hold the same tensors do: fingerprints, which only ever withdraw a claim.

Structure says who holds what (`bundles.py`). A script can break that: it changes a parameter of DDP on one rank alone, or
seeds its ranks differently before an optimizer that is said to be replicated. Then one rank's copy is not another's, and a
restored rank would get other bits than it had. So in the first steps, and now and then, all ranks compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from phoenix_runtime.checkpoint.bundles import Bundle

FIRST: Final = (1, 2, 3)  # versions; optimizers make their state in the first step
EVERY: Final = 1000
_WORD: Final = 8

Row: TypeAlias = tuple[int, int]  # what, its fingerprint
Rows: TypeAlias = Sequence[Row]
Exchange: TypeAlias = Callable[[Rows], Sequence[Rows]]  # gives each rank's rows


def is_due(version: int) -> bool:
    """The same answer on all ranks, whatever their interval is, and in a process that has just taken a rank."""
    return version in FIRST or (version > 0 and version % EVERY == 0)


def differing(held: Sequence[Bundle], exchange: Exchange) -> dict[str, tuple[str, ...]]:
    """By key, the tensors of this rank's bundles that their holders do not hold with the same bits. All ranks call it.

    Args:
        exchange: brings rows to all ranks, and theirs here, by rank; called once, and once more when something differs.
    """
    shared = [bundle for bundle in held if len(bundle.holders) > 1]
    sums = {bundle.key: [tensor_sum(part) for part in bundle.now()[1]] for bundle in shared}
    whole = exchange([(number_of(bundle.key), bundle_sum(bundle, sums[bundle.key])) for bundle in shared])
    if not unequal(whole):
        return {}
    suspect = unequal(whole)
    single = exchange([
        (number_of(f"{bundle.key} {name}"), found)
        for bundle in shared if number_of(bundle.key) in suspect
        for (name, _), found in zip(bundle.tensors, sums[bundle.key], strict=True)
    ])  # fmt: skip
    wrong = unequal(single)
    names = {
        bundle.key: tuple([name for name, _ in bundle.tensors if number_of(f"{bundle.key} {name}") in wrong])
        for bundle in shared
    }
    return {key: found for key, found in names.items() if found}


def unequal(rows: Sequence[Rows]) -> frozenset[int]:
    """What not all who speak of it say the same of."""
    said: dict[int, int] = {}
    return frozenset(what for of_rank in rows for what, value in of_rank if said.setdefault(what, value) != value)


def tensor_sum(tensor: Tensor) -> int:
    """A fingerprint as cheap as reading it: the sum of its 64-bit words, and of the bytes that are left over."""
    data = tensor.detach()
    if not data.numel() or data.layout != torch.strided or data.is_quantized:
        return data.numel()
    data = data.resolve_conj().resolve_neg().contiguous()
    if data.storage_offset() * data.itemsize % _WORD:
        data = data.clone()
    flat = data.flatten().view(torch.uint8)
    words = flat.numel() // _WORD * _WORD
    total = int(flat[:words].view(torch.int64).sum()) + int(flat[words:].sum())
    return _signed(total)


def withdrawal(found: Mapping[str, tuple[str, ...]]) -> str:
    """One line for the user."""
    names = [name for of_bundle in found.values() for name in of_bundle]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"{shown} should be equal on {', '.join(found)} and {'is' if len(names) == 1 else 'are'} not: "
        "from now on each rank's own is copied"
    )


def bundle_sum(bundle: Bundle, sums: Sequence[int]) -> int:
    digest = hashlib.blake2b(bundle.layout.digest.encode(), digest_size=_WORD)
    for value in sums:
        digest.update(value.to_bytes(_WORD, "little", signed=True))
    return int.from_bytes(digest.digest(), "little", signed=True)


def number_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_WORD).digest(), "little", signed=True)


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
