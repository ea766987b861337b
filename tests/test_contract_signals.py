"""torchrun's contract, without its defects: signals reach the workers, no wait is longer than asked for, nothing survives."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from phoenix_launch.job.stopping import HURRIED_GRACE
from tests.contract import NO_TORCH
from tests.jobs_under_test import Done, Running, run, script, started

Eventually = Callable[..., Any]

SLACK = 6.0  # seconds beyond what a grace grants: starting to end, killing, reading what is left, on a busy machine

# Notes every signal; `polite` ends at the first one. Has a child in a session of its own, which holds its output open.
NOTES = """
import os, signal, subprocess, sys
mode, rank, attempt = sys.argv[1], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
def note(text):
    with open(os.path.join(os.environ["WITNESS"], rank), "a") as file:
        file.write(text + "\\n")
def told(number, frame):
    note(signal.Signals(number).name)
    if mode == "polite":
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
    signal.signal(number, told)
if attempt == "1":
    sys.exit(0)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
note(f"pid {os.getpid()}\\npid {child.pid}\\nready")
if mode == "leaves":
    sys.exit(0)
if mode == "fails" and rank == "1":
    while not os.path.exists(os.path.join(os.environ["WITNESS"], "0")):
        pass
    sys.exit(5)
while True:
    signal.pause()
"""


class Job:
    """A running job of workers that take notes."""

    def __init__(self, running: Running, witness: Path, ranks: int) -> None:
        self.running = running
        self.witness = witness
        self.ranks = ranks

    def notes(self, rank: int = 0) -> list[str]:
        path = self.witness / str(rank)
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def ready(self) -> bool:
        return all("ready" in self.notes(rank) for rank in range(self.ranks))

    def told(self, rank: int = 0) -> list[str]:
        return [note for note in self.notes(rank) if note.startswith("SIG")]

    def survivors(self) -> list[int]:
        """Of the workers and their children."""
        pids = [int(n.split()[1]) for rank in range(self.ranks) for n in self.notes(rank) if n.startswith("pid ")]
        assert pids
        return [pid for pid in pids if lives(pid)]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@contextmanager
def noting(folder: Path, mode: str, *options: object, env: dict[str, str] | None = None) -> Iterator[Job]:
    folder.mkdir(exist_ok=True)
    witness = folder / "witness"
    witness.mkdir()
    ranks = 2 if mode == "fails" else 1
    args = ["--start-method", "spawn", "--nproc-per-node", ranks, *options, script(folder, NOTES), mode]
    with started(folder / "home", args, env={**NO_TORCH, "WITNESS": str(witness), **(env or {})}) as running:
        yield Job(running, witness, ranks)


def ended(job: Job, within: float) -> tuple[Done, float]:
    """How the job ended, and how long that took from now."""
    began = time.monotonic()
    done = job.running.wait(within + SLACK)
    return done, time.monotonic() - began


def test_each_signal_reaches_the_workers_and_the_exit_code_is_128_and_its_number(
    tmp_path: Path, eventually: Eventually
) -> None:
    names = ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"]
    with ExitStack() as stack:
        jobs = {}
        for name in names:
            more = ["--signals-to-handle", "SIGTERM,SIGUSR1"] if name == "SIGUSR1" else []
            jobs[name] = stack.enter_context(noting(tmp_path / name, "polite", *more))
        for name, job in jobs.items():
            eventually(job.ready, 40, f"{name} is ready")
        for name, job in jobs.items():
            job.running.signal(signal.Signals[name])
        for name, job in jobs.items():
            done, _ = ended(job, 30)
            assert done.code == 128 + signal.Signals[name], done.err
            assert job.told() == [name]
            assert [line for line in done.err.splitlines() if "SIG" in line and "stopping" in line], done.err
            assert "Traceback" not in done.err
            assert job.survivors() == []
            assert done.status()["exit_code"] == 128 + signal.Signals[name]


def test_a_stubborn_worker_is_killed_after_the_timeout_and_its_children_with_it(
    tmp_path: Path, eventually: Eventually
) -> None:
    with noting(tmp_path, "stubborn", env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}) as job:
        eventually(job.ready, 40)
        job.running.signal(signal.SIGTERM)
        done, seconds = ended(job, 1)
        assert done.code == 128 + signal.SIGTERM
        assert 1 <= seconds < 1 + SLACK
        assert job.told() == ["SIGTERM"]
        assert job.survivors() == []


def between(done: Done, first: str, second: str) -> float:
    """Seconds in the journal."""
    (begin,), (end,) = done.events(first), done.events(second)
    return float(end["t"] - begin["t"])


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_timeout_holds_when_a_worker_fails_and_when_all_are_restarted(tmp_path: Path, restarts: int) -> None:
    with noting(tmp_path, "fails", "--shutdown-timeout", 1, "--max-restarts", restarts) as job:
        done = job.running.wait()
        assert done.code == (0 if restarts else 1), done.err
        assert 1 <= between(done, "fault", "swap" if restarts else "job_finished") < 1 + SLACK
        assert job.told(0) == ["SIGTERM"]
        assert job.survivors() == []


@pytest.mark.parametrize("signals", [2, 3])
def test_more_signals_only_shorten_the_wait(tmp_path: Path, eventually: Eventually, signals: int) -> None:
    with noting(tmp_path, "stubborn", "--shutdown-timeout", 100) as job:
        eventually(job.ready, 40)
        job.running.signal(signal.SIGTERM)
        eventually(job.told)
        for name in (signal.SIGINT, signal.SIGHUP)[: signals - 1]:
            job.running.signal(name)
        shortest, longest = (HURRIED_GRACE, HURRIED_GRACE) if signals == 2 else (0, 0)
        done, seconds = ended(job, longest)
        assert done.code == 128 + signal.SIGTERM
        assert shortest - 0.5 <= seconds < longest + SLACK
        assert job.survivors() == []


def test_what_a_worker_leaves_behind_ends_although_the_worker_is_gone(tmp_path: Path) -> None:
    with noting(tmp_path, "leaves") as job:
        done = job.running.wait()
        assert done.code == 0
        assert job.survivors() == []


def test_a_signal_before_any_worker_has_started_ends_the_start(tmp_path: Path, eventually: Eventually) -> None:
    with noting(tmp_path, "polite", "--nproc-per-node", 1, "--nodes", 2) as job:
        eventually(lambda: job.running.events("job_started"), 40)
        # the journal's first line is written before signals are listened to; a node's log folder is made after that
        eventually(lambda: list((tmp_path / "home" / "jobs").glob("*/logs/node*")), 40)
        job.running.signal(signal.SIGTERM)
        done, _ = ended(job, 10)
        assert done.code == 128 + signal.SIGTERM
        assert "Traceback" not in done.err


def test_a_detached_job_ignores_sighup(tmp_path: Path, eventually: Eventually) -> None:
    with noting(tmp_path, "polite", "--detach") as job:
        done = job.running.wait()
        assert done.code == 0, done.err
        eventually(job.ready, 40)
        supervisor = json.loads((done.job / "job.json").read_text())["pid"]
        descriptor = os.pidfd_open(supervisor)
        signal.pidfd_send_signal(descriptor, signal.SIGHUP)
        os.close(descriptor)
        assert json.loads(run(tmp_path / "home", "status", "--json").out)["state"] == "running"
        assert run(tmp_path / "home", "stop").code == 0
        eventually(lambda: not lives(supervisor), 20)
        assert done.status()["exit_code"] == 128 + signal.SIGTERM
        assert job.told() == ["SIGTERM"]
        assert job.survivors() == []
