"""Drills that only a worker itself can do: it hangs, is slow, raises, exits or spoils its memory in its next step, on the
script's own thread."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Final, cast

import torch
from torch import Tensor

from phoenix_launch.command_messages import DrillKind
from phoenix_launch.local_messages import WorkerDrill
from phoenix_runtime.errors import DrillError
from phoenix_runtime.state import TrainState

_NEVER: Final = threading.Event()
_HOUR: Final = 3600
_PIECE: Final = 8 << 20


class Drills:
    """Of this process. Ordered by the thread that hears the agent, done by the main thread."""

    def __init__(self) -> None:
        self._ordered: deque[WorkerDrill] = deque()
        self._flips: deque[WorkerDrill] = deque()
        self._factor, self._slow_until = 1.0, 0.0
        self._began = 0.0
        self._disk_full_until = 0.0

    def order(self, drill: WorkerDrill) -> None:
        (self._flips if drill.kind is DrillKind.FLIP_BITS else self._ordered).append(drill)

    def at_entry(self, state: TrainState) -> None:
        """Before anybody looks at what the step begins with."""
        while self._flips:
            self._flips.popleft()
            flip_bits(parameter for _, parameter in state.parameters())

    def check_disk(self) -> None:
        """Before a checkpoint is written, by any thread. Raises OSError."""
        if time.monotonic() < self._disk_full_until:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (a drill)")

    def step_begins(self) -> None:
        """Costs two comparisons when nothing was ordered."""
        while self._ordered:
            self._do(self._ordered.popleft())
        if self._slow_until:
            self._began = time.monotonic()

    def step_ends(self) -> None:
        if self._slow_until:
            now = time.monotonic()
            _NEVER.wait((self._factor - 1.0) * (now - self._began))
            self._slow_until = self._slow_until if now < self._slow_until else 0.0

    def _do(self, drill: WorkerDrill) -> None:
        match drill.kind:
            case DrillKind.HANG:
                _NEVER.wait(drill.duration or None)
            case DrillKind.HANG_GIL:
                _hold_the_lock(drill.duration or math.inf)
            case DrillKind.SLOW:
                self._factor = max(1.0, drill.value)
                self._slow_until = time.monotonic() + drill.duration if drill.duration else math.inf
            case DrillKind.FILL_DISK:
                self._disk_full_until = time.monotonic() + drill.duration
            case DrillKind.OOM:
                _allocate(int(2 * drill.value))
            case DrillKind.RAISE:
                raise DrillError("this is a drill")
            case DrillKind.EXIT:
                sys.exit(int(drill.value))
            case _:
                return


def flip_bits(parameters: Iterable[Tensor]) -> None:
    """Two bits in the middle of the first parameter that has any; nothing that watches changes sees it."""
    for parameter in parameters:
        data = parameter.data
        data = cast(Tensor, data.to_local()) if hasattr(data, "to_local") else data
        if data.numel() and data.is_contiguous():
            data.view(-1).view(torch.uint8)[data.nbytes // 2] ^= 0b10010
            return


def _allocate(most: int) -> None:
    """Until the kernel ends it; but no more than this."""
    held: list[bytearray] = []
    while sum(map(len, held)) < most:
        held.append(bytearray(os.urandom(_PIECE)))
    raise MemoryError("a drill: the kernel did not end this process at its limit")


def _hold_the_lock(seconds: float) -> None:
    """In C, without giving python's lock back; a signal may wake it, but does not end it."""
    libc = ctypes.PyDLL(None)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        libc.usleep(int(min(left, 0.5) * 1e6)) if left < _HOUR else libc.sleep(_HOUR)


DRILLS: Final = Drills()
