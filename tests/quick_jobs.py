"""Whole jobs of a second or two: with a stub in torch's place, a marked process tree, and a look at what they leave."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from phoenix_launch.process_table import look_up
from tests.jobs_under_test import SECONDS, Done, Running, run, started

STUB = Path(__file__).parent / "stub_torch"
GONE_SECONDS = 10.0  # in which nothing of a job may be left after its owner's death
MARK = "PHOENIX_TEST_MARK"

Eventually = Callable[..., object]


@dataclass
class Ground:
    """Where a test's jobs run: a home, a folder for sockets and temporary files, and a mark in every environment."""

    folder: Path
    runtime: Path  # short, unlike pytest's own folders
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def environment(self) -> dict[str, str]:
        place = str(self.runtime)
        return {"PYTHONPATH": str(STUB), "XDG_RUNTIME_DIR": place, "TMPDIR": place, MARK: self.mark}

    def script(self, source: str, name: str = "train.py") -> Path:
        path = self.folder / name
        path.write_text(source)
        return path

    def run(self, *args: object, env: Mapping[str, str] | None = None, seconds: float = SECONDS) -> Done:
        return run(self.home, *args, env={**self.environment, **(env or {})}, cwd=self.folder, seconds=seconds)

    def started(self, *args: object, env: Mapping[str, str] | None = None) -> AbstractContextManager[Running]:
        return started(self.home, args, env={**self.environment, **(env or {})}, cwd=self.folder)

    def processes(self) -> list[psutil.Process]:
        """All that live and were started by this test's jobs, however far they got away."""
        marked = f"{MARK}={self.mark}".encode()
        found = []
        for process in psutil.process_iter():
            try:
                with open(f"/proc/{process.pid}/environ", "rb") as file:
                    if marked in file.read().split(b"\0") and process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
            except (OSError, psutil.NoSuchProcess):
                continue
        return found

    def named(self, part: str) -> list[psutil.Process]:
        """Those whose command line has this in it."""
        return [process for process in self.processes() if part in " ".join(_command_line(process))]

    def agents(self) -> list[psutil.Process]:
        """A guardian's child that was forked and not executed: its command line is the guardian's."""
        guardians = {process.pid for process in self.named("phoenix_launch.node.guardian")}
        return [process for process in self.named("phoenix_launch.node.guardian") if _parent(process) in guardians]

    def guardians(self) -> list[psutil.Process]:
        inner = {process.pid for process in self.agents()}
        return [process for process in self.named("phoenix_launch.node.guardian") if process.pid not in inner]

    def fork_servers(self) -> list[psutil.Process]:
        """Of each agent's children that have the fork server's command line the oldest: the others were forked."""
        oldest: dict[int, psutil.Process] = {}
        for process in self.named("phoenix_runtime.fork_server"):
            agent = _parent(process)
            if agent in {other.pid for other in self.agents()} and (
                agent not in oldest or process.create_time() < oldest[agent].create_time()
            ):
                oldest[agent] = process
        return list(oldest.values())

    def store_hosts(self) -> list[psutil.Process]:
        return [process for process in self.named("phoenix_runtime.fork_server") if _listens(process)]

    def left(self) -> list[str]:
        return [f"{process.pid} {' '.join(_command_line(process))}" for process in self.processes()]

    def check_nothing_is_left(self, eventually: Eventually, job: Path | None) -> None:
        """No process, no folder for sockets, no port."""
        eventually(lambda: not self.left() or None, GONE_SECONDS, f"everything is gone: {self.left()}")
        eventually(lambda: not self._folders(), GONE_SECONDS, f"no runtime folder is left: {self._folders()}")
        if job is not None:
            host, _, port = _endpoint(job).rpartition(":")
            with socket.socket() as sock:
                assert sock.connect_ex((host, int(port))) != 0, "the bus still listens"

    def _folders(self) -> list[str]:
        return [path.name for path in self.runtime.iterdir() if path.name.startswith("phoenix-")]


def _endpoint(job: Path) -> str:
    endpoint: str = json.loads((job / "job.json").read_text())["control_endpoint"]
    return endpoint.removeprefix("tcp://")


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def _listens(process: psutil.Process) -> bool:
    try:
        return any(entry.status == psutil.CONN_LISTEN for entry in process.net_connections())
    except psutil.NoSuchProcess:
        return False


def _parent(process: psutil.Process) -> int:
    entry = look_up(process.pid)
    return entry.parent if entry else 0


def kill(process: psutil.Process | int, number: signal.Signals = signal.SIGKILL) -> None:
    """By its pid and start time (psutil's word for them)."""
    victim = psutil.Process(process) if isinstance(process, int) else process
    victim.send_signal(number)


@contextmanager
def fresh_ground(folder: Path) -> Iterator[Ground]:
    runtime = Path(tempfile.mkdtemp(prefix="run-", dir="/tmp"))
    ground = Ground(folder, runtime)
    try:
        yield ground
    finally:
        for process in ground.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        shutil.rmtree(runtime, ignore_errors=True)


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    with fresh_ground(tmp_path) as made:
        yield made
