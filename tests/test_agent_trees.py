"""A worker ends together with all that came of it; an agent alone, frozen, unheard or told to do harm does what it should."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_supervisor import G1, G2, FakeSupervisor, Node, Witness, command, order, plan

from phoenix_launch.bootstrap import AgentTimeouts
from phoenix_launch.bus.keys import new_key_pair
from phoenix_launch.command_messages import DrillKind
from phoenix_launch.messages import Drill, PeerProbe, PlanPhase, Probe, ProcessState
from phoenix_launch.output_messages import OutputEnd

SLEEP = "import time; time.sleep(600)"
# A child, one in a session of its own, an orphan of a third session that still has the worker's environment.
FAMILY = """
import json, os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
shell = ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"]
orphan = int(subprocess.run(shell, stdout=subprocess.PIPE, text=True).stdout)
with open("family.tmp" + os.environ["RANK"], "w") as file:
    json.dump([os.getpid(), child.pid, apart.pid, orphan], file)
os.rename(file.name, "family-" + os.environ["RANK"])
time.sleep(600)
"""
FAST = AgentTimeouts(heartbeat_interval=0.1, orphan=1.5, connect=0.5, fork_server=60, drain_output=0.5, reap=5)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[FakeSupervisor]:
    supervisor = FakeSupervisor(tmp_path)
    yield supervisor
    supervisor.close()


def start(supervisor: FakeSupervisor, script: str, *args: str, **changes: Any) -> Node:
    return supervisor.start(command(supervisor.script(script), *args), **changes)


# --- trees -----------------------------------------------------------------------------------------------------------


def test_a_workers_death_ends_its_whole_tree_and_no_other_workers(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, FAMILY)
    node.run(order(0), order(1))
    mine, other = (Witness(*supervisor.read_json(f"family-{rank}")) for rank in (0, 1))
    os.kill(next(iter(mine.started)), signal.SIGKILL)
    node.until(mine.gone)
    node.until_exit(0)
    assert len(other.alive()) == 4
    assert node.popen.poll() is None


def test_what_left_every_trace_behind_goes_when_no_worker_is_left(supervisor: FakeSupervisor) -> None:
    script = FAMILY.replace("setsid sleep", "setsid env -i sleep")
    node = start(supervisor, script)
    node.run(order(0), order(1))
    mine, other = (Witness(*supervisor.read_json(f"family-{rank}")) for rank in (0, 1))
    os.kill(next(iter(mine.started)), signal.SIGKILL)
    node.until(lambda: len(mine.alive()) == 1)
    os.kill(next(iter(other.started)), signal.SIGKILL)
    node.until(lambda: mine.gone() and other.gone())


def test_quiesce_gives_the_grace_and_then_ends_whole_trees(supervisor: FakeSupervisor) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAMILY
    node = start(supervisor, stubborn)
    node.run(order(0))
    everybody = Witness(*supervisor.read_json("family-0"))
    started = time.monotonic()
    node.send(plan(G2, PlanPhase.QUIESCE, grace=1.0), G2)
    node.until_report(lambda r: r.ranks and r.ranks[0].state is ProcessState.QUIESCING)
    assert everybody.alive(), "the worker ignores the signal"
    node.until_report(lambda r: r.quiesced == G2)
    assert 0.9 < time.monotonic() - started < 8
    assert everybody.gone()
    ended = node.until_exit(0).exit
    assert ended is not None and ended.code == -signal.SIGKILL


def test_the_next_generation_runs_when_the_last_one_is_gone(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, SLEEP)
    node.run(order(0))
    first = node.until_report(lambda r: r.applied == G1)
    node.send(plan(G2, PlanPhase.QUIESCE), G2)
    node.until_report(lambda r: r.quiesced == G2)
    ended = node.until_exit(0).exit
    assert ended is not None and ended.code == -signal.SIGTERM, "it does not ignore what its agent ignores"
    node.send(plan(G2, PlanPhase.RUN, order(3)), G2)
    second = node.until_report(lambda r: r.applied == G2)
    assert [(r.rank, r.generation, r.state) for r in second.ranks] == [(3, G2, ProcessState.RUNNING)]
    assert Witness(second.ranks[0].pid).alive()
    assert second.ranks[0].pid != first.ranks[0].pid


def test_stop_reaches_the_group_of_a_worker_and_its_exit_is_reported(supervisor: FakeSupervisor) -> None:
    script = (
        "import signal, subprocess, sys, os\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "signal.signal(signal.SIGINT, lambda *_: (print('child', child.wait(), flush=True), os._exit(4)))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    node = start(supervisor, script)
    node.run(order(0))
    supervisor.until(lambda: "ready" in supervisor.text())
    node.send(plan(G1, PlanPhase.STOP, order(0), signal=signal.SIGINT, grace=20.0))
    ended = node.until_exit(0).exit
    assert ended is not None and ended.code == 4
    supervisor.until(lambda: f"child {-signal.SIGINT}" in supervisor.text())


def test_a_worker_whose_output_somebody_holds_open_is_over_all_the_same(supervisor: FakeSupervisor) -> None:
    script = (
        "import os, subprocess, time\n"
        "if os.environ['RANK'] == '1': time.sleep(600)\n"
        "subprocess.run(['sh', '-c', 'setsid env -i sleep 600 &'])\n"  # nobody's, as long as rank 1 may be its owner
        "print('done')\n"
    )
    node = start(supervisor, script)
    node.run(order(0), order(1))
    ended = node.until_exit(0).exit
    assert ended is not None and ended.code == 0
    supervisor.until(lambda: [end.rank for end in supervisor.output if isinstance(end, OutputEnd)] == [0, 0])
    assert "done" in supervisor.text()
    other = node.rank(1)
    assert other is not None and other.state is ProcessState.RUNNING


# --- drills, clocks, channels ----------------------------------------------------------------------------------------


def test_a_drill_kills_one_worker_or_the_agent(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, SLEEP)
    node.run(order(0), order(1))
    node.until_report(lambda r: r.applied == G1)
    node.send(Drill(DrillKind.KILL_WORKER, 1))
    ended = node.until_exit(1).exit
    assert ended is not None and ended.code == -signal.SIGKILL
    other = node.rank(0)
    assert other is not None and other.state is ProcessState.RUNNING
    node.send(Drill(DrillKind.KILL_AGENT))
    assert node.popen.wait(10) == 1
    assert Witness(os.getpid()).alive() and not Path(f"/proc/{other.pid}").exists()


def test_an_agent_without_a_supervisor_ends_everything_after_the_orphan_timeout(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, SLEEP, timeouts=FAST)
    node.run(order(0))
    worker = Witness(node.until_report(lambda r: r.applied == G1).ranks[0].pid)
    supervisor.answers = False
    started = time.monotonic()
    assert node.popen.wait(20) == 1
    assert 1.0 < time.monotonic() - started < 10
    assert worker.gone()
    assert "no word from the supervisor" in node.diagnostics()


def test_an_agent_that_was_frozen_takes_up_where_it_was(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, SLEEP, timeouts=FAST)
    node.run(order(0))
    node.until_report(lambda r: r.applied == G1)
    supervisor.answers = False
    seen = len(node.reports)
    node.until(lambda: len(node.reports) > seen + 3)  # no answer is on its way any more
    os.kill(node.agent_pid, signal.SIGSTOP)
    frozen_until = time.monotonic() + 2 * FAST.orphan
    supervisor.until(lambda: time.monotonic() > frozen_until)
    seen = len(node.reports)
    os.kill(node.agent_pid, signal.SIGCONT)
    node.until(lambda: len(node.reports) > seen)
    supervisor.answers = True
    seen = len(node.reports)
    node.until(lambda: len(node.reports) > seen + 5)
    assert node.popen.poll() is None


def test_a_supervisor_that_cannot_be_reached_is_named_with_the_reason(supervisor: FakeSupervisor) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        node = start(supervisor, SLEEP, timeouts=FAST, control_endpoint=endpoint)
        assert node.popen.wait(20) == 1
    assert f"cannot reach the supervisor at {endpoint}: Connection refused" in node.diagnostics()


def test_a_supervisor_that_knows_another_key_is_told_from_one_that_is_not_there(supervisor: FakeSupervisor) -> None:
    keys = new_key_pair()
    node = start(supervisor, SLEEP, timeouts=FAST, public_key=keys.public, secret_key=keys.secret)
    assert node.popen.wait(20) == 1
    assert "connected, but it does not answer" in node.diagnostics()


def test_neighbours_are_dialled_and_the_pair_that_cannot_talk_is_named(supervisor: FakeSupervisor) -> None:
    one, two = (start(supervisor, SLEEP, name=name) for name in ("node0", "node1"))
    port = two.facts().probe_port
    with socket.socket() as closed, socket.socket() as silent:
        closed.bind(("127.0.0.1", 0))
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        peers = (
            PeerProbe("node1", "127.0.0.1", port),
            PeerProbe("node7", "127.0.0.1", port),
            PeerProbe("node2", "127.0.0.1", closed.getsockname()[1]),
            PeerProbe("node3", "no such host", 1),
        )
        one.send(Probe(peers))
        result = one.until(lambda: one.probes[-1] if one.probes else None)
    errors = [peer.error for peer in result.peers]
    assert errors[:3] == ["", "somebody else answers there", "Connection refused"]
    assert errors[3]
