"""The handles that collectives return. They outlive the communicator that carries them, and never raise into a step.

C++ (DDP's reducer, functional collectives) calls only `wait` and `get_future`; the rest is for Python.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from phoenix_runtime.communicators.gate import Gate
from phoenix_runtime.communicators.positions import NOWHERE
from phoenix_runtime.communicators.waiters import ELSEWHERE

_NO_TIMEOUT: Final = timedelta(0)  # c10d's kNoTimeout: as long as the group's own timeout says
_SLICE: Final = 0.02  # seconds; each slice that ends costs an exception, each abort waits for the rest of one
_LEAST: Final = 0.001
_SLICE_ENDED: Final = "Operation timed out!"  # of c10d's Work::wait


class _Handle(Work):
    """What finished and unfinished operations have in common.

    Args:
        outputs: what the caller gets as the result.
        source: the group rank that a receive is said to have come from when nothing came: never the receiver's own.
    """

    def __init__(self, outputs: Any, source: int) -> None:
        super().__init__()
        self._outputs, self._source = outputs, source

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return _tensors(self._outputs)

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self.source_rank()


class FinishedWork(_Handle):
    """An operation that did nothing, or is over."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future(devices=_devices(self._outputs))
        future.set_result(_tensors(self._outputs))
        return future


class SwappableWork(_Handle):
    """An operation under way on a communicator that may be taken away from it.

    When the pairs of a gloo communicator are closed, gloo wakes whoever waits for a message, but not for one that is under
    way, partly sent or partly received (`Pair::signalException` passes over unbound buffers in `tx_` and `rx_`). Such an
    operation neither reads nor writes any more, and ends with the group's timeout. So nobody here waits for one
    unconditionally: the gate may call `give_up`.

    Args:
        inner: the communicator's own handle.
        fill: leaves plausible values in the outputs when the operation fails.
        position: which operation this is among all ranks' (`Positions.begun`).
    """

    def __init__(
        self,
        gate: Gate,
        inner: Work,
        outputs: Any,
        fill: Callable[[], None],
        source: int,
        position: tuple[int, int] = NOWHERE,
    ) -> None:
        super().__init__(outputs, source)
        self._position = position
        self._gate, self._epoch, self._inner, self._fill = gate, gate.epoch, inner, fill
        self._over = self._given_up = False
        self._open: list[Future[Any]] = []  # futures that were handed out; whoever removes one sets it

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if self._over:
            return True
        token = self._gate.enter(self)
        noted = self._gate.positions.waiting(self._position)
        began = self._gate.blocked.begins()
        failure: Exception | None = None
        try:
            self._over = self._wait(timeout)
        except Exception as error:
            self._over = True
            if not self._gate.keeps:
                failure = error
            else:
                self._gate.failed(error, self._epoch)
                self._fill()
        finally:
            self._gate.blocked.ends(began)
            if noted:
                self._gate.positions.over()
            self._gate.leave(token)
        try:
            if failure is not None:  # outside of a step this may never return, and must not count as being inside then
                self._gate.failed(failure, self._epoch)
                self._fill()
        finally:
            del failure
        return self._over

    def _wait(self, timeout: timedelta) -> bool:
        return bool(self._inner.wait(timeout))

    def give_up(self) -> None:
        self._given_up = True
        while self._open:
            self._settle(self._open[-1], _GivenUp())

    def is_completed(self) -> bool:
        return self._over or self._gate.closed or self._inner.is_completed()

    def result(self) -> list[torch.Tensor]:
        if self._gate.closed or self._epoch != self._gate.epoch:
            return super().result()
        return self._inner.result()

    def source_rank(self) -> int:
        if self._gate.closed or self._epoch != self._gate.epoch:
            return self._source
        return int(self._inner._source_rank())

    def block_current_stream(self) -> None:
        self._inner.block_current_stream()

    def get_future(self) -> Future[Any]:
        """One that never carries an error: DDP's reducer would throw it through the whole backward pass.

        Its value is the communicator's own: hooks on DDP's communication look into it.
        """
        outer: Future[Any] = Future(devices=_devices(self._outputs))
        self._open.append(outer)
        token = self._gate.enter(self)
        self._gate.blocked.future_given()

        def over(inner: Future[Any]) -> None:
            try:
                value = inner.value()
            except Exception as error:
                value = error.with_traceback(None)
            self._gate.blocked.future_completed()
            self._settle(outer, value)
            self._gate.leave(token)

        self._inner.get_future().add_done_callback(over)
        return outer

    def _settle(self, outer: Future[Any], value: Any) -> None:
        """Complete a future by the operation's value, or as if it had one. The first to come does it."""
        try:
            self._open.remove(outer)
        except ValueError:
            return
        if isinstance(value, Exception):
            try:
                if not self._gate.keeps and self._epoch == self._gate.epoch:
                    raise value  # into whoever waits for the future: here a thread of the communicator's would be held
                self._gate.failed(value, self._epoch)
                self._fill()
            except Exception as to_raise:
                outer.set_exception(to_raise.with_traceback(None))
                return
            value = _tensors(self._outputs)
        outer.set_result(value)


class SlicedWork(SwappableWork):
    """A collective of gloo: waited for in slices, so that giving up is possible. A slice that ends changes nothing there."""

    def _wait(self, timeout: timedelta) -> bool:
        until = time.monotonic() + timeout.total_seconds() if timeout > _NO_TIMEOUT else math.inf
        while True:
            left = until - time.monotonic()
            try:
                return bool(self._inner.wait(timedelta(seconds=max(_LEAST, min(_SLICE, left)))))
            except RuntimeError as error:
                if self._inner.is_completed():  # it failed; or it ended well right after the slice did
                    return bool(self._inner.wait())
                if left <= _SLICE or not str(error).startswith(_SLICE_ENDED):
                    raise
                if self._given_up:
                    raise _GivenUp from error


class ElsewhereWork(SwappableWork):
    """An operation of gloo that cannot be waited for in slices: sends and receives, whose communicator would be broken by
    that, and reduce-scatters, which wait without a limit whatever limit they are given.

    So another thread waits in its place, and may be left behind with the old communicator when that is taken away. (A
    receive from any source always is: it belongs to no pair, so that closing pairs does not end it.)
    """

    def _wait(self, timeout: timedelta) -> bool:
        self._woken = threading.Event()
        if self._given_up:
            raise _GivenUp
        result: list[bool | Exception] = []

        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def wait() -> None:
            try:  # a reduce-scatter copies into its outputs while it is waited for: in the modes of whoever asked for it
                with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                    result.append(bool(self._inner.wait(timeout)))
            except Exception as error:
                result.append(error)
            self._woken.set()

        ELSEWHERE.run(wait)
        self._woken.wait()  # as long as torch itself would: the inner wait has the group's timeout
        if not result:
            raise _GivenUp
        ended = result.pop()
        try:
            if isinstance(ended, Exception):
                raise ended
            return ended
        finally:
            del ended

    def give_up(self) -> None:
        super().give_up()
        self._woken.set()

    _woken = threading.Event()


class _GivenUp(RuntimeError):
    """Nobody is going to tell whether this operation ended."""


def _tensors(outputs: Any) -> list[torch.Tensor]:
    """All tensors of an operation's outputs, one after the other, as gloo gives them."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [tensor for item in outputs for tensor in _tensors(item)]


def _devices(outputs: Any) -> list[int | str | torch.device] | None:
    """Devices whose streams a future has to take care of: none on the CPU."""
    found = {tensor.device for tensor in _tensors(outputs) if tensor.device.type != "cpu"}
    return [*sorted(found, key=str)] or None
