"""What a user says about copies in memory holds for a whole job: how often, how many, how much memory."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs_under_test
import psutil  # type: ignore[import-untyped]
import pytest
from swap_jobs import SCRIPT, SECONDS, Swapped, calm, job

from phoenix_launch.errors import EXIT_DO_NOT_REQUEUE

pytestmark = pytest.mark.timeout(600)

STEPS = 16
INTERVAL = 3
FROM_SCRIPT = 3


@pytest.mark.slow
def test_with_an_interval_a_swap_goes_back_to_the_last_version_that_was_copied(tmp_path: Path) -> None:
    faults = ["collective 2,1,7", "collective 1,2,13"]
    found = job("ddp", STEPS, tmp_path, "--snapshot-interval", INTERVAL, faults=faults)
    assert found.digests == calm("ddp", STEPS)
    assert [(swap["resumed_step"] - 1) % INTERVAL for swap in found.swaps] == [0, 0]
    assert all(0 <= swap["lost_steps"] <= INTERVAL for swap in found.swaps)


def test_a_state_that_does_not_fit_into_memory_ends_the_job_with_the_arithmetic(tmp_path: Path) -> None:
    args = ("--nodes", 2, "--nproc-per-node", 2, "--copy-memory", "300K", SCRIPT, "fsdp", STEPS)
    done = jobs_under_test.run(tmp_path, *args, seconds=120)
    assert done.code == EXIT_DO_NOT_REQUEUE, done.err
    last = done.err.splitlines()[-2:]
    assert "exit code 93: the copies of the training state do not fit on node" in last[0]
    assert "copies in memory need" in last[0] and "--copy-memory allows 300 KiB" in last[0]
    assert last[1].startswith("  hint: --copy-memory of at least ")
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_without_replicas_a_process_is_replaced_and_a_node_starts_the_script_again(tmp_path: Path) -> None:
    found = job("fsdp", STEPS, tmp_path, "--replicas", 0, faults=["collective 2,1,7"])
    assert found.digests == calm("fsdp", STEPS)
    assert found.rungs == [1]
    words = {event["state"] for event in found.done.events("redundancy")}
    assert "degraded" in words and "full" not in words


@pytest.mark.slow
def test_without_copies_a_failure_starts_the_script_again(tmp_path: Path) -> None:
    found = job("ddp", STEPS, tmp_path, "--snapshot-interval", 0, faults=["collective 2,1,7"])
    assert found.digests == calm("ddp", STEPS)
    assert found.rungs == [FROM_SCRIPT]
    assert "copies in memory are off (--snapshot-interval 0)" in found.done.err


def test_status_tells_what_the_copies_of_each_rank_come_to(tmp_path: Path, eventually: Callable[..., object]) -> None:
    args = ("--nodes", 2, "--nproc-per-node", 2, SCRIPT, "fsdp", 10**6)
    with jobs_under_test.started(tmp_path, args) as running:
        asked: list[dict[str, Any]] = []

        def is_full() -> bool:
            asked.append(json.loads(jobs_under_test.run(tmp_path, "status", "--json").out))
            return bool(asked[-1]["redundancy"] == "full")

        eventually(lambda: running.job, 20)
        eventually(is_full, 60)
        table = jobs_under_test.run(tmp_path, "status").out
        running.signal(signal.SIGTERM)
        running.wait()
    copies = [rank["copies"] for rank in asked[-1]["ranks"]]
    assert all(
        its["holders"] == 2 and its["copied_bytes"] >= its["sent_bytes"] > 0 < its["state_bytes"] for its in copies
    )
    assert "redundancy full" in table and "HOLDERS" in table and table.count("2 nodes") == 4


@pytest.mark.slow
def test_a_checkpoint_server_that_is_killed_is_started_again_and_its_node_can_still_be_repaired(
    tmp_path: Path, eventually: Callable[..., object]
) -> None:
    """On both nodes, one after the other; later a rank dies."""
    steps = 120
    (tmp_path / "faults").mkdir()
    env = {"PHOENIX_FAULTS": f"{tmp_path}/faults:before-optimizer,1,90"}
    args = ("--nodes", 2, "--nproc-per-node", 2, "--spares", 1, SCRIPT, "fsdp", steps)
    with jobs_under_test.started(tmp_path / "home", args, env=env) as running:

        def servers() -> list[psutil.Process]:
            found = []
            for each in psutil.Process(running.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "phoenix_launch.checkpoint.server" in " ".join(each.cmdline()):
                        found.append(each)
            return found

        eventually(lambda: len(servers()) >= 2, 60)
        eventually(lambda: any(event["state"] == "full" for event in running.events("redundancy")), 60)
        for victim in servers()[:2]:
            gone = victim.pid
            victim.kill()
            eventually(lambda gone=gone: gone not in [each.pid for each in servers()] and len(servers()) >= 2, 30)  # type: ignore[misc]
        done = running.wait(SECONDS)
    assert done.code == 0, done.err
    assert Swapped(done).digests == calm("fsdp", steps)
