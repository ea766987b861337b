"""A worker's line to its agent, with the agent's end in the test's hands."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phoenix_launch import channel
from phoenix_launch.local_messages import WorkerPlan, WorkerReport
from phoenix_launch.messages import PlanPhase, RuntimeReport
from phoenix_launch.wire import Generation
from phoenix_runtime.control import AGENT, AgentGoneError, Control

G1, G2, G3 = (Generation(1, n) for n in (1, 2, 3))
SECONDS = 10.0


class Agent:
    """Listens at `path`, and takes in one worker."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(path)
        self._door.listen()
        self._door.settimeout(SECONDS)
        self._line: socket.socket | None = None
        self._worker: Control | None = None
        self.aborts: list[str] = []

    def worker(self, plan: WorkerPlan) -> Control:
        """A worker that has said hello, and heard this."""
        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(self._answer, plan)
            control = Control.connect({AGENT: self.path}, self._abort, lambda plan: plan.alone)
            answered.result(SECONDS)
        assert control is not None
        self._worker = control
        return control

    def _answer(self, plan: WorkerPlan) -> None:
        self._line, _ = self._door.accept()
        self._line.settimeout(SECONDS)
        self.hears()
        self.says(plan)

    def _abort(self, reason: BaseException) -> tuple[str, ...]:
        self.aborts.append(str(reason))
        return ()

    def says(self, plan: WorkerPlan) -> None:
        assert self._line is not None
        channel.send(self._line, plan)

    def hears(self) -> RuntimeReport:
        assert self._line is not None
        received = channel.receive(self._line)
        assert received is not None and isinstance(received[0], WorkerReport)
        return received[0].runtime

    def close(self) -> None:
        self._door.close()
        if self._line is not None and self._worker is not None:
            self._line.close()
            with pytest.raises(AgentGoneError):
                self._worker.wait_for(lambda plan: False, SECONDS)
            self._worker._sock.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(str(tmp_path / "agent.sock"))
    yield made
    made.close()


def plan(generation: Generation, phase: PlanPhase, *, alone: bool = False) -> WorkerPlan:
    return WorkerPlan(generation, phase, 0, alone, "")


def test_a_notice_breaks_the_communicators_before_it_is_answered(agent: Agent) -> None:
    agent.worker(plan(G1, PlanPhase.RUN))
    agent.says(plan(G2, PlanPhase.SWAP))
    said = agent.hears()
    assert (said.aborted, said.joined.n) == (G2, 0)
    assert agent.aborts == ["a process of the job failed, g2 begins"]


def test_a_replacement_that_has_no_groups_yet_joins_the_next_generation_at_once(agent: Agent) -> None:
    """It has nothing to abort, and no step to leave: nobody waits for it in vain."""
    agent.worker(plan(G2, PlanPhase.SWAP, alone=True))
    agent.says(plan(G3, PlanPhase.SWAP, alone=True))
    said = agent.hears()
    assert (said.aborted, said.joined, said.live) == (G3, G3, None)
    assert agent.aborts == []


def test_an_earlier_failure_explains_what_fails_now(agent: Agent) -> None:
    control = agent.worker(plan(G1, PlanPhase.RUN))
    agent.says(plan(G2, PlanPhase.SWAP))
    agent.hears()
    assert control.superseded(G1)
