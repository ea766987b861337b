"""A supervisor that does only what a test tells it: it answers reports, keeps the newest of each node, and sends wishes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil  # type: ignore[import-untyped]
import pytest
import zmq

from phoenix_launch.bootstrap import AgentBootstrap, AgentTimeouts, Command, OutputSettings, RunMode, StartMethod
from phoenix_launch.bus.keys import new_key_pair
from phoenix_launch.bus.supervisor import Peer, PeerKind, SupervisorBus
from phoenix_launch.messages import (
    Body,
    Farewell,
    Hello,
    HostFacts,
    NodePlan,
    NodeReport,
    PlanPhase,
    Prepare,
    ProbeReport,
    RankOrder,
    RankReport,
    Remark,
    ReportAck,
)
from phoenix_launch.output_messages import FromOutput, OutputChunk
from phoenix_launch.process_table import is_running, start_time
from phoenix_launch.wire import Generation

T = TypeVar("T")
JOB = "job-1"
G1, G2, G3 = Generation(1, 1), Generation(1, 2), Generation(1, 3)


def command(target: Path | str, *args: str, **changes: Any) -> Command:
    """A script that is started afresh, unless `changes` says otherwise."""
    return msgspec.structs.replace(
        Command(RunMode.SCRIPT, str(target), args, sys.executable, StartMethod.SPAWN, preload="none"), **changes
    )


def order(rank: int, **environment: str) -> RankOrder:
    return RankOrder(rank, rank, {"RANK": str(rank), "LOCAL_RANK": str(rank), **environment})


def plan(generation: Generation, phase: PlanPhase, *ranks: RankOrder, **fields: Any) -> NodePlan:
    return NodePlan(generation, phase, ranks, **{"grace": 5.0, **fields})


class Node:
    """One guardian with its agent, and what has been heard of them."""

    def __init__(
        self, supervisor: FakeSupervisor, name: str, bootstrap: AgentBootstrap, environ: dict[str, str]
    ) -> None:
        self.supervisor = supervisor
        self.name = name
        self.bootstrap = bootstrap
        self.hello: Hello | None = None
        self.reports: list[NodeReport] = []
        self.remarks: list[str] = []
        self.probes: list[ProbeReport] = []
        self.farewell = False
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "phoenix_launch.node.guardian"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        assert self.popen.stdin is not None
        self.popen.stdin.write(msgspec.json.encode(bootstrap) + b"\n")
        self.popen.stdin.flush()

    @property
    def report(self) -> NodeReport | None:
        return self.reports[-1] if self.reports else None

    def facts(self) -> HostFacts:
        return self.until(lambda: self.hello, what=f"{self.name} says hello").facts

    @property
    def agent_pid(self) -> int:
        return self.facts().agent_pid

    def until(self, check: Callable[[], T | bool | None], seconds: float = 20.0, what: str = "") -> T:
        return self.supervisor.until(check, seconds, what or f"{self.name}: {self.report}")

    def until_report(self, check: Callable[[NodeReport], object], seconds: float = 20.0) -> NodeReport:
        return self.until(lambda: self.report if self.report and check(self.report) else None, seconds)

    def rank(self, rank: int, generation: Generation = G1) -> RankReport | None:
        ranks = self.report.ranks if self.report else ()
        return next((r for r in ranks if r.rank == rank and r.generation == generation), None)

    def until_exit(self, rank: int, generation: Generation = G1, seconds: float = 20.0) -> RankReport:
        return self.until(lambda: r if (r := self.rank(rank, generation)) and r.exit else None, seconds)

    def send(self, body: Body, generation: Generation = G1) -> None:
        self.facts()  # nothing can be sent before it was heard
        assert self.supervisor.bus.send(self.name, body, generation)

    def run(self, *orders: RankOrder, generation: Generation = G1, parked: int = 0) -> None:
        self.send(Prepare({}, parked))
        self.send(plan(generation, PlanPhase.RUN, *orders), generation)

    def leave(self) -> None:
        """End in order, and see that it is so."""
        generation = self.report.quiesced if self.report else G1
        self.send(plan(max(generation, G1), PlanPhase.LEAVE), G1)
        self.until(lambda: self.popen.poll() is not None, what=f"{self.name} leaves")
        assert self.farewell

    def diagnostics(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.read().decode()


class FakeSupervisor:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bus = SupervisorBus(JOB, new_key_pair(), "127.0.0.1")
        self.nodes: dict[str, Node] = {}
        self.output: list[FromOutput] = []
        self.answers = True
        self._poller = zmq.Poller()
        self._poller.register(self.bus.control, zmq.POLLIN)
        self._poller.register(self.bus.output, zmq.POLLIN)

    def start(self, what: Command, name: str = "node0", environ: dict[str, str] | None = None, **changes: Any) -> Node:
        keys = new_key_pair()
        self.bus.allow(keys.public, Peer(PeerKind.AGENT, name))
        runtime = self.folder / "run"
        runtime.mkdir(exist_ok=True)
        bootstrap = AgentBootstrap(
            job=JOB,
            node=name,
            index=len(self.nodes),
            term=1,
            incarnation=f"{name}-1",
            control_endpoint=self.bus.control_endpoint,
            output_endpoint=self.bus.output_endpoint,
            server_key=self.bus.keys.public,
            public_key=keys.public,
            secret_key=keys.secret,
            environment={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parent.parent)},
            cwd=str(self.folder),
            command=what,
            output=OutputSettings(str(self.folder / "logs" / name)),
            timeouts=AgentTimeouts(
                heartbeat_interval=0.5, orphan=15, connect=10, fork_server=60, drain_output=2, reap=5
            ),
            simulated=True,
            slots_key="ab" * 32,
        )
        bootstrap = msgspec.structs.replace(bootstrap, **changes)
        python_path = str(Path(__file__).parent.parent)
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": python_path, "XDG_RUNTIME_DIR": str(runtime)}
        node = Node(self, name, bootstrap, environment | (environ or {}))
        self.nodes[name] = node
        return node

    def script(self, text: str, name: str = "script.py") -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def until(self, check: Callable[[], T | bool | None], seconds: float = 20.0, what: str = "") -> T:
        """The first true value of `check`; messages are heard and answered meanwhile."""
        deadline = time.monotonic() + seconds
        while True:
            value = check()
            if value:
                return value  # type: ignore[return-value]  # neither None nor False
            if time.monotonic() >= deadline:
                pytest.fail(f"not within {seconds:g} s: {what} (last: {value!r})")
            self.hear(0.01)

    def hear(self, seconds: float) -> None:
        self._poller.poll(int(seconds * 1000))
        while (received := self.bus.receive()) is not None:
            node, body = self.nodes[received.peer.name], received.envelope.body
            match body:
                case Hello():
                    node.hello = body
                    self._answer(received.route, 0)
                case NodeReport():
                    node.reports.append(body)
                    self._answer(received.route, body.seq)
                case Remark():
                    node.remarks.append(body.text)
                case ProbeReport():
                    node.probes.append(body)
                case Farewell():
                    node.farewell = True
        while self.bus.output.poll(0):
            decoded = self.bus.decode_output(self.bus.output.recv(zmq.NOBLOCK))
            if decoded is not None:
                self.output.append(decoded)

    def _answer(self, route: bytes, seq: int) -> None:
        if self.answers:
            self.bus.answer(route, ReportAck(seq), G1)

    def text(self, stream: int = 1) -> str:
        chunks = [c for c in self.output if isinstance(c, OutputChunk) and c.stream == stream]
        return b"".join(chunk.data for chunk in chunks).decode()

    def read_json(self, name: str, seconds: float = 20.0) -> Any:
        """What a script of the test has left in a file of the folder."""
        path = self.folder / name
        self.until(path.exists, seconds, what=f"{path} is written")
        return json.loads(path.read_text())

    def close(self) -> None:
        for node in self.nodes.values():
            if node.popen.poll() is None:
                for agent in psutil.Process(node.popen.pid).children():
                    agent.kill()  # its guardian ends the rest
            node.popen.wait(10)
            assert node.popen.stdin is not None and node.popen.stdout is not None
            node.popen.stdin.close()
            node.popen.stdout.close()
        self.bus.close()


class Witness:
    """Some processes, named so that a reused number is not taken for them."""

    def __init__(self, *pids: int) -> None:
        self.started = {pid: start_time(pid) for pid in pids}
        assert None not in self.started.values(), f"not all alive: {self.started}"

    def alive(self) -> list[int]:
        return [pid for pid, started in self.started.items() if started is not None and is_running(pid, started)]

    def gone(self) -> bool:
        return not self.alive()
