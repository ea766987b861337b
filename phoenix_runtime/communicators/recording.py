"""Records what a rank receives until its first step (`startup.py`), while everything goes over real communicators.

Outputs are copied when the operation is waited for, by whichever thread does that. An operation that nobody has waited for
when the first step begins is not recorded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from phoenix_runtime.communicators.group import PhoenixGroup
from phoenix_runtime.startup import LARGEST, Call, StartupRecord

_RECEIVE_NOTHING: Final = frozenset({"send", "barrier"})
_LONGEST_SIGNATURE: Final = 160
_OURS: Final = str(Path(__file__).parents[1])
_BUCKETS: Final = str(Path(__file__).parents[1] / "buckets.py")
_PYTHONS: Final = str(Path(os.__file__).parent)
_TORCHS: Final = str(Path(torch.__file__).parent)
# Functions of torch that send modules' parameters and buffers around: file and name.
_SEND_PARAMETERS: Final = (
    ("distributed/utils.py", "_sync_params_and_buffers"),
    ("distributed/tensor/_api.py", "distribute_tensor"),
)


@dataclass(slots=True)
class _Pending:
    """A call whose outputs are copied when it is over."""

    operation: str
    signature: str
    site: str
    restored: bool
    outputs: tuple[bytes, ...] | None = None
    source: int = 0

    def settled(self) -> Call:
        return Call(self.operation, self.signature, self.site, self.outputs, self.source, self.restored)


@dataclass(slots=True)
class _Step:
    """What one of the first two steps did, per group."""

    everything: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    received: dict[str, list[_Pending]] = field(default_factory=dict)


class Recorder:
    """Stands between the groups of a process and their communicators until its third step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, list[_Pending]] = {}
        self._startup: dict[str, tuple[Call, ...]] = {}
        self._steps: list[_Step] = []
        self._entered = -1  # completed steps at the last entry
        self._groups: list[PhoenixGroup] = []
        self._over = False
        self.ignores: Callable[[], bool] = lambda: False  # a section runs, whose result is kept as a whole

    def attach(self, group: PhoenixGroup) -> None:
        if not self._over:
            self._groups.append(group)
            group.divert(functools.partial(self._carry, group))

    def _detach(self) -> None:
        """From now on operations cost what they always do."""
        self._over = True
        for group in self._groups:
            group.divert(None)
        self._groups.clear()

    # --- when ---------------------------------------------------------------------------------------------------------

    def enter_step(self, completed: int) -> None:
        """A step begins, or begins again; `completed` were finished before. The third one ends the recording."""
        with self._lock:
            if not self._steps:
                self._startup = {group: tuple(call.settled() for call in calls) for group, calls in self._calls.items()}
            if completed == self._entered and self._steps:
                self._steps[-1] = _Step()
            elif len(self._steps) < 2:
                self._steps.append(_Step())
            else:
                self._detach()
            self._entered = completed

    @property
    def over(self) -> bool:
        """Nothing will be added to the record any more."""
        return self._over

    @property
    def record(self) -> StartupRecord:
        """As far as it is known: of a rank that has entered no step, nothing that it may rely on."""
        with self._lock:
            first, second = ([*self._steps, _Step(), _Step()])[:2]
            return StartupRecord(
                calls=self._startup,
                first_step={group: tuple(call.settled() for call in calls) for group, calls in first.received.items()},
                first_step_differs=not self._over or first.everything != second.everything,
                final=self._over,
            )

    # --- what ---------------------------------------------------------------------------------------------------------

    def _carry(self, group: PhoenixGroup, operation: str, outputs: Any, *arguments: Any) -> Work:
        call = self._noted(group, operation, tensors_of(outputs), arguments)
        work = PhoenixGroup._carry(group, operation, outputs, *arguments)
        return work if call is None else RecordedWork(work, lambda: self._received(group, call, work, outputs))

    def _noted(
        self, group: PhoenixGroup, operation: str, tensors: list[Tensor], arguments: Sequence[Any]
    ) -> _Pending | None:
        """The call, when its outputs are to be copied."""
        if self.ignores():
            return None
        name, text = str(group.identity.name), signature(tensors, arguments)
        with self._lock:
            if self._steps:
                step = self._steps[-1]
                step.everything.setdefault(name, []).append((operation, text))
                if len(self._steps) > 1 or not is_plain(operation, tensors):
                    return None
                calls = step.received.setdefault(name, [])
            else:
                calls = self._calls.setdefault(name, [])
            site, restored = _site(sys._getframe())
            call = _Pending(operation, text, site, restored)
            calls.append(call)
        if operation in _RECEIVE_NOTHING:
            call.outputs = ()
            return None
        return call if sum(tensor.nbytes for tensor in tensors) <= LARGEST else None

    def _received(self, group: PhoenixGroup, call: _Pending, work: Work, outputs: Any) -> None:
        """Once: a handle may be waited for again when its outputs have long been something else."""
        if call.outputs is None and not group.aborted:
            call.source = work._source_rank() if call.operation == "recv_anysource" else 0
            call.outputs = tuple(_bytes(tensor) for tensor in tensors_of(outputs))


class RecordedWork(Work):
    """An operation's handle that says when it is over."""

    def __init__(self, work: Any, received: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._received = work, received

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        finished = bool(self._work.wait(timeout))
        if finished:
            self._received()
        return finished

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        def over(future: Future[Any]) -> Any:
            value = future.value()
            self._received()
            return value

        following: Future[Any] = self._work.get_future().then(over)
        return following

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        found: list[Tensor] = self._work.result()
        return found

    def source_rank(self) -> int:
        return int(self._work.source_rank())

    def _source_rank(self) -> int:
        return self.source_rank()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()


def tensors_of(outputs: Any) -> list[Tensor]:
    """All tensors of an operation's outputs, one after the other."""
    if isinstance(outputs, Tensor):
        return [outputs]
    return [tensor for item in outputs or () for tensor in tensors_of(item)]


def signature(tensors: Sequence[Tensor], arguments: Sequence[Any]) -> str:
    """Types and shapes, and plain numbers among the arguments; short, but equal only for equal calls."""
    parts = [f"{str(tensor.dtype)[6:]}{list(tensor.shape)}" for tensor in tensors]
    parts += [str(item) for item in arguments if type(item) is int]
    text = " ".join(parts) or "nothing"
    if len(text) <= _LONGEST_SIGNATURE:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[: _LONGEST_SIGNATURE // 2]} ... {len(parts)} in all ({digest})"


def is_plain(operation: str, tensors: Sequence[Tensor]) -> bool:
    """Whether it brings sizes, shapes, objects: the numbers of a first step are of no use to a repetition of a later one."""
    return (
        operation not in _RECEIVE_NOTHING
        and bool(tensors)
        and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
    )


def _bytes(tensor: Tensor) -> bytes:
    dense = tensor.detach().to("cpu").contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b""


def _site(frame: FrameType) -> tuple[str, bool]:
    """The line of the script that led here, and whether torch is sending parameters around."""
    parameters = False
    for each in _callers(frame):
        file = each.f_code.co_filename
        if file.startswith(_TORCHS):
            name = each.f_code.co_name
            parameters = parameters or any(name == known and file.endswith(end) for end, known in _SEND_PARAMETERS)
        elif file == _BUCKETS:
            parameters = True  # what fixes the order of DDP's buckets reduces zeros
        elif not file.startswith((_OURS, _PYTHONS, "<")):
            return f"{Path(file).name}:{each.f_lineno}", parameters
    return "an unknown place", parameters


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
