"""The supervisor's loop with nodes that do at once what they are told: between a fault and the next step is no tick."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import zmq
from fake_nodes import node_report

from phoenix_launch.bus.agent import AgentLink
from phoenix_launch.bus.keys import new_key_pair
from phoenix_launch.bus.supervisor import SupervisorBus
from phoenix_launch.copies import KeptSlot, Slot, SlotPeer, Stamp
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.job import events as job_events
from phoenix_launch.job import membership
from phoenix_launch.job.environment import JobIdentity
from phoenix_launch.job.state import Outcome, Phase, Rules
from phoenix_launch.messages import (
    ExitReport,
    NodePlan,
    NodeReport,
    PlanPhase,
    Prepare,
    ProcessState,
    RankOrder,
    RankReport,
    RuntimeReport,
    StoreReport,
)
from phoenix_launch.records.folders import JobFolder
from phoenix_launch.records.journal import Swap, read_events
from phoenix_launch.supervision import supervisor as module
from phoenix_launch.supervision.chronicle import Chronicle
from phoenix_launch.supervision.console import Console
from phoenix_launch.supervision.guests import Guests
from phoenix_launch.supervision.handover import Keeper
from phoenix_launch.supervision.muster import Muster, Recruit
from phoenix_launch.supervision.signals import SignalPipe
from phoenix_launch.supervision.supervisor import Supervisor
from phoenix_launch.wire import NO_GENERATION, Generation
from tests.bootstraps import bootstrap

NODES = 3  # two with a rank each, one spare
NO_TICK = 60.0  # seconds: longer than the test may take
SECONDS = 20.0
G1, G2 = (Generation(1, n) for n in (1, 2))


class Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class Bell:
    """In the place of the signals: wakes the loop."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()

    def fileno(self) -> int:
        return self._read.fileno()

    def take(self) -> list[int]:
        return []

    def ring(self) -> None:
        self._write.send(b"!")

    def close(self) -> None:
        self._read.close()
        self._write.close()


class Node:
    """An agent with obedient workers, which says what is new as soon as it has heard a plan."""

    def __init__(self, bus: SupervisorBus, recruit: Recruit) -> None:
        self.index, self.incarnation = recruit.spec.index, recruit.incarnation
        given: dict[str, Any] = {
            "control_endpoint": bus.control_endpoint, "server_key": bus.keys.public,
            "public_key": recruit.keys.public, "secret_key": recruit.keys.secret,
        }  # fmt: skip
        base = bootstrap(recruit.spec.name)
        fields = {name: getattr(base, name) for name in base.__struct_fields__}
        self.link = AgentLink(type(base)(**(fields | given)))
        self.seq = 0
        self.plans: list[NodePlan] = []

    def say(self, *ranks: RankReport, plan: NodePlan | None = None) -> None:
        self.seq += 1
        generation = plan.generation if plan else NO_GENERATION
        applied = generation if plan and plan.phase in (PlanPhase.RUN, PlanPhase.PARK) else NO_GENERATION
        store = StoreReport(generation, "127.0.0.1", 4000) if plan and plan.host_store else None
        report = node_report(self.incarnation, self.seq, quiesced=generation, applied=applied, ranks=ranks, store=store)
        fields: dict[str, Any] = {name: getattr(report, name) for name in NodeReport.__struct_fields__}
        fields |= {"offered": generation, "slots": SlotPeer(self.index, "127.0.0.1", 5000 + self.index)}
        fields |= {"kept": tuple(KeptSlot(f"own{rank}", Slot(Stamp(G1, 5))) for rank in range(2))}
        self.link.send(NodeReport(**fields), generation)

    def hear(self) -> bool:
        """Take one message, if there is one, and answer a plan."""
        envelope = self.link.receive()
        if envelope is None:
            return False
        plan = envelope.body
        if isinstance(plan, NodePlan):
            self.plans.append(plan)
            self.say(*(self.rank(order, plan) for order in plan.ranks), plan=plan)
        return True

    def rank(self, order: RankOrder, plan: NodePlan) -> RankReport:
        said = RuntimeReport(holds=(f"own{order.rank}",), private=f"own{order.rank}", complete=5)
        born, at = order.born, plan.generation
        new = born == NO_GENERATION
        if plan.phase is PlanPhase.SWAP:
            assert plan.resumption is not None
            found = plan.resumption.stamp is not None and plan.resumption.addresses
            said = RuntimeReport(
                holds=said.holds, private=said.private, aborted=at, joined=at, live=None if new else Stamp(G1, 5),
                address=f"at{order.rank}", restored=at if found else NO_GENERATION,
            )  # fmt: skip
        return RankReport(order.rank, at if new else born, 1000, ProcessState.RUNNING, 5, runtime=said)


@dataclass
class Job:
    supervisor: Supervisor
    nodes: list[Node]
    bell: Bell
    screen: Screen
    journal: Path
    thread: threading.Thread = field(init=False)

    def start(self) -> None:
        self.thread = threading.Thread(target=lambda: self.supervisor.run(cast(SignalPipe, self.bell)))
        self.thread.start()

    def until_all_run(self, generation: Generation, nodes: tuple[int, ...]) -> None:
        poller = zmq.Poller()
        for node in self.nodes:
            poller.register(node.link.socket, zmq.POLLIN)
        end = time.monotonic() + SECONDS
        while not all(self.runs(index, generation) for index in nodes):
            assert time.monotonic() < end, f"not within {SECONDS:g} s: {[node.plans[-1:] for node in self.nodes]}"
            poller.poll(100)
            for node in self.nodes:
                while node.hear():
                    pass

    def runs(self, index: int, generation: Generation) -> bool:
        return any(
            plan.generation == generation and plan.phase is PlanPhase.RUN and plan.ranks
            for plan in self.nodes[index].plans
        )

    def end(self) -> None:
        self.supervisor._outcome = Outcome(exit_code=0, text="the test is over")
        self.bell.ring()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


class Nothing:
    """In a keeper's place: nobody takes over these jobs."""

    def keep(self, *_: object) -> str:
        return ""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(module, "TICK", NO_TICK)
    bus = SupervisorBus("job-0000", new_key_pair(), "127.0.0.1")
    muster = Muster(bus, cast(Any, None), "1", "python", "ssh", "", cast(Any, None), complete=True)
    screen, bell = Screen(), Bell()
    folder = JobFolder.create(tmp_path / "jobs", "job-0000")
    console = cast(Console, screen)
    chronicle = Chronicle.open(folder, console, [""] * NODES, cast(Any, None))
    supervisor = Supervisor(
        bus=bus, console=console, chronicle=chronicle, muster=muster, guests=Guests(bus),
        identity=JobIdentity(job="job-0000", run_id="r", role="default", max_restarts=0, signals=()),
        state=membership.start(Rules(seats_min=2, seats_max=2, heartbeat_timeout=NO_TICK), 1, 0.0),
        prepare=lambda *_: Prepare({}, 1), keeper=cast(Keeper, Nothing()), additions=cast(Any, None),
    )  # fmt: skip
    nodes = []
    for index in range(NODES):
        recruit = muster.enlist(NodeSpec(index=index, name=f"node{index}"), supervisor.clock.now)
        recruit.admitted, recruit.facts, recruit.probes = True, cast(Any, object()), ()
        supervisor._apply(
            job_events.Admitted(
                index=index, name=f"node{index}", domain=f"d{index}", slots=1, incarnation=recruit.incarnation,
                spare=index == 2,
            )
        )  # fmt: skip
        nodes.append(Node(bus, recruit))
    made = Job(supervisor, nodes, bell, screen, folder.journal_path)
    made.start()
    for node in nodes:
        node.say()
    made.until_all_run(G1, (0, 1))
    yield made
    if made.thread.is_alive():
        made.end()
    for node in nodes:
        node.link.close()
    bell.close()
    bus.close()


def test_from_a_fault_until_all_run_again_nothing_waits_for_a_tick(job: Job) -> None:
    dead = job.nodes[1]
    began = time.monotonic()
    order = dead.plans[-1].ranks[0]
    last = job.nodes[1].rank(order, dead.plans[-1])
    dead.say(RankReport(1, G1, 1000, ProcessState.GONE, 5, ExitReport(-9, 0.0), last.runtime), plan=dead.plans[-1])
    job.until_all_run(G2, (0, 1))
    took = time.monotonic() - began
    job.end()
    print(f"{took * 1000:.1f} ms")
    assert job.supervisor.state.phase is Phase.RUNNING
    assert next(plan.phase for plan in job.nodes[0].plans if plan.generation == G2) is PlanPhase.SWAP
    assert "step 6 is run again, 0 steps lost" in job.screen.lines[-1]
    assert job.screen.lines[-1].startswith("phoenix-run: swapped in place (g2): rank 1 on node1; ")
    (swap,) = [event for event in read_events(job.journal) if isinstance(event, Swap)]
    assert (swap.rung, swap.lost_ranks, swap.resumed_step, swap.lost_steps) == (1, (1,), 6, 0)
    assert [(m.rank, m.from_node, m.to_node, m.source) for m in swap.moves] == [(1, "node1", "node1", "own-node")]
    assert set(swap.phases) == {"detect", "plan", "quiesce", "rebuild", "restore"}
    assert swap.total == pytest.approx(sum(swap.phases.values()))
    status = job.supervisor.chronicle.status(job.supervisor.state)
    assert status.last_swap is not None
    assert (status.last_swap.rung, status.last_swap.total) == (1, swap.total)
    assert [rank.pid for rank in status.ranks] == [1000, 1000]


def knows_all_servers(node: Node) -> bool:
    ground = node.plans[-1].ground if node.plans else None
    return ground is not None and len(ground.servers) == NODES


def test_every_node_is_told_the_servers_of_all(job: Job) -> None:
    end = time.monotonic() + SECONDS
    while not all(knows_all_servers(node) for node in job.nodes):
        assert time.monotonic() < end
        for node in job.nodes:
            node.link.socket.poll(50)
            while node.hear():
                pass
    ground = job.nodes[2].plans[-1].ground
    assert ground is not None
    assert ground.domains == ((0, "d0"), (1, "d1"))
