"""Jobs whose supervisor is killed: another one takes over, and nobody can tell by what was trained."""

from __future__ import annotations

import functools
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import jobs_under_test
import pytest
from jobs_under_test import Done, Running

from phoenix_launch.process_table import look_up

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).parent / "gated_script.py"
STEPS, GATES = 40, (12, 24)
OPTIONS = ("--nodes", 2, "--spares", 1)
SECONDS = 60.0
Eventually = Callable[..., object]


def digests(done: Done) -> dict[int, str]:
    """By rank. From the logs: what was written while nobody supervised is only there."""
    text = "".join(path.read_text() for path in done.job.glob("logs/*/*.out"))
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {line["rank"]: line["digest"] for line in lines}


@functools.cache
def calm() -> dict[int, str]:
    with tempfile.TemporaryDirectory() as folder:
        done = jobs_under_test.run(Path(folder), "--nodes", 2, SCRIPT, "ddp", STEPS, folder)
        assert done.code == 0, done.err
        assert len(digests(done)) == 2
        return digests(done)


@dataclass
class Drill:
    """One job that waits at its gates."""

    folder: Path
    running: Running
    eventually: Eventually

    def at(self, gate: int) -> None:
        """Both ranks are there."""
        there = [self.folder / f"at-{gate}-{rank}" for rank in range(2)]
        self.eventually(lambda: all(path.exists() for path in there), SECONDS, f"all are at {gate}")

    def open(self, gate: int) -> None:
        (self.folder / f"open-{gate}").touch()

    def pid(self, rank: int) -> int:
        """Of the process that holds it now."""
        return [int(event["pid"]) for event in self.running.events("worker_started") if event["rank"] == rank][-1]

    def kill_supervisor(self) -> None:
        self.running.signal(signal.SIGKILL)
        assert self.running.wait().code == -signal.SIGKILL

    @contextmanager
    def resumed(self, *words: object) -> Iterator[Running]:
        with jobs_under_test.started(self.running.home, ("resume", *words)) as resumed:
            self.eventually(lambda: resumed.events("supervisor_resumed") or resumed.process.poll() is not None, SECONDS)
            assert resumed.process.poll() is None, resumed.wait().err
            yield resumed

    def is_over(self, resumed: Running) -> Done:
        """It has ended well, and as if nothing had happened."""
        done = resumed.wait(SECONDS)
        assert done.code == 0, done.err
        assert digests(done) == calm()
        return done


@pytest.fixture
def drill(tmp_path: Path, eventually: Eventually) -> Iterator[Drill]:
    with started(tmp_path) as running:
        yield Drill(tmp_path, running, eventually)


def started(folder: Path, *options: object) -> AbstractContextManager[Running]:
    return jobs_under_test.started(folder / "home", (*OPTIONS, *options, SCRIPT, "ddp", STEPS, folder, *GATES))


def gone(pid: int) -> bool:
    return look_up(pid) is None


@pytest.mark.slow
def test_training_goes_on_without_a_supervisor_and_another_one_repairs_the_next_fault(drill: Drill) -> None:
    drill.at(12)
    drill.kill_supervisor()
    drill.open(12)
    drill.at(24)  # nobody supervises
    with drill.resumed() as resumed:
        (event,) = resumed.events("supervisor_resumed")
        assert event["adopted"] and event["term"] == 2
        assert event["nodes"] == ["node0", "node1", "node2"] and event["generation"] == {"term": 1, "n": 1}
        os.kill(drill.pid(1), signal.SIGKILL)
        drill.open(24)
        done = drill.is_over(resumed)
    (swap,) = done.events("swap")
    assert swap["rung"] == 1 and swap["lost_ranks"] == [1] and swap["generation"] == {"term": 2, "n": 2}


@pytest.mark.slow
def test_a_fault_without_a_supervisor_parks_the_job_until_another_one_comes(drill: Drill) -> None:
    drill.at(12)
    drill.kill_supervisor()
    drill.open(12)
    drill.at(24)
    pids = [drill.pid(rank) for rank in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    drill.open(24)
    drill.eventually(lambda: gone(pids[0]), SECONDS, "who cannot go on is ended")
    with drill.resumed() as resumed:
        done = drill.is_over(resumed)
    assert [swap["rung"] for swap in done.events("swap")] == [2]
    assert done.events("swap")[0]["lost_steps"] == 1  # version 24 is copied at the entry of step 25


@pytest.mark.slow
def test_a_swap_whose_supervisor_died_is_planned_anew(drill: Drill) -> None:
    drill.at(12)
    survivor = drill.pid(0)
    os.kill(survivor, signal.SIGSTOP)  # the swap waits for it
    os.kill(drill.pid(1), signal.SIGKILL)
    drill.eventually(lambda: drill.running.events("fault"), SECONDS)
    drill.kill_supervisor()
    os.kill(survivor, signal.SIGCONT)
    for gate in GATES:
        drill.open(gate)
    with drill.resumed() as resumed:
        (event,) = resumed.events("supervisor_resumed")
        assert not event["adopted"] and event["generation"]["term"] == 2
        done = drill.is_over(resumed)
    assert [swap["rung"] for swap in done.events("swap")] == [2]


@pytest.mark.slow
def test_a_drill_that_kills_the_supervisor_is_not_repeated_by_its_successor(
    tmp_path: Path, eventually: Eventually
) -> None:
    with started(tmp_path, "--drill", "kill-supervisor --at-step 12") as running:
        drill = Drill(tmp_path, running, eventually)
        assert running.wait(SECONDS).code == -signal.SIGKILL
        for gate in GATES:
            drill.open(gate)
        with drill.resumed() as resumed:
            done = drill.is_over(resumed)
    assert len(done.events("drill")) == 1 and done.events("swap") == []
