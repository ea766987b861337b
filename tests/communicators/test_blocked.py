"""What counts as blocked by others: the main thread's waits, also those for futures in C++ at the end of a backward pass."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Variable

from phoenix_runtime.communicators.blocked import Blocked

WAIT = 0.1


def pause() -> None:
    threading.Event().wait(WAIT)


def wait(blocked: Blocked) -> None:
    began = blocked.begins()
    pause()
    blocked.ends(began)


def test_waits_of_the_main_thread_count_and_those_of_others_do_not() -> None:
    blocked = Blocked()
    wait(blocked)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(wait, blocked).result()
    assert blocked.take() == pytest.approx(WAIT, abs=0.08)
    assert blocked.take() == 0.0


@pytest.mark.parametrize("waits", [True, False])
def test_of_a_future_only_what_lies_behind_the_end_of_the_backward_counts(waits: bool) -> None:
    """A hook gives a future and puts its wait at the end of the backward, as DDP's reducer does."""
    blocked, completed = Blocked(), threading.Event()

    def complete() -> None:
        if waits:
            pause()
        blocked.future_completed()
        completed.set()

    thread = threading.Thread(target=complete)

    def reduce(gradient: Tensor) -> None:
        blocked.future_given()
        engine: Any = Variable._execution_engine
        if not waits:
            thread.start()
            pause()  # the rest of the backward
            engine.queue_callback(lambda: completed.wait(10))
        else:
            engine.queue_callback(lambda: (thread.start(), completed.wait(10)))

    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(reduce)  # type: ignore[no-untyped-call]
    (leaf * 2).sum().backward()  # type: ignore[no-untyped-call]
    thread.join()
    found = blocked.take()
    assert found is not None
    assert found >= WAIT * 0.9 if waits else found < WAIT / 2


def test_a_step_in_which_communicators_were_replaced_tells_nothing() -> None:
    blocked = Blocked()
    wait(blocked)
    blocked.disturbed = True
    assert blocked.take() is None
    assert blocked.take() == 0.0
