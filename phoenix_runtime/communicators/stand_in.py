"""What an operation leaves in its outputs when it does not communicate: plausible values, never uninitialised memory.

A collective of an aborted step, or of a process that starts its script alone, does nothing. Its outputs are used all the
same, until the step ends: sizes are allocated, indices looked up. So each output gets what it would have if every rank had
sent what this one did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor


def fill(operation: str, rank: int, arguments: Sequence[Any]) -> None:
    """Fill the outputs of `operation`, a method of ProcessGroup, called with `arguments` on group rank `rank`."""
    filler = _FILLERS.get(operation)
    if filler is not None:
        with torch.no_grad():
            filler(rank, *arguments)


def _copy(target: Tensor, source: Tensor) -> None:
    """As much of the source as fits; zeros for the rest."""
    count = min(target.numel(), source.numel())
    flat = torch.zeros(target.numel(), dtype=target.dtype, device=target.device)
    flat[:count] = source.detach().reshape(-1)[:count].to(flat)
    target.detach().copy_(flat.view_as(target))


def _part(whole: Tensor, parts: int, index: int) -> Tensor:
    size = whole.numel() // max(1, parts)
    return whole.detach().reshape(-1)[index * size : (index + 1) * size]


def _broadcast(rank: int, tensors: list[Tensor], options: Any) -> None:
    """Counts and indices that were never received are zero; anything else keeps the value that it had."""
    for tensor in tensors:
        if rank != options.rootRank and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor.zero_()


def _allgather(rank: int, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any) -> None:
    for gathered, own in zip(outputs, inputs, strict=False):
        for output in gathered:
            _copy(output, own)


def _allgather_base(rank: int, output: Tensor, own: Tensor, *_: Any) -> None:
    copies = output.numel() // max(1, own.numel())
    _copy(output, own.detach().reshape(-1).repeat(copies))


def _allgather_bases(rank: int, outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> None:
    for output, own in zip(outputs, inputs, strict=False):
        _allgather_base(rank, output, own)


def _allgather_coalesced(rank: int, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any) -> None:
    for gathered in outputs:
        for output, own in zip(gathered, inputs, strict=False):
            _copy(output, own)


def _scatter(rank: int, outputs: list[Tensor], inputs: list[list[Tensor]], *_: Any) -> None:
    for index, output in enumerate(outputs):
        if index < len(inputs) and rank < len(inputs[index]):
            _copy(output, inputs[index][rank])
        else:
            output.zero_()


def _reduce_scatter_base(rank: int, output: Tensor, whole: Tensor, *_: Any) -> None:
    _copy(output, _part(whole, whole.numel() // max(1, output.numel()), rank))


def _reduce_scatter_bases(rank: int, outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> None:
    for output, whole in zip(outputs, inputs, strict=False):
        _reduce_scatter_base(rank, output, whole)


def _all_to_all_base(rank: int, output: Tensor, own: Tensor, *_: Any) -> None:
    _copy(output, own)


def _all_to_all(rank: int, outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> None:
    for output, own in zip(outputs, inputs, strict=False):
        _copy(output, own)


def _receive(rank: int, tensors: list[Tensor], *_: Any) -> None:
    for tensor in tensors:
        tensor.zero_()


# allreduce, reduce, barrier and send leave nothing behind that was not there before.
_FILLERS: Final[dict[str, Callable[..., None]]] = {
    "broadcast": _broadcast,
    "allgather": _allgather,
    "all_gather_single": _allgather_base,
    "all_gather_single_coalesced": _allgather_bases,
    "allgather_coalesced": _allgather_coalesced,
    "gather": _allgather,
    "scatter": _scatter,
    "reduce_scatter": _scatter,
    "reduce_scatter_single": _reduce_scatter_base,
    "reduce_scatter_single_coalesced": _reduce_scatter_bases,
    "all_to_all_single": _all_to_all_base,
    "alltoall": _all_to_all,
    "recv": _receive,
    "recv_anysource": _receive,
}
