"""A worker that knows the runtime says so to its agent, hears what is new, and cannot hold the agent up."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_supervisor import G1, G2, FakeSupervisor, Node, Witness, command, order, plan

from phoenix_launch.copies import Source, SourceKind, Stamp
from phoenix_launch.messages import Ground, NodePlan, PlanPhase, Prepare, RankOrder, Resumption, RuntimeReport
from phoenix_launch.node.report import is_news
from phoenix_launch.wire import NO_GENERATION, Generation

# What the runtime does, without a training: it leaves its step, tells its address, restores, and ends when it may.
WORKER = """
import os, socket, sys
import msgspec
from phoenix_launch import channel
from phoenix_launch.copies import Stamp
from phoenix_launch.local_messages import WorkerReport
from phoenix_launch.messages import PlanPhase, RuntimeReport
from phoenix_launch.wire import NO_GENERATION

RANK = os.environ["RANK"]
agent = socket.socket(socket.AF_UNIX)
agent.connect(os.environ["PHOENIX_AGENT"])
said = RuntimeReport()

def say(**changes):
    global said
    said = msgspec.structs.replace(said, **changes)
    channel.send(agent, WorkerReport(said))

def plans():
    while (received := channel.receive(agent)) is not None:
        with open(f"heard-{RANK}-{os.getpid()}", "a") as file:
            file.write(msgspec.json.encode(received[0]).decode() + "\\n")
        yield received[0]

def follow(plan):
    g, resumption = plan.generation, plan.resumption
    if plan.phase is PlanPhase.SWAP and said.joined < g:
        say(aborted=g, joined=g, live=None if plan.alone else Stamp(g, 7), address=f"{RANK}.{g}")
    if resumption is not None and resumption.addresses and said.restored < g:
        say(restored=g)
    if plan.leave:
        sys.exit(0)
"""
FOLLOW = "\nsay()\nfor plan in plans():\n    follow(plan)\n"


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[FakeSupervisor]:
    supervisor = FakeSupervisor(tmp_path)
    yield supervisor
    supervisor.close()


def start(supervisor: FakeSupervisor, more: str = FOLLOW) -> Node:
    node = supervisor.start(command(supervisor.script(WORKER + more)), slots_key="")
    node.send(Prepare({}, 0))
    return node


def said(node: Node, rank: int, generation: Generation = G1) -> RuntimeReport | None:
    report = node.rank(rank, generation)
    return report.runtime if report is not None else None


def pid(node: Node, rank: int, generation: Generation = G1) -> int:
    return node.until(lambda: r.pid if (r := node.rank(rank, generation)) else 0)


def heard(supervisor: FakeSupervisor, rank: int, process: int) -> list[dict[str, Any]]:
    path = supervisor.folder / f"heard-{rank}-{process}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def until_heard(node: Node, rank: int, count: int, process: int) -> list[dict[str, Any]]:
    return node.until(lambda: h if len(h := heard(node.supervisor, rank, process)) >= count else None)


def swap(stage: int, *orders: RankOrder, phase: PlanPhase = PlanPhase.SWAP) -> NodePlan:
    addresses = {0: "0.g2", 1: "1.g2"} if stage > 1 else {}
    return plan(G2, phase, *orders, resumption=Resumption(Stamp(G1, 7) if stage else None, (), addresses))


# --- what is said and told -------------------------------------------------------------------------------------------


def test_a_worker_that_says_hello_is_reported_and_told_where_it_is(supervisor: FakeSupervisor) -> None:
    node = start(supervisor)
    assert node.until_report(lambda r: r.prepared).offered == NO_GENERATION
    node.send(plan(G1, PlanPhase.RUN, order(0)))
    node.until(lambda: said(node, 0) == RuntimeReport())
    (told,) = until_heard(node, 0, 1, pid(node, 0))
    assert (told["generation"], told["phase"]) == ({"term": 1, "n": 1}, "run")
    assert (told["node"], told["alone"], told["slots"], told["ground"], told["leave"]) == (0, False, "", None, False)


def test_a_worker_that_knows_nothing_of_us_has_no_word_in_the_report(supervisor: FakeSupervisor) -> None:
    node = supervisor.start(command(supervisor.script("import time; time.sleep(600)")))
    node.run(order(0))
    report = node.until_report(lambda r: r.applied == G1 and r.offered == G1)
    assert report.ranks[0].runtime is None and report.slots is None


def test_a_worker_hears_what_is_new_and_nothing_twice(supervisor: FakeSupervisor) -> None:
    node = start(supervisor)
    run = plan(G1, PlanPhase.RUN, order(0))
    node.send(run)
    until_heard(node, 0, 1, pid(node, 0))
    node.send(run)
    ground = Ground({0: 0}, ((0, "a"),), ())
    node.send(msgspec.structs.replace(run, ground=ground))
    until_heard(node, 0, 2, pid(node, 0))
    node.send(msgspec.structs.replace(run, ground=ground, grace=9.0))
    node.send(msgspec.structs.replace(run, ground=ground, leave=True))
    assert node.until_exit(0).exit is not None
    first, second, third = heard(supervisor, 0, pid(node, 0))
    assert (first["ground"], second["ground"]["places"], second["leave"], third["leave"]) == (
        None,
        {"0": 0},
        False,
        True,
    )


def test_a_swap_from_the_notice_to_the_next_step(supervisor: FakeSupervisor) -> None:
    node = start(supervisor)
    node.send(plan(G1, PlanPhase.RUN, order(0), order(1)))
    node.until(lambda: said(node, 0) and said(node, 1))
    survivor = pid(node, 0)
    os.kill(pid(node, 1), signal.SIGKILL)
    node.until_exit(1)
    source = Source("b", SourceKind.OWN_NODE, 0)
    orders = (
        msgspec.structs.replace(order(0), born=G1),
        msgspec.structs.replace(order(1), sources=(source,)),
    )
    node.send(swap(0, *orders), G2)
    node.until(lambda: (s := said(node, 0)) and s.joined == s.aborted == G2 and s.live and s.address == "0.g2")
    node.until(lambda: (s := said(node, 1, G2)) and s.joined == G2 and s.live is None)
    node.send(swap(2, *orders), G2)
    node.until(lambda: all((s := said(node, rank, g)) and s.restored == G2 for rank, g in ((0, G1), (1, G2))))
    node.send(swap(2, *orders, phase=PlanPhase.RUN), G2)
    report = node.until_report(lambda r: r.applied == G2)
    assert [(r.rank, r.generation, r.pid) for r in report.ranks] == [(0, G1, survivor), (1, G2, pid(node, 1, G2))]
    told = until_heard(node, 1, 3, pid(node, 1, G2))
    assert [(t["phase"], t["alone"]) for t in told] == [("swap", True), ("swap", True), ("run", True)]
    assert told[0]["sources"] == [{"bundle": "b", "kind": "own-node", "node": 0, "holder": -1}]
    assert [t["phase"] for t in until_heard(node, 0, 4, survivor)] == ["run", "swap", "swap", "run"]


def test_who_is_not_named_any_more_is_told_nothing(supervisor: FakeSupervisor) -> None:
    node = start(supervisor)
    node.send(plan(G1, PlanPhase.RUN, order(0)))
    until_heard(node, 0, 1, pid(node, 0))
    worker = pid(node, 0)
    node.send(plan(G2, PlanPhase.QUIESCE), G2)
    node.until_report(lambda r: r.quiesced == G2)
    assert len(heard(supervisor, 0, worker)) == 1


def test_the_last_word_of_a_worker_comes_with_its_exit(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, "\nfor step in range(200):\n    say(holds=(str(step),))\nsay(leaving=True)\nos._exit(0)\n")
    node.send(plan(G1, PlanPhase.RUN, order(0)))
    ended = node.until_exit(0)
    assert ended.exit is not None and ended.exit.code == 0
    assert ended.runtime is not None and ended.runtime.leaving and ended.runtime.holds == ("199",)


def test_what_is_complete_is_read_from_the_page_and_is_no_news(supervisor: FakeSupervisor) -> None:
    more = """
from phoenix_launch.progress import ProgressPage
page = ProgressPage.attach(os.environ["PHOENIX_PROGRESS"])
page.write_complete(41)
"""
    node = start(supervisor, more + FOLLOW)
    node.send(plan(G1, PlanPhase.RUN, order(0)))
    node.until(lambda: (s := said(node, 0)) and s.complete == 41)
    report = node.report
    assert report is not None and report.ranks[0].runtime is not None
    later = msgspec.structs.replace(report.ranks[0].runtime, complete=42)
    assert not is_news(with_runtime(report, later), report)
    assert is_news(with_runtime(report, msgspec.structs.replace(later, leaving=True)), report)
    assert is_news(msgspec.structs.replace(report, offered=G2), report)


def with_runtime(report: Any, runtime: RuntimeReport) -> Any:
    return msgspec.structs.replace(report, ranks=(msgspec.structs.replace(report.ranks[0], runtime=runtime),))


# --- who must not be heard, and who must not hold the agent up -------------------------------------------------------


def test_who_is_no_worker_is_sent_away_and_that_is_said_once(supervisor: FakeSupervisor) -> None:
    more = """
import subprocess
code = "import os, socket; s = socket.socket(socket.AF_UNIX); s.connect(os.environ['PHOENIX_AGENT']); print(s.recv(1))"
say()
for _ in range(3):
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "b''\\n"
say(holds=("done",))
for plan in plans():
    follow(plan)
"""
    node = start(supervisor, more)
    node.send(plan(G1, PlanPhase.RUN, order(0)))
    node.until(lambda: (s := said(node, 0)) and s.holds == ("done",))
    seq = node.reports[-1].seq
    node.until_report(lambda r: r.seq > seq)
    (remark,) = node.remarks
    assert "none of its workers" in remark and "(said once)" in remark


def test_a_worker_that_talks_nonsense_loses_its_line_and_nothing_else(supervisor: FakeSupervisor) -> None:
    more = """
say(holds=("before",))
agent.sendall(b"\\0\\0\\0\\4nope")
assert agent.recv(1 << 16).endswith(b"") and not list(iter(lambda: agent.recv(1 << 16), b""))[1:]
agent = socket.socket(socket.AF_UNIX)
agent.connect(os.environ["PHOENIX_AGENT"])
say(holds=("again",))
for plan in plans():
    follow(plan)
"""
    node = start(supervisor, more)
    node.send(plan(G1, PlanPhase.RUN, order(0), order(1)))
    node.until(lambda: all((s := said(node, rank)) and s.holds == ("again",) for rank in (0, 1)))
    node.until(lambda: node.remarks)
    assert len(node.remarks) == 1 and "malformed" in node.remarks[0]


def test_a_worker_that_is_stopped_in_the_middle_of_a_word_holds_nobody_up(supervisor: FakeSupervisor) -> None:
    more = """
say()
if RANK == "0":
    frame = channel._HEADER.pack(len(data := channel.encode(WorkerReport(RuntimeReport(holds=("whole",)))))) + data
    agent.sendall(frame[:9])
    os.kill(os.getpid(), 19)
    agent.sendall(frame[9:])
for plan in plans():
    say(holds=(str(len(plan.ground.places) if plan.ground else 0),)) if RANK == "1" else None
"""
    node = start(supervisor, more)
    run = plan(G1, PlanPhase.RUN, order(0), order(1))
    node.send(run)
    stopped = pid(node, 0)
    node.until(lambda: (Path(f"/proc/{stopped}/stat").read_text().rpartition(") ")[2][0]) == "T")
    for count in range(1, 20):
        node.send(msgspec.structs.replace(run, ground=Ground(dict.fromkeys(range(count), 0), (), ())))
        node.until(lambda: (s := said(node, 1)) and s.holds == (str(count),), seconds=5)  # noqa: B023
    os.kill(stopped, signal.SIGCONT)
    node.until(lambda: (s := said(node, 0)) and s.holds == ("whole",))


def test_a_worker_that_does_not_read_hears_the_newest_when_it_does(supervisor: FakeSupervisor) -> None:
    more = """
say()
while not os.path.exists("read"):
    os.sched_yield()
last = 0
for plan in plans():
    if plan.ground is not None and plan.ground.places[0] == 39:
        say(holds=("newest",))
"""
    node = start(supervisor, more)
    run = plan(G1, PlanPhase.RUN, order(0))
    node.send(run)
    node.until(lambda: said(node, 0))
    worker = pid(node, 0)
    for count in range(40):  # each of them fills the socket's buffer for a good part
        ground = Ground(dict.fromkeys(range(40_000), count), (), ())
        node.send(msgspec.structs.replace(run, ground=ground))
    seq = node.reports[-1].seq
    node.until_report(lambda r: r.seq > seq + 1, seconds=5)
    (supervisor.folder / "read").touch()
    node.until(lambda: (s := said(node, 0)) and s.holds == ("newest",))
    assert len(heard(supervisor, 0, worker)) < 20, "what was out of date was not sent"


def test_the_socket_is_there_before_any_worker_and_gone_with_the_agent(supervisor: FakeSupervisor) -> None:
    node = start(supervisor)
    node.facts()
    (path,) = (supervisor.folder / "run").glob("*/agent.sock")
    assert path.stat().st_mode & 0o777 == 0o600
    node.send(plan(G1, PlanPhase.RUN, order(0)))
    node.until(lambda: said(node, 0))
    worker = Witness(pid(node, 0))
    node.leave()
    assert worker.gone() and not list((supervisor.folder / "run").iterdir())
