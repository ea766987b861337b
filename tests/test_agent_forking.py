"""With a fork server: workers are parked processes that became one, and outlive the server they were forked by."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from fake_supervisor import G1, G2, FakeSupervisor, Node, Witness, command, order, plan

from phoenix_launch.bootstrap import StartMethod
from phoenix_launch.messages import PlanPhase, Prepare, ProcessState

SCRIPT = """
import os, signal, subprocess, sys, time
print("rank", os.environ["RANK"], "torch" in sys.modules, sys.argv[1:], flush=True)
print("to stderr", file=sys.stderr, flush=True)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
if "--exit" in sys.argv:
    sys.exit(5)
time.sleep(600)
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[FakeSupervisor]:
    supervisor = FakeSupervisor(tmp_path)
    yield supervisor
    supervisor.close()


def start(supervisor: FakeSupervisor, *args: str, parked: int = 2, script: str = SCRIPT) -> Node:
    """A node whose fork server is up and has parked that many processes."""
    node = supervisor.start(command(supervisor.script(script), *args, start_method=StartMethod.FORK))
    node.send(Prepare({"PREPARED": "1"}, parked))
    node.until_report(lambda r: r.prepared and r.parked == parked, seconds=90)
    return node


def fork_server(node: Node) -> psutil.Process:
    children = [child for child in psutil.Process(node.agent_pid).children() if child.pid not in parked(node)]
    return next(child for child in children if "phoenix_runtime.fork_server" in child.cmdline())


def parked(node: Node) -> set[int]:
    assert node.report is not None
    return set(node.report.parked_pids) | {rank.pid for rank in node.report.ranks}


def named(process: psutil.Process) -> str:
    """Empty when it has ended since it was listed."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def test_parked_processes_become_workers_and_their_whole_trees_end(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, "--exit", "${local_rank}")
    waiting = parked(node)
    node.send(plan(G1, PlanPhase.RUN, order(0), order(1)))
    for rank in (0, 1):
        ended = node.until(lambda rank=rank: r if (r := node.rank(rank)) and r.exit and r.exit.tail else None)  # type: ignore[misc]
        assert ended.exit is not None and (ended.exit.code, ended.exit.tail.strip()) == (5, "to stderr")
        assert ended.pid in waiting, "a worker is a process that was parked"
        supervisor.until(lambda rank=rank: f"rank {rank} True ['--exit', '{rank}']" in supervisor.text())  # type: ignore[misc]
    node.until_report(lambda r: r.parked == 2 and not waiting & set(r.parked_pids))
    node.until(lambda: not [p for p in psutil.Process(node.agent_pid).children(recursive=True) if named(p) == "sleep"])
    node.leave()
    assert node.diagnostics() == ""


def test_workers_go_on_without_their_fork_server_which_is_started_again(supervisor: FakeSupervisor) -> None:
    node = start(supervisor)
    node.send(plan(G1, PlanPhase.RUN, order(0)))
    node.until_report(lambda r: r.applied == G1 and r.parked == 2)
    server, everybody = fork_server(node), Witness(*parked(node))
    server.kill()
    node.until_report(lambda r: not r.prepared)
    node.until_report(lambda r: r.prepared, seconds=90)
    assert len(everybody.alive()) == 3
    assert fork_server(node).pid != server.pid
    node.send(plan(G2, PlanPhase.QUIESCE), G2)
    node.until_report(lambda r: r.quiesced == G2)
    node.send(plan(G2, PlanPhase.RUN, order(0), order(1), order(2)), G2)
    report = node.until_report(lambda r: r.applied == G2)
    assert [rank.state for rank in report.ranks] == [ProcessState.RUNNING] * 3


def test_everything_ends_with_a_killed_agent_parked_processes_included(supervisor: FakeSupervisor) -> None:
    node = start(supervisor)
    node.send(plan(G1, PlanPhase.RUN, order(0)))
    node.until_report(lambda r: r.applied == G1 and r.parked == 2)
    supervisor.until(lambda: "rank 0" in supervisor.text())
    everybody = Witness(*(p.pid for p in psutil.Process(node.popen.pid).children(recursive=True)))
    os.kill(node.agent_pid, signal.SIGKILL)
    assert node.popen.wait(10) == 1
    assert everybody.gone()


def test_a_parked_process_hosts_the_store_and_the_next_generations_replaces_it(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, parked=1)
    node.send(plan(G1, PlanPhase.QUIESCE, host_store=True))
    first = node.until_report(lambda r: r.store and r.quiesced == G1).store
    assert first is not None and (first.generation, first.error) == (G1, "")
    socket.create_connection((first.address, first.port), timeout=5).close()
    node.send(plan(G1, PlanPhase.RUN, order(0), host_store=True))
    node.until_report(lambda r: r.applied == G1)
    node.send(plan(G2, PlanPhase.QUIESCE, host_store=True), G2)
    second = node.until_report(lambda r: r.store and r.store.generation == G2).store
    assert second is not None and second.port != first.port
    node.until_report(lambda r: r.quiesced == G2)
    node.send(plan(G2, PlanPhase.RUN, order(0), host_store=True), G2)
    node.until_report(lambda r: r.applied == G2)
    node.until(lambda: refused(first.address, first.port))
    socket.create_connection((second.address, second.port), timeout=5).close()


def refused(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_store_on_a_port_in_use_is_an_error_that_names_it(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, parked=0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        node.send(plan(G1, PlanPhase.QUIESCE, host_store=True, store_port=port))
        store = node.until_report(lambda r: r.store).store
    assert store is not None and "in use" in store.error and str(port) in store.error


def test_a_killed_parked_process_is_replaced(supervisor: FakeSupervisor) -> None:
    node = start(supervisor)
    victim = min(parked(node))
    os.kill(victim, signal.SIGKILL)
    node.until_report(lambda r: victim not in r.parked_pids and r.parked == 2)
    assert node.report is not None and node.report.complaint == ""


def test_a_fork_server_that_cannot_start_is_a_complaint_with_its_last_words(supervisor: FakeSupervisor) -> None:
    what = command(supervisor.script(SCRIPT), start_method=StartMethod.FORK, python="/bin/false")
    node = supervisor.start(what)
    node.send(Prepare({}, 1))
    report = node.until_report(lambda r: r.complaint, seconds=30)
    assert "the fork server ended 4 times within a minute" in report.complaint
    assert not report.prepared


def test_a_burst_of_parking_during_a_sweep_loses_nobody(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, parked=1)
    for number in range(1, 4):
        generation = type(G1)(1, number)
        node.send(plan(generation, PlanPhase.QUIESCE, signal=signal.SIGKILL), generation)
        node.send(plan(generation, PlanPhase.RUN, *map(order, range(4)), signal=signal.SIGKILL), generation)
        report = node.until_report(lambda r, generation=generation: r.applied == generation)  # type: ignore[misc]
        assert Witness(*(rank.pid for rank in report.ranks)).alive()
        assert [rank.exit for rank in report.ranks] == [None] * 4
