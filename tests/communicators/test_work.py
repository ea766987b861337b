"""The handles of operations: no wait is unconditional, no end is mistaken for a failure, every future is completed once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.futures import Future

from phoenix_runtime.communicators.gate import Gate
from phoenix_runtime.communicators.waiters import Waiters
from phoenix_runtime.communicators.work import ElsewhereWork, FinishedWork, SlicedWork, SwappableWork


class Inner:
    """A communicator's handle that does what it is told, wait by wait."""

    def __init__(self, *waits: Callable[[], bool], completed: bool = False) -> None:
        self.waits, self.completed = list(waits), completed
        self.timeouts: list[timedelta] = []
        self.future: Future[Any] = Future()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.timeouts.append(timeout)
        return self.waits.pop(0)() if len(self.waits) > 1 else self.waits[0]()

    def is_completed(self) -> bool:
        return self.completed

    def get_future(self) -> Future[Any]:
        return self.future


def fails(text: str) -> Callable[[], bool]:
    def fail() -> bool:
        raise RuntimeError(text)

    return fail


def work_on(inner: Inner, kind: type[SwappableWork] = SlicedWork, keeps: bool = True) -> tuple[SwappableWork, Gate]:
    gate = Gate()
    gate.keeps = keeps
    output = torch.full((2,), 7.0)
    work = kind(gate, inner, [output], output.zero_, 1)  # type: ignore[arg-type]
    return work, gate


def test_a_wait_goes_on_when_a_slice_of_it_ends() -> None:
    work, gate = work_on(Inner(fails("Operation timed out!"), fails("Operation timed out!"), lambda: True))
    assert work.wait() and not gate.closed
    assert work.is_completed()


def test_an_operation_that_ends_right_after_a_slice_did_not_fail() -> None:
    work, gate = work_on(Inner(fails("Operation timed out!"), lambda: True, completed=True))
    assert work.wait() and not gate.closed and gate.failures == 0


def test_an_operation_that_failed_is_kept_inside_a_step_and_leaves_plausible_outputs() -> None:
    work, gate = work_on(Inner(fails("Connection closed by peer"), completed=True))
    assert work.wait()
    assert gate.closed and str(gate.reason) == "Connection closed by peer"
    assert work.result()[0].tolist() == [0, 0]


def test_an_operation_that_failed_outside_of_a_step_raises() -> None:
    work, _ = work_on(Inner(fails("Connection closed by peer"), completed=True), keeps=False)
    with pytest.raises(RuntimeError, match="closed by peer"):
        work.wait()


def test_a_timeout_of_the_caller_is_the_callers() -> None:
    inner = Inner(fails("Operation timed out!"))
    work, _ = work_on(inner, keeps=False)
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(milliseconds=30))
    assert all(timeout <= timedelta(milliseconds=30) for timeout in inner.timeouts)


def test_a_collective_that_nothing_wakes_is_given_up() -> None:
    gate_closed = threading.Event()
    work, gate = work_on(Inner(lambda: gate_closed.wait(10) and fails("Operation timed out!")()))
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    gate.close(RuntimeError("notice"))
    assert not gate.wait_until_empty(0.01)
    gate.give_up()
    gate_closed.set()
    assert gate.wait_until_empty(10)
    waiter.join(10)
    assert work.result()[0].tolist() == [0, 0]


def test_a_send_that_nothing_wakes_is_given_up_and_its_thread_left_behind() -> None:
    never = threading.Event()
    work, gate = work_on(Inner(lambda: never.wait(10)), ElsewhereWork)
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    gate.close(RuntimeError("notice"))
    assert not gate.wait_until_empty(0.01)
    gate.give_up()
    assert gate.wait_until_empty(10)
    waiter.join(10)
    never.set()
    assert work.wait()


@pytest.mark.parametrize("value", [True, "an error"])
def test_a_send_ends_as_its_communicator_says(value: bool | str) -> None:
    inner = Inner(fails(value) if isinstance(value, str) else lambda: True)
    work, gate = work_on(inner, ElsewhereWork)
    assert work.wait() and gate.closed == isinstance(value, str)


def test_a_future_is_completed_by_the_communicator_or_by_the_gate_and_only_once() -> None:
    inner = Inner(lambda: True)
    work, gate = work_on(inner)
    future = work.get_future()
    assert not future.done() and not gate.wait_until_empty(0.001)
    gate.close(RuntimeError("notice"))
    gate.give_up()
    assert future.done() and [tensor.tolist() for tensor in future.wait()] == [[0, 0]]
    inner.future.set_result(["late"])
    assert [tensor.tolist() for tensor in future.wait()] == [[0, 0]] and gate.wait_until_empty(1)


def test_a_future_has_the_communicators_own_value() -> None:
    inner = Inner(lambda: True)
    work, gate = work_on(inner)
    future = work.get_future()
    inner.future.set_result(["its value"])
    assert future.wait() == ["its value"] and gate.wait_until_empty(1) and not gate.closed


def test_a_future_never_carries_an_error_into_a_step_but_does_outside_of_one() -> None:
    for keeps in (True, False):
        inner = Inner(lambda: True)
        work, gate = work_on(inner, keeps=keeps)
        future = work.get_future()
        inner.future.set_exception(RuntimeError("peer"))
        if keeps:
            assert [tensor.tolist() for tensor in future.wait()] == [[0, 0]] and gate.closed
        else:
            with pytest.raises(RuntimeError, match="peer"):
                future.wait()


def test_an_error_is_no_end_of_a_slice_though_the_operation_does_not_say_that_it_ended() -> None:
    work, gate = work_on(Inner(fails("Connection closed by peer"), completed=False))
    assert work.wait() and str(gate.reason) == "Connection closed by peer"


def test_a_thread_that_waits_elsewhere_is_used_again_unless_it_was_left_behind() -> None:
    waiters, never, threads = Waiters(), threading.Event(), set()

    def wait_in(wait: Callable[[], object]) -> threading.Event:
        done = threading.Event()

        def run() -> None:
            threads.add(threading.get_ident())
            wait()
            done.set()

        waiters.run(run)
        return done

    for _ in range(5):
        assert wait_in(lambda: None).wait(10)
        while not waiters._idle:
            threading.Event().wait(0.001)
    assert len(threads) == 1
    stuck = wait_in(lambda: never.wait(10))
    assert wait_in(lambda: None).wait(10) and len(threads) == 2
    never.set()
    assert stuck.wait(10)


def test_what_did_nothing_is_over() -> None:
    work = FinishedWork([torch.ones(1)], 3)
    assert work.wait() and work.is_completed() and work.get_future().done() and work._source_rank() == 3
