"""A node's checkpoint server is its agent's: started when wanted, told where the job stands, asked what it keeps."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]
import pytest
from fake_supervisor import G1, G2, G3, FakeSupervisor, Node, Witness, command, order, plan

from phoenix_launch.copies import SlotPeer, Stamp
from phoenix_launch.local_messages import SlotRules, SlotsKept
from phoenix_launch.messages import Ground, NodePlan, PlanPhase, Prepare, Resumption
from phoenix_launch.node.checkpoint_link import RESTARTS
from phoenix_launch.node.plan_terms import SlotTerms
from phoenix_launch.node.report import offer
from phoenix_launch.wire import NO_GENERATION

NOWHERE = Ground({}, (), ())
# Copies version after version of one bundle, from what it is told by its agent; a server that is gone is asked again.
COPIER = """
import itertools, os, socket, sys
from phoenix_launch import channel
from phoenix_launch.checkpoint.client import SlotsLink
from phoenix_launch.checkpoint.layout import Entry, Layout
from phoenix_launch.checkpoint.pairs import SlotRefusedError
from phoenix_launch.checkpoint.slots import slot_size
from phoenix_launch.copies import Stamp
from phoenix_launch.local_messages import WorkerReport
from phoenix_launch.messages import RuntimeReport

agent = socket.socket(socket.AF_UNIX)
agent.connect(os.environ["PHOENIX_AGENT"])
def say(**fields):
    channel.send(agent, WorkerReport(RuntimeReport(**fields)))
say()
while not (plan := channel.receive(agent)[0]).slots:
    pass
table = Layout.of([Entry("weight", "float32", (1024,), 4096)])

def copy(link, version):
    stamp = Stamp(plan.generation, version)
    writer = link.fill("b", stamp, slot_size(table, 0))
    if writer is not None:
        writer.begin("job-1", "b", stamp, table, b"")
        writer.seal()
    link.sealed("b", stamp)
    if link.copied("b", stamp, (0,)):
        raise SlotRefusedError("not sealed")
    link.complete = version
    say(holds=("b", str(version)))

def session(versions):
    link = SlotsLink(plan.slots, "job-1", 0, 5.0)
    link.generation = plan.generation
    for version in versions:
        copy(link, version)
"""
THREE = "\nsession(range(3))\nimport time; time.sleep(600)\n"
ENDLESS = """
versions = itertools.count()
while True:
    try:
        session(versions)
    except OSError:
        os.sched_yield()
    except SlotRefusedError:
        sys.exit(0)
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[FakeSupervisor]:
    supervisor = FakeSupervisor(tmp_path)
    yield supervisor
    supervisor.close()


def start(supervisor: FakeSupervisor, script: str = "import time; time.sleep(600)", *, key: str = "ab" * 32) -> Node:
    node = supervisor.start(command(supervisor.script(script)), slots_key=key)
    node.send(Prepare({}, 0))
    return node


def server(node: Node) -> psutil.Process | None:
    for child in psutil.Process(node.agent_pid).children():
        try:
            if "phoenix_launch.checkpoint.server" in child.cmdline():
                return child
        except psutil.NoSuchProcess:
            continue
    return None


def up(node: Node) -> SlotPeer:
    slots = node.until_report(lambda r: r.slots).slots
    assert slots is not None
    return slots


def swap(stage: int = 0) -> NodePlan:
    ranks = (msgspec.structs.replace(order(0), born=G1),)
    return plan(G2, PlanPhase.SWAP, *ranks, resumption=Resumption(Stamp(G1, 2) if stage else None), ground=NOWHERE)


def copied(node: Node, version: int) -> bool:
    rank = node.rank(0)
    return rank is not None and rank.runtime is not None and rank.runtime.holds == ("b", str(version))


# --- when there is one -----------------------------------------------------------------------------------------------


def test_a_job_that_does_not_know_the_runtime_has_no_server_and_nothing_to_offer(supervisor: FakeSupervisor) -> None:
    node = start(supervisor)
    node.send(plan(G1, PlanPhase.RUN, order(0)))
    node.until_report(lambda r: r.applied == G1)
    node.send(plan(G2, PlanPhase.QUIESCE), G2)
    report = node.until_report(lambda r: r.quiesced == G2)
    assert (report.offered, report.kept, report.slots, server(node)) == (G2, (), None, None)


def test_the_server_comes_with_the_first_worker_that_says_hello(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, COPIER + THREE)
    node.send(plan(G1, PlanPhase.RUN, order(0)))
    node.until(lambda: copied(node, 2))
    assert up(node) == SlotPeer(0, "127.0.0.1", up(node).port)


def test_the_server_comes_with_a_plan_that_needs_one_and_goes_with_its_agent(supervisor: FakeSupervisor) -> None:
    node = start(supervisor)
    node.send(plan(G1, PlanPhase.PARK, ground=NOWHERE))
    up(node)
    process = server(node)
    assert process is not None
    witness = Witness(process.pid)
    os.kill(node.agent_pid, signal.SIGKILL)
    node.until(witness.gone)
    node.until(lambda: not list((supervisor.folder / "run").iterdir()))


def test_a_node_that_leaves_leaves_no_server_and_no_socket(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, COPIER + THREE)
    node.send(plan(G1, PlanPhase.RUN, order(0)))
    node.until(lambda: copied(node, 2))
    process = server(node)
    assert process is not None
    witness = Witness(process.pid)
    node.leave()
    assert witness.gone() and not list((supervisor.folder / "run").iterdir())


# --- what it keeps ---------------------------------------------------------------------------------------------------


def test_what_is_kept_is_told_when_it_is_asked_for_and_not_while_all_run(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, COPIER + THREE)
    node.send(plan(G1, PlanPhase.RUN, order(0)))
    node.until(lambda: copied(node, 2))
    report = node.until_report(lambda r: r.offered == G1)
    assert report.kept == ()
    node.send(swap(), G2)
    offer = node.until_report(lambda r: r.offered == G2)
    assert {(kept.bundle, kept.slot.stamp) for kept in offer.kept} == {("b", Stamp(G1, 1)), ("b", Stamp(G1, 2))}
    assert all(not r.kept for r in node.reports if r.offered != G2)


def test_who_still_writes_for_an_older_generation_is_refused_before_anything_is_offered(
    supervisor: FakeSupervisor,
) -> None:
    node = start(supervisor, COPIER + ENDLESS)
    node.send(plan(G1, PlanPhase.RUN, order(0)))
    node.until(lambda: (r := node.rank(0)) and r.runtime and r.runtime.holds)
    node.send(swap(), G2)
    first = node.until_report(lambda r: r.offered == G2).kept
    ended = node.until_exit(0)
    assert ended.exit is not None and ended.exit.code == 0, "it was refused"
    seq = node.reports[-1].seq
    node.until_report(lambda r: r.seq > seq)
    assert node.report is not None and node.report.kept == first != ()


def test_a_server_that_died_is_replaced_where_workers_look_for_it(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, COPIER + ENDLESS)
    node.send(plan(G1, PlanPhase.RUN, order(0)))
    node.until(lambda: (r := node.rank(0)) and r.runtime and r.runtime.holds)
    before, process = up(node), server(node)
    assert process is not None
    process.kill()
    node.until_report(lambda r: r.slots and r.slots != before)
    seen = node.rank(0)
    assert seen is not None and seen.runtime is not None and seen.exit is None
    holds = seen.runtime.holds
    node.until(lambda: (r := node.rank(0)) and r.runtime and r.runtime.holds != holds)
    assert node.remarks == []


def test_a_server_that_dies_again_and_again_is_given_up_and_the_node_has_nothing_to_offer(
    supervisor: FakeSupervisor,
) -> None:
    node = start(supervisor)
    node.send(plan(G1, PlanPhase.QUIESCE, ground=NOWHERE))
    for _ in range(RESTARTS + 1):
        process = node.until(lambda: server(node))
        witness = Witness(process.pid)
        process.kill()
        node.until(witness.gone)
    node.until(lambda: node.remarks)
    assert node.remarks[0].startswith("copies in memory are off on node0: its server ended 4 times within a minute")
    node.send(plan(G2, PlanPhase.QUIESCE, ground=NOWHERE), G2)
    assert node.until_report(lambda r: r.offered == G2).kept == ()


def test_a_server_that_is_stopped_does_not_hold_the_agent_up(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, COPIER + THREE)
    node.send(plan(G1, PlanPhase.RUN, order(0)))
    node.until(lambda: copied(node, 2))
    process = server(node)
    assert process is not None
    process.suspend()
    node.send(swap(), G2)
    report = node.until_report(lambda r: r.quiesced == G2, seconds=5)
    assert report.offered == G1
    process.resume()
    assert node.until_report(lambda r: r.offered == G2).kept


# --- what follows from plans -----------------------------------------------------------------------------------------


def test_the_rules_are_gathered_from_plan_after_plan() -> None:
    terms = SlotTerms(0)
    ours, theirs = SlotPeer(0, "a", 1), SlotPeer(1, "b", 2)
    terms.follow(plan(G1, PlanPhase.PARK, ground=Ground({}, (), (ours, theirs))))
    assert terms.rules(()) is None
    terms.follow(plan(G1, PlanPhase.RUN))
    assert terms.rules((7, 8)) == SlotRules(G1, 0, (), (7, 8), (theirs,))
    lineage = (Stamp(G2, 5),)
    terms.follow(plan(G2, PlanPhase.SWAP, resumption=Resumption(Stamp(G1, 5), lineage)))
    assert terms.rules(()) == SlotRules(G2, 5, lineage, (), (theirs,))
    terms.follow(plan(G3, PlanPhase.SWAP, resumption=Resumption(None, lineage)))
    assert terms.rules(()) == SlotRules(G3, 5, lineage, (), (theirs,))
    terms.follow(plan(G3, PlanPhase.STOP))
    assert terms.rules(()) == SlotRules(G3, 5, lineage, (), (theirs,))


def test_an_offer_is_what_the_server_said_of_this_generation() -> None:
    kept = SlotsKept(G1, ())
    assert offer(None, None) == (NO_GENERATION, ())
    assert offer(plan(G2, PlanPhase.SWAP), None) == (G2, ())
    assert offer(plan(G2, PlanPhase.SWAP), kept) == (G1, ())
