"""What is shown and kept of a whole job that has ended, was stopped, or whose supervisor was killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

from tests.quick_jobs import Ground, kill
from tests.quick_jobs import ground as ground

Eventually = Callable[..., object]

PATIENT = """
import signal
print("works", flush=True)
signal.pause()
"""


def test_the_nodes_of_an_ended_job_have_left_and_its_keys_are_gone(ground: Ground) -> None:
    durable = ("--checkpoint-dir", ground.home / "ck", "--checkpoint-interval", 5)
    done = ground.run("--nodes", 2, *durable, "--no-python", "true")
    assert done.code == 0
    assert "--checkpoint-dir and --resume did nothing" in done.err
    assert [node["state"] for node in done.status()["nodes"]] == ["left", "left"]
    assert sorted(path.name for path in done.job.iterdir()) == ["events.jsonl", "job.json", "logs", "status.json"]
    shown = ground.run("status")
    assert shown.code == 0 and "ready" not in shown.out and "finished" in shown.out


def test_a_stopped_job_is_shown_as_stopped(ground: Ground, eventually: Eventually) -> None:
    with ground.started(ground.script(PATIENT)) as running:
        eventually(lambda: running.events("worker_started"), 20)
        running.signal(signal.SIGTERM)
        done = running.wait()
    assert done.code == 143
    assert (done.status()["state"], done.status()["stopped_by"]) == ("failed", "SIGTERM")
    assert ", stopped by SIGTERM, generation 1, exit code 143" in ground.run("status").out
    assert ground.run("jobs").out.splitlines()[1].split()[1:4] == ["stopped", "143", "1"]


def test_what_was_last_seen_of_a_job_has_its_workers_pids(ground: Ground, eventually: Eventually) -> None:
    options = ("--nodes", 2, "--heartbeat-timeout", 1, "--orphan-timeout", 2)
    with ground.started(*options, ground.script(PATIENT)) as running:
        eventually(lambda: len(running.events("worker_started")) == 2, 20)
        job = running.job
        assert job is not None

        def pids() -> set[int]:
            return {rank["pid"] for rank in json.loads((job / "status.json").read_text())["ranks"]}

        started = {event["pid"] for event in running.events("worker_started")}
        eventually(lambda: pids() == started, 10, "the workers are in status.json")
        kill(running.pid)
        assert running.wait().code == -signal.SIGKILL
        shown = ground.run("status")
        assert shown.code == 0 and ", orphaned, " in shown.out
        assert f"supervisor is gone (pid {running.pid} died)" in shown.out and "\nlast seen " in shown.out
        assert (job / "keys").exists(), "nobody has ended it in order"
    eventually(lambda: not ground.left(), 10, f"everything is gone: {ground.left()}")


def test_a_supervisor_that_a_drill_kills_has_answered_before(ground: Ground, eventually: Eventually) -> None:
    options = ("--allow-drills", "--heartbeat-timeout", 1, "--orphan-timeout", 2)
    with ground.started(*options, ground.script(PATIENT)) as running:
        eventually(lambda: running.events("worker_started"), 20)
        asked = ground.run("inject-fault", "kill-supervisor")
        assert (asked.code, asked.out) == (0, "kill-supervisor of this job\n"), asked.err
        assert running.wait().code == -signal.SIGKILL
    eventually(lambda: not ground.left(), 10, f"everything is gone: {ground.left()}")
