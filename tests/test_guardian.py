"""Nothing of a node outlives its agent or its guardian, and neither is ended by what a terminal or ssh does."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_supervisor import FakeSupervisor, Node, Witness, command, order

from phoenix_launch.command_messages import DrillKind
from phoenix_launch.messages import Drill, NodePlan, PlanPhase
from phoenix_launch.node import diagnostics
from phoenix_launch.node.guardian import reap_seconds
from phoenix_launch.node.runtime_folder import SOCKET_PATH_BYTES, make_runtime_folder
from phoenix_launch.process_table import living_descendants
from phoenix_launch.wire import Generation

# A worker with a child, one in a session of its own, and an orphan that has left both and its environment behind.
FAMILY = """
import json, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
shell = ["sh", "-c", "setsid env -i sleep 600 >/dev/null 2>&1 & echo $!"]
orphan = int(subprocess.run(shell, stdout=subprocess.PIPE, text=True).stdout)
with open("family.tmp", "w") as file:
    json.dump([os.getpid(), child.pid, apart.pid, orphan], file)
os.rename("family.tmp", "family-" + os.environ["RANK"])
time.sleep(600)
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[FakeSupervisor]:
    supervisor = FakeSupervisor(tmp_path)
    yield supervisor
    supervisor.close()


@pytest.fixture
def node(supervisor: FakeSupervisor) -> Node:
    return supervisor.start(command(supervisor.script("import time; time.sleep(600)")))


def family(supervisor: FakeSupervisor, rank: int = 0) -> list[int]:
    pids = supervisor.read_json(f"family-{rank}")
    assert isinstance(pids, list)
    return pids


def start_family(supervisor: FakeSupervisor) -> tuple[Node, Witness]:
    node = supervisor.start(command(supervisor.script(FAMILY)))
    node.run(order(0))
    return node, Witness(*family(supervisor), node.agent_pid)


def runtime_is_clean(supervisor: FakeSupervisor) -> bool:
    return not list((supervisor.folder / "run").iterdir())


def test_everything_ends_when_the_agent_is_killed(supervisor: FakeSupervisor) -> None:
    node, everybody = start_family(supervisor)
    os.kill(node.agent_pid, signal.SIGKILL)
    assert node.popen.wait(10) == 1
    assert everybody.gone()
    assert runtime_is_clean(supervisor)


def test_everything_ends_when_the_guardian_is_killed(supervisor: FakeSupervisor) -> None:
    node, everybody = start_family(supervisor)
    node.popen.kill()
    node.until(everybody.gone)
    node.until(lambda: runtime_is_clean(supervisor))


def test_a_node_that_leaves_ends_everything_and_says_farewell(supervisor: FakeSupervisor) -> None:
    node, everybody = start_family(supervisor)
    node.leave()
    assert node.popen.returncode == 0
    assert everybody.gone()
    assert runtime_is_clean(supervisor)
    assert node.diagnostics() == ""


def test_neither_is_ended_by_the_signals_of_a_terminal_or_by_a_closed_channel(node: Node) -> None:
    agent = node.agent_pid
    assert node.popen.stdin is not None and node.popen.stdout is not None
    node.until(lambda: bool(node.reports))  # an agent that never heard of a supervisor may end with its channel
    node.popen.stdin.close()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        os.kill(node.popen.pid, number)
        os.kill(agent, number)
    before = len(node.reports)
    node.until(lambda: len(node.reports) >= before + 3)
    assert node.popen.poll() is None


def test_a_deaf_diagnostics_channel_ends_and_delays_nobody(supervisor: FakeSupervisor, node: Node) -> None:
    assert node.popen.stdout is not None
    fcntl.fcntl(node.popen.stdout.fileno(), fcntl.F_SETPIPE_SZ, 4096)
    node.popen.stdout.close()
    os.kill(node.agent_pid, signal.SIGKILL)
    assert node.popen.wait(10) == 1


def test_they_are_in_a_session_without_a_terminal(node: Node) -> None:
    assert os.getsid(node.agent_pid) == node.popen.pid
    assert Path(f"/proc/{node.agent_pid}/fd/0").resolve() == Path("/dev/null")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "the channel closed before"),
        (b'{"job": "x"', "the channel closed before"),
        (b"{}\n", "malformed bootstrap"),
    ],
)
def test_a_bootstrap_that_is_cut_short_is_one_clear_line(line: bytes, said: str, tmp_path: Path) -> None:
    environ = {"PYTHONPATH": str(Path(__file__).parent.parent), "XDG_RUNTIME_DIR": str(tmp_path)}
    argv = [sys.executable, "-m", "phoenix_launch.node.guardian"]
    done = subprocess.run(argv, input=line, capture_output=True, env=environ, timeout=30)
    assert done.returncode == 1
    assert said in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_guardian_stays_small_and_without_torch(node: Node) -> None:
    node.facts()
    assert "torch" not in Path(f"/proc/{node.popen.pid}/maps").read_text()
    assert resident(node.popen.pid) < 25 << 20


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_runtime_folder_is_private_and_short_enough_for_a_socket(tmp_path: Path) -> None:
    folder = make_runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    for unfit in (deep, tmp_path / "missing"):
        other = make_runtime_folder({"XDG_RUNTIME_DIR": str(unfit)})
        assert len(os.fsencode(other)) + len("/agent.sock") <= SOCKET_PATH_BYTES
        shutil.rmtree(other)


@pytest.mark.parametrize(
    ("line", "seconds"), [(b'{"timeouts": {"reap": 7}}', 7.0), (b"{}", 5.0), (b"x", 5.0), (b"[]", 5.0)]
)
def test_a_broken_bootstrap_does_not_change_the_time_to_reap(line: bytes, seconds: float) -> None:
    assert reap_seconds(line) == seconds


def test_a_line_to_a_full_pipe_is_dropped_at_once() -> None:
    read, write = os.pipe()
    before = os.dup(2)
    try:
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        os.write(write, b"x" * 4096)
        os.dup2(write, 2)
        started = time.monotonic()
        diagnostics.say("nobody reads this")
        assert time.monotonic() - started < 1
    finally:
        os.dup2(before, 2)
        for descriptor in (read, write, before):
            os.close(descriptor)


def test_a_child_forked_while_everything_is_being_killed_dies_too(supervisor: FakeSupervisor) -> None:
    spawner = "import subprocess\nwhile True: subprocess.Popen(['sleep', '5'], start_new_session=True)\n"
    before = {process.pid for process in living_descendants(os.getpid())}  # hosts that other tests have up
    node = supervisor.start(command(supervisor.script(spawner)))
    node.run(order(0))
    node.until(lambda: len(living_descendants(node.agent_pid)) > 3)
    os.kill(node.agent_pid, signal.SIGKILL)
    assert node.popen.wait(10) == 1
    assert not {process.pid for process in living_descendants(os.getpid())} - before


def test_a_drill_can_cut_the_power(supervisor: FakeSupervisor, eventually: Callable[..., bool]) -> None:
    node, everybody = start_family(supervisor)
    node.until_report(lambda report: report.ranks)
    node.send(Drill(DrillKind.KILL_NODE))
    assert node.popen.wait(10) == -signal.SIGKILL
    heard = len(node.reports)
    eventually(everybody.gone)
    supervisor.hear(0.2)
    assert not node.farewell
    assert all(rank.exit is None for report in node.reports for rank in report.ranks), "it said something after all"
    assert len(node.reports) <= heard + 1
    assert not supervisor.output or "OutputEnd" not in {type(each).__name__ for each in supervisor.output}
    assert runtime_is_clean(supervisor)


def test_leaving_is_possible_before_anything_was_prepared(node: Node) -> None:
    node.send(NodePlan(node_generation(node), PlanPhase.LEAVE))
    assert node.until(lambda: node.popen.poll() is not None)
    assert node.popen.returncode == 0
    assert node.farewell


def node_generation(node: Node) -> Generation:
    report = node.until_report(lambda _: True)
    return report.quiesced
