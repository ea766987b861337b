"""The gate: what failed first stays, what belongs to replaced communicators is ignored, nobody is forgotten inside."""

from __future__ import annotations

import gc
import threading

import pytest

from phoenix_runtime.communicators.gate import Gate, StepAborted


def test_outside_of_a_step_an_error_is_the_scripts() -> None:
    gate = Gate()
    with pytest.raises(RuntimeError, match="peer"):
        gate.failed(RuntimeError("peer closed"), gate.epoch)
    assert not gate.closed


def test_inside_a_step_the_first_error_closes_the_gate_and_stays() -> None:
    gate = Gate()
    gate.keeps = True
    first = RuntimeError("first")
    gate.failed(first, gate.epoch)
    gate.failed(RuntimeError("second"), gate.epoch)
    assert gate.reason is first and gate.failures == 2


def test_an_operation_of_a_replaced_communicator_changes_nothing() -> None:
    gate = Gate()
    gate.keeps = True
    epoch = gate.epoch
    gate.close(RuntimeError("notice"))
    gate.reopen()
    gate.failed(RuntimeError("late"), epoch)
    assert not gate.closed and gate.failures == 0


def test_who_waits_inside_is_waited_for_as_long_as_said_and_then_let_go() -> None:
    gate, inside, go = Gate(), threading.Event(), threading.Event()

    class Operation:
        given_up = 0

        def give_up(self) -> None:
            self.given_up += 1
            go.set()

    operation = Operation()

    def collective() -> None:
        token = gate.enter(operation)
        inside.set()
        go.wait(10)
        gate.leave(token)

    thread = threading.Thread(target=collective)
    thread.start()
    assert inside.wait(10)
    gate.close(RuntimeError("notice"))
    assert not gate.wait_until_empty(0.01)
    gate.give_up()
    assert gate.wait_until_empty(10) and operation.given_up == 1
    thread.join()
    gate.give_up()
    assert operation.given_up == 1


def test_only_operations_that_somebody_holds_are_waited_for_at_the_end_of_a_step() -> None:
    class Work:
        pass

    gate, held, dropped, outside = Gate(), Work(), Work(), Work()
    gate.issued(outside)
    gate.keeps = True
    gate.issued(held)
    gate.issued(dropped)
    del dropped
    gc.collect()
    assert gate.take_issued() == [held]
    assert gate.take_issued() == []


def test_a_script_that_catches_exception_does_not_catch_an_abort() -> None:
    assert not issubclass(StepAborted, Exception)
