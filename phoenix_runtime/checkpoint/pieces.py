"""What of a version each rank writes to disk, and under which names: decided from what all ranks say of their tensors.

A name stands for one tensor of the whole job: a DTensor with all its shards, or a plain tensor. Where ranks mean different
tensors by the same name (what is kept by each rank for itself), each gets its owner's word behind its name.
"""

from __future__ import annotations

import ctypes
import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phoenix_runtime.adapters.containers import Items
from phoenix_runtime.adapters.modules import ModuleState
from phoenix_runtime.adapters.part import joined
from phoenix_runtime.checkpoint.bundles import Bundle, key_of
from phoenix_runtime.checkpoint.memory import local, move, type_word
from phoenix_runtime.state import Captured

_BETWEEN: Final = " @ "  # a name, the word of its owner
_COMPARED_BYTES: Final = 16 << 20  # tensors up to this size that several ranks have by one name are compared


class Mention(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of a tensor. `same`: two tensors of one name are one if this is equal. `word`: see `bundles`."""

    name: str
    owner: str
    owners: tuple[int, ...]
    same: str
    word: str


class Said(msgspec.Struct, frozen=True, array_like=True):
    """What a rank brings to a checkpoint, or why it cannot take part."""

    error: str = ""
    mentions: tuple[Mention, ...] = ()
    buffers: tuple[str, ...] = ()


class Decided(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 answers: names that need their owner's word, buffers that this rank writes; or why nobody writes."""

    error: str = ""
    ambiguous: frozenset[str] = frozenset()
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor that this rank writes, as a copy of its local part."""

    name: str
    original: Tensor  # where a DTensor lies; its bits may have changed since
    copy: Tensor
    owner: str  # empty: all ranks have it

    def named(self, ambiguous: frozenset[str]) -> str:
        return qualified(self.name, self.owner) if self.name in ambiguous else self.name

    @property
    def tensor(self) -> Tensor:
        """To be written under its name: a DTensor again, if it was a part of one."""
        original = self.original
        if not isinstance(original, DTensor):
            return self.copy
        return DTensor.from_local(
            self.copy, original.device_mesh, original.placements, run_check=False, shape=original.shape,
            stride=original.stride(),
        )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What one rank brings: pieces that it would write, and what it says of all its tensors."""

    pieces: list[Piece] = field(default_factory=list)
    said: Said = field(default_factory=Said)


def qualified(name: str, owner: str) -> str:
    return f"{name}{_BETWEEN}{owner}"


def parted(name: str) -> tuple[str, str]:
    """A name on disk as the name itself and its owner's word, which may be empty."""
    base, between, owner = name.rpartition(_BETWEEN)
    return (base, owner) if between else (name, "")


def share(sizes: Sequence[int], holders: Sequence[int], rank: int) -> list[int]:
    """Which tensors of a bundle this holder writes: as many bytes as each other one, about; the same answer everywhere."""
    loads = [(0, holder) for holder in holders]
    mine = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, holder = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[index] + 1, holder))
        if holder == rank:
            mine.append(index)
    return sorted(mine)


@torch.no_grad()
def copies(
    bundles: Iterable[Bundle], rank: int, world: int, check: Callable[[], None], memory: Mapping[str, Tensor]
) -> list[Piece]:
    """Copies, on the CPU, of what this rank writes. While nothing of it may change. `check` may raise, to give up.

    `memory`: earlier copies by name, which nobody needs any more: pages that are there already are filled twice as fast.
    """
    pieces = []
    for bundle in bundles:
        tensors = [tensor for _, tensor in bundle.tensors]
        for index in share([local(tensor).nbytes for tensor in tensors], bundle.holders, rank):
            name, tensor = bundle.tensors[index]
            copy = _copied(local(tensor), check, memory.get(name))
            pieces.append(Piece(name, tensor, copy, _owner(tensor, bundle, world)[0]))
    return pieces


def _copied(tensor: Tensor, check: Callable[[], None], memory: Tensor | None) -> Tensor:
    check()
    fits = memory is not None and memory.shape == tensor.shape and memory.dtype == tensor.dtype
    copy = memory if fits and memory is not None else torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        move(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes, check)
    else:
        copy.copy_(tensor)
    return copy


def said_of(pieces: Iterable[Piece], bundles: Iterable[Bundle], captured: Captured, rank: int, world: int) -> Said:
    """What has to be known to all before names are given. Of a DTensor the first rank of its mesh speaks."""
    written = {id(piece.original): piece for piece in pieces}
    mentions = []
    for bundle in bundles:
        for (name, tensor), word in zip(bundle.tensors, bundle.words, strict=True):
            owner, owners = _owner(tensor, bundle, world)
            if isinstance(tensor, DTensor):
                speaks, same = min(owners) == rank, owner
            else:
                piece = written.get(id(tensor))
                speaks = piece is not None and (bool(owner) or bool(word))
                same = _bits(piece.copy) or owner if speaks and piece is not None else ""
            if speaks:
                mentions.append(Mention(name, owner, owners, same, word))
    return Said("", tuple(mentions), tuple(name for name, _ in buffers_of(captured)))


def decide(said: Sequence[Said]) -> tuple[list[Decided], dict[str, tuple[int, ...]], dict[str, str]]:
    """What each rank is answered; the ranks behind each owner's word; and the words of names on disk."""
    meant: dict[str, set[str]] = {}
    for mention in (mention for each in said for mention in each.mentions):
        meant.setdefault(mention.name, set()).add(mention.same)
    ambiguous = frozenset(name for name, same in meant.items() if len(same) > 1)
    owners: dict[str, tuple[int, ...]] = {}
    words: dict[str, str] = {}
    for mention in (mention for each in said for mention in each.mentions):
        name = mention.name
        if name in ambiguous:
            owners[mention.owner] = mention.owners
            name = qualified(name, mention.owner)
        if mention.word:
            words[name] = mention.word
    taken: set[str] = set()
    answers = []
    for each in said:
        mine = tuple(name for name in each.buffers if name not in taken)
        taken.update(mine)
        answers.append(Decided("", ambiguous, mine))
    return answers, owners, words


def buffers_of(captured: Captured) -> Iterator[tuple[str, Tensor]]:
    """The buffers of all modules by name, as they were captured."""
    yield from _buffers(captured.parts, "")


def written(pieces: Iterable[Piece], decided: Decided, captured: Captured) -> Mapping[str, Tensor]:
    """What this rank writes, by its name on disk."""
    found = {piece.named(decided.ambiguous): piece.tensor for piece in pieces}
    wanted = set(decided.buffers) - found.keys()
    found.update({name: tensor for name, tensor in buffers_of(captured) if name in wanted})
    return found


def _buffers(captured: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(captured, Items):
        for key, item in captured.items:
            yield from _buffers(item, joined(prefix, str(key)))
    elif isinstance(captured, ModuleState):
        for name, buffer in captured.buffers().items():
            if type(buffer) is Tensor and buffer.layout == torch.strided and not buffer.is_quantized:
                yield joined(prefix, name), buffer


def _owner(tensor: Tensor, bundle: Bundle, world: int) -> tuple[str, tuple[int, ...]]:
    """The word behind an ambiguous name, and which ranks that means."""
    if isinstance(tensor, DTensor):
        ranks = tuple(sorted(tensor.device_mesh.mesh.flatten().tolist()))
        return f"mesh of {key_of(ranks)}", ranks
    return ("" if len(bundle.holders) == world else bundle.key), bundle.holders


def _bits(tensor: Tensor) -> str:
    """Equal for equal tensors; empty for one that is too large to be compared."""
    if tensor.nbytes > _COMPARED_BYTES:
        return ""
    data = ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
    words = f"{type_word(tensor.dtype)} {tuple(tensor.shape)}".encode()
    return hashlib.blake2b(words + data, digest_size=16).hexdigest()
