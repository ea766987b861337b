"""Shadow mode: a process runs its script alone, with groups that have no communicators, while all others stand still.

What its predecessor received until its first step is replayed from the startup record; anything else leaves the values that a
collective of an aborted step would leave. `PhoenixBackend.adopt` gives the same groups real communicators.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from phoenix_runtime.communicators import stand_in
from phoenix_runtime.communicators.group import PhoenixGroup
from phoenix_runtime.communicators.recording import is_plain, signature, tensors_of
from phoenix_runtime.communicators.work import FinishedWork
from phoenix_runtime.startup import Call, StartupRecord


class ReplayError(RuntimeError):
    """The script does not start as it did on the rank that is to be replaced, so it cannot be replaced alone."""


class Shadow:
    """Answers what the groups of a process are asked, from the record of the rank that it is going to be."""

    def __init__(self, record: StartupRecord) -> None:
        self._record = record
        self._lock = threading.Lock()
        self._made: dict[str, int] = {}  # calls of each group so far
        self._first_step: dict[str, list[Call]] | None = None  # what is left of it; None: still starting
        self._groups: list[PhoenixGroup] = []

    def attach(self, group: PhoenixGroup) -> None:
        self._groups.append(group)
        group.divert(functools.partial(self._carry, group))

    def detach(self) -> None:
        for group in self._groups:
            group.divert(None)
        self._groups.clear()

    @property
    def first_step_differs(self) -> bool:
        """The replacement has to run a step alone, since that step exchanges what later ones do not."""
        return self._record.first_step_differs

    def enter_step(self) -> None:
        """The start is over. Raises ReplayError when the record goes on."""
        with self._lock:
            for group, calls in self._record.calls.items():
                made = self._made.get(group, 0)
                if made < len(calls):
                    raise ReplayError(
                        f"call {made + 1} of group {group} was {calls[made]}; this time the first step came before it"
                    )
            self._first_step = {group: list(calls) for group, calls in self._record.first_step.items()}

    def _carry(self, group: PhoenixGroup, operation: str, outputs: Any, *arguments: Any) -> Work:
        tensors = tensors_of(outputs)
        call = self._recorded(str(group.identity.name), operation, tensors, arguments)
        if call is None or call.outputs is None:
            stand_in.fill(operation, group.identity.rank, arguments)
        else:
            for tensor, data in zip(tensors, call.outputs, strict=bool(call.outputs)):
                _put(tensor, data)
        source = call.source if call is not None and operation == "recv_anysource" else group.identity.rank + 1
        return FinishedWork(outputs, source % group.identity.size)

    def _recorded(self, group: str, operation: str, tensors: list[Tensor], arguments: Any) -> Call | None:
        text = signature(tensors, arguments)
        with self._lock:
            if self._first_step is not None:
                return (
                    _taken(self._first_step.get(group, []), operation, text) if is_plain(operation, tensors) else None
                )
            number = self._made[group] = self._made.get(group, 0) + 1
            calls = self._record.calls.get(group, ())
        if number > len(calls):
            raise ReplayError(
                f"call {number} of group {group} is {operation} of {text}; {len(calls)} came before the first step"
            )
        call = calls[number - 1]
        if (call.operation, call.signature) != (operation, text):
            raise ReplayError(f"call {number} of group {group} was {call}; this time it is {operation} of {text}")
        return call


def _taken(calls: list[Call], operation: str, text: str) -> Call | None:
    """The next that fits: steps may differ, by what their data says; what no longer fits is left out."""
    for index, call in enumerate(calls):
        if (call.operation, call.signature) == (operation, text):
            del calls[: index + 1]
            return call
    return None


def _put(tensor: Tensor, data: bytes) -> None:
    if not data:
        return
    with torch.no_grad():
        received = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tensor.dtype)
        tensor.detach().copy_(received.view(tensor.shape))
