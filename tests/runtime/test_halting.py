"""A rank that is told that its job is about to stop: it copies once more, and changes nothing after that."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from checkpoint_nodes import G1, CheckpointNode
from test_copier import Rank, kept

from phoenix_launch.copies import Stamp
from phoenix_runtime import StepAborted
from phoenix_runtime.checkpoint.halting import Halt

Eventually = Callable[..., Any]


class Halted:
    """A rank whose main thread is in a step's wait, and what it has reported."""

    def __init__(self, nodes: list[CheckpointNode], interval: int) -> None:
        self.reported: list[Stamp] = []
        self.halt = Halt(self.reported.append)
        self.rank = Rank(nodes, interval=interval, halt=self.halt)
        self.ended: list[BaseException | None] = []
        self.thread = threading.Thread(target=self._step, daemon=True)

    def _step(self) -> None:
        try:
            self.rank.step()
            self.ended.append(None)
        except StepAborted as aborted:
            self.ended.append(aborted)

    def abort(self) -> None:
        self.rank.gate.close(RuntimeError("ended"))
        self.rank.copier.stop()
        if self.thread.is_alive():
            self.thread.join(10.0)


@pytest.fixture
def halted(start_node: Callable[[int], CheckpointNode]) -> Iterator[Callable[[int], Halted]]:
    nodes = [start_node(index) for index in range(2)]
    for node in nodes:
        node.follow(G1, nodes)
    made: list[Halted] = []

    def make(interval: int) -> Halted:
        made.append(Halted(nodes, interval))
        return made[-1]

    yield make
    for each in made:
        each.abort()
        each.rank.copier.end()


@pytest.mark.parametrize("interval", [1, 10])
def test_it_copies_the_version_and_stays(
    interval: int, halted: Callable[[int], Halted], eventually: Eventually
) -> None:
    one = halted(interval)
    for _ in range(3):
        one.rank.step()
    one.halt.ask(True)
    one.thread.start()
    eventually(lambda: one.reported, what="its word that it has halted")
    assert (one.reported, one.rank.copier.complete, one.rank.state.step) == ([Stamp(G1, 3)], 3, 3)
    for node in one.rank.nodes:
        node.until_kept(*kept(2, 3) if interval == 1 else kept(0, 3))
    assert not one.ended, "its optimizer has not stepped"
    one.abort()
    assert isinstance(one.ended[0], StepAborted)


def test_a_script_that_handles_the_signal_comes_to_the_end_of_its_step(
    halted: Callable[[int], Halted], eventually: Eventually
) -> None:
    one, heard = halted(1), []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        one.rank.step()
        one.halt.ask(True)
        sender = threading.Thread(
            target=lambda: (eventually(lambda: one.reported), signal.pthread_kill(main, signal.SIGTERM))
        )
        main = threading.get_ident()
        sender.start()
        one.rank.step()
        sender.join(10.0)
        assert (heard, one.rank.state.step) == ([signal.SIGTERM], 2)
        one.rank.step()
        assert one.reported == [Stamp(G1, 1)], "it does not halt again"
    finally:
        signal.signal(signal.SIGTERM, before)
