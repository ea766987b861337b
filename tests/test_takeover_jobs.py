"""Another supervisor for small jobs: who may take over, who may not, and what becomes of the old one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import jobs_under_test
import pytest
from jobs_under_test import Running
from quick_jobs import Ground, ground

__all__ = ["ground"]

Eventually = Callable[..., object]
PATIENT = """
import os, threading
print("here", flush=True)
while not os.path.exists("finish"):
    threading.Event().wait(0.01)
print("over", flush=True)
"""
OPTIONS = ("--nodes", 2, "--orphan-timeout", 30)


@pytest.fixture
def running(ground: Ground, eventually: Eventually) -> Iterator[Running]:
    with ground.started(*OPTIONS, ground.script(PATIENT)) as job:
        eventually(lambda: len(job.events("worker_started")) == 2, 30)
        yield job


def finish(ground: Ground) -> None:
    (ground.folder / "finish").touch()


def taken_over(running: Running, eventually: Eventually, times: int = 1) -> None:
    eventually(lambda: len(running.events("supervisor_resumed")) == times, 30, "somebody has taken over")


def test_of_two_that_take_over_one_wins_and_shows_the_job_to_its_end(
    ground: Ground, running: Running, eventually: Eventually
) -> None:
    running.signal(signal.SIGKILL)
    running.wait()
    with ground.started("resume") as one, ground.started("resume") as other:
        taken_over(running, eventually)
        winner, loser = (one, other) if other.process.poll() is not None else (other, one)
        eventually(lambda: loser.process.poll() is not None or winner.process.poll() is not None, 20)
        winner, loser = (one, other) if other.process.poll() is not None else (other, one)
        refused = loser.wait()
        assert refused.code == 2 and ("takes over" in refused.err or f"lives (pid {winner.pid}" in refused.err)
        finish(ground)
        done = winner.wait()
    assert done.code == 0 and done.out == "over\nover\n", done.err
    assert len(done.events("supervisor_resumed")) == 1 and done.events("job_finished")[0]["exit_code"] == 0
    assert done.status()["term"] == 2 and done.status()["state"] == "finished"
    ended = ground.run("resume")
    assert ended.code == 2 and "has finished" in ended.err and "nothing to take over" in ended.err
    eventually(lambda: not ground.left(), 10, "nothing is left")


def test_a_supervisor_that_lives_is_replaced_by_force_only_and_touches_nothing_more(
    ground: Ground, running: Running, eventually: Eventually
) -> None:
    refused = ground.run("resume")
    assert refused.code == 2 and f"lives (pid {running.pid}" in refused.err and "--force" in refused.err
    with ground.started("resume", "--force") as forced:
        old = running.wait()
        assert old.code == 93 and "another supervisor has taken over" in old.err and "(term 2)" in old.err
        taken_over(running, eventually)
        finish(ground)
        done = forced.wait()
    assert done.code == 0 and "training was not disturbed" in done.err
    assert [event["exit_code"] for event in done.events("job_finished")] == [0]
    assert not done.events("fault")


def test_a_frozen_supervisor_that_was_replaced_ends_when_it_wakes(
    ground: Ground, running: Running, eventually: Eventually
) -> None:
    running.signal(signal.SIGSTOP)
    with ground.started("resume", "--force", "--detach") as forced:
        assert forced.wait().code == 0
        taken_over(running, eventually)
        running.signal(signal.SIGCONT)
        assert running.wait().code == 93
        stopped = ground.run("stop")
        assert stopped.code == 0 and "exit code 143" in stopped.out, stopped.err
    eventually(lambda: not ground.left(), 10, "nothing is left")


def test_a_job_without_most_of_its_nodes_is_taken_over_by_force_only(
    ground: Ground, running: Running, eventually: Eventually
) -> None:
    running.signal(signal.SIGKILL)
    running.wait()
    os.kill(sorted(ground.agents(), key=lambda agent: agent.pid)[0].pid, signal.SIGKILL)
    eventually(lambda: len(ground.agents()) == 1, 10)
    refused = ground.run("resume")
    assert refused.code == 1 and "only 1 of 2 nodes" in refused.err and "--force" in refused.err, refused.err
    with ground.started("resume", "--force") as forced:
        taken_over(running, eventually)
        eventually(lambda: len(running.events("worker_started")) == 4, 30, "the lost node was launched again")
        finish(ground)
        done = forced.wait()
    assert done.code == 0, done.err
    assert [fault["kind"] for fault in done.events("fault")] == ["node"]
    assert not done.events("supervisor_resumed")[0]["adopted"]


def test_a_job_that_had_not_begun_cannot_be_taken_over(ground: Ground, eventually: Eventually) -> None:
    with ground.started("--nodes", 1, "--heartbeat-timeout", 1, ground.script(PATIENT)) as job:
        eventually(lambda: job.job is not None, 30)
        job.signal(signal.SIGKILL)
        job.wait()
    handover = Path(job.job or "") / "keys" / "handover.json"
    handover.unlink(missing_ok=True)  # on a quick machine it had
    refused = jobs_under_test.run(ground.home, "resume")
    assert refused.code == 1 and "had not begun" in refused.err and "start it again" in refused.err
    finish(ground)
    for agent in ground.guardians():
        agent.kill()
    eventually(lambda: not ground.left(), 20, "nothing is left")
