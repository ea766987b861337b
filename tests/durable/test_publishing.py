"""A checkpoint on disk becomes visible by the supervisor's word, and a fenced rank 0 never gets that."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_checkpoint_folders import JOB, written

from phoenix_launch.checkpoint import folders
from phoenix_launch.copies import Stamp
from phoenix_launch.job.state import Holder, Phase, Rules, State
from phoenix_launch.job.wishes import to_publish
from phoenix_launch.messages import NodePlan, PlanPhase, RuntimeReport
from phoenix_launch.node.poll_loop import PollLoop
from phoenix_launch.node.publisher import Publisher
from phoenix_launch.wire import Generation

G1, G2 = Generation(1, 1), Generation(1, 2)
SECONDS = 10.0


def job(written: Stamp | None, *, generation: Generation = G2, node: int = 0, rank: int = 0) -> State:
    holder = Holder(rank=rank, node=node, born=G1, seen=True, runtime=RuntimeReport(written=written))
    rules = Rules(seats_min=1, seats_max=1)
    return State(rules=rules, generation=generation, phase=Phase.RUNNING, holders={rank: holder})


def test_what_rank_0_of_the_present_generation_has_written_is_published_on_its_node() -> None:
    assert to_publish(job(Stamp(G2, 8)), 0) == Stamp(G2, 8)
    assert to_publish(job(Stamp(G2, 8), node=1), 0) is None
    assert to_publish(job(Stamp(G2, 8), node=1), 1) == Stamp(G2, 8)


@pytest.mark.parametrize("generation", [G1, Generation(1, 3), Generation(2, 1)])
def test_what_was_written_in_another_generation_is_not(generation: Generation) -> None:
    assert to_publish(job(Stamp(generation, 8)), 0) is None


def test_no_other_rank_can_have_anything_published() -> None:
    assert to_publish(job(Stamp(G2, 8), rank=1), 0) is None


class Agent:
    """As much of one as a publisher needs."""

    def __init__(self, root: Path) -> None:
        self.loop = PollLoop()
        self.remarks: list[str] = []
        self.publisher = Publisher(self.loop, str(root), JOB, 2, self.remarks.append)

    def told(self, stamp: Stamp | None) -> None:
        self.publisher.follow(NodePlan(G2, PlanPhase.RUN, publish=stamp))

    def hear(self) -> None:
        ready = self.loop.wait(SECONDS)
        assert ready, "nothing was published in time"
        self.loop.dispatch(ready)


def test_the_agent_makes_it_visible_once(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    written(tmp_path, Stamp(G2, 4))
    for _ in range(3):
        agent.told(Stamp(G2, 4))
    agent.hear()
    assert agent.publisher.done is not None
    assert (agent.publisher.done.error, agent.publisher.done.stamp) == ("", Stamp(G2, 4))
    assert folders.newest(tmp_path) == Path(agent.publisher.done.path)
    agent.told(Stamp(G1, 8))  # a plan of an older generation that comes late
    agent.publisher.close()
    assert agent.remarks == []


def test_the_agent_says_once_that_it_cannot_and_once_that_it_can_again(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    for version in (2, 4):
        agent.told(Stamp(G2, version))
        agent.hear()
        assert agent.publisher.done is not None and agent.publisher.done.error
    written(tmp_path, Stamp(G2, 6))
    agent.told(Stamp(G2, 6))
    agent.hear()
    agent.publisher.close()
    assert agent.publisher.done is not None and not agent.publisher.done.error
    assert len(agent.remarks) == 2
    assert "step 2 cannot be made visible" in agent.remarks[0] and "step 6" in agent.remarks[1]


def test_an_agent_of_a_job_without_checkpoints_has_no_thread(tmp_path: Path) -> None:
    agent = Agent(Path(""))
    agent.told(Stamp(G2, 4))
    agent.told(None)
    agent.publisher.close()
    assert agent.publisher.done is None
