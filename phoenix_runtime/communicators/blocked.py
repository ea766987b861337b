"""How long the script's main thread was blocked by others: in collectives, and in what waits for all ranks' copies.

What is left of a step is what this rank did itself: a rank for which the others wait is told apart from its victims by that.
It is host time: who waits for a GPU, computes, and a collective of NCCL blocks nobody here but the GPU.
"""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any, Final

import torch
from torch.autograd import Variable

_NO_BACKWARD: Final = -1


class Blocked:
    """One a process. Only the main thread's waits count; a future may be completed by any thread."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._seconds = 0.0
        self._backward = _NO_BACKWARD  # the newest one whose end is watched
        self._ended = 0.0  # when a backward had computed everything, 0: nobody waits for its futures
        self._completed = 0.0  # when the last future was
        self.disturbed = False  # communicators were replaced: the step that is under way tells nothing

    def begins(self) -> float:
        """The calling thread is about to wait; give the result to `ends`. 0: it is not the main thread."""
        return perf_counter() if threading.get_ident() == self._main else 0.0

    def ends(self, began: float) -> None:
        if began:
            self._seconds += perf_counter() - began

    def future_given(self) -> None:
        """Whoever waits for it in C++ does not say so. DDP does at the end of its backward: what lies between that, here, and
        the last future is a wait."""
        backward: int = torch._C._current_graph_task_id()
        if backward in (_NO_BACKWARD, self._backward) or threading.get_ident() != self._main:
            return
        self._settle()
        self._backward = backward
        engine: Any = Variable._execution_engine
        engine.queue_callback(self._backward_ends)  # runs before DDP's own, which is put there later

    def future_completed(self) -> None:
        self._completed = perf_counter()

    def take(self) -> float | None:
        """Seconds since this was asked last; None: they tell nothing. Main thread, between two steps."""
        self._settle()
        seconds, disturbed = self._seconds, self.disturbed
        self._seconds, self.disturbed, self._backward = 0.0, False, _NO_BACKWARD
        return None if disturbed else seconds

    def _backward_ends(self) -> None:
        self._ended = perf_counter()

    def _settle(self) -> None:
        """Where the main thread has gone on, all futures of the backward before are completed."""
        if self._ended:
            self._seconds += max(0.0, self._completed - self._ended)
            self._ended = 0.0
