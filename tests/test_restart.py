"""Whole jobs on this machine: what is lost is replaced, and the exit code tells the truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs_under_test import run, script, started

# Meets its peers in the generation's store, then trains until all have come; torch's start is not waited for twice.
RENDEZVOUS = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("rank", os.environ["RANK"], "attempt", attempt, "node", os.environ["PHOENIX_NODE"], flush=True)
dist.barrier()
if attempt == "0":
    dist.recv(__import__("torch").zeros(1), src=(dist.get_rank() + 1) % dist.get_world_size())  # for ever
dist.barrier()
dist.destroy_process_group()
"""


def test_a_lost_node_is_replaced_by_the_spare_and_the_job_ends_well(tmp_path: Path) -> None:
    done = run(
        tmp_path / "home", "--nodes", 2, "--nproc-per-node", 2, "--spares", 1,
        "--drill", "kill-node --node 1 --after 2", script(tmp_path, RENDEZVOUS),
    )  # fmt: skip
    assert done.code == 0, done.err
    (fault,) = done.events("fault")
    (swap,) = done.events("swap")
    assert (fault["kind"], fault["node"], fault["ranks"]) == ("node", "node1", [2, 3])
    assert [(m["rank"], m["from_node"], m["to_node"]) for m in swap["moves"]] == [
        (2, "node1", "node2"),
        (3, "node1", "node2"),
    ]
    assert "rank 2 attempt 1 node node2" in done.out
    assert done.status()["state"] == "finished"


def test_a_killed_agent_takes_its_workers_along_and_comes_back_as_the_spare_it_needs(tmp_path: Path) -> None:
    done = run(
        tmp_path / "home", "--nodes", 2, "--drill", "kill-agent --node 1 --after 1", script(tmp_path, RENDEZVOUS)
    )
    assert done.code == 0, done.err
    assert "rank 1 attempt 1 node node1" in done.out


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_workers_death_counts_against_max_restarts(tmp_path: Path, restarts: int) -> None:
    done = run(
        tmp_path / "home", "--nproc-per-node", 2, "--max-restarts", restarts,
        "--drill", "kill-worker --rank 1 --after 1", script(tmp_path, RENDEZVOUS),
    )  # fmt: skip
    assert done.code == (0 if restarts else 1), done.err
    assert ("rank 0 attempt 1" in done.out) == bool(restarts)
    if not restarts:
        assert "rank 1 on node0 was killed by SIGKILL" in done.err


def test_without_a_spare_the_job_ends_with_93_and_names_the_node(tmp_path: Path) -> None:
    done = run(
        tmp_path / "home", "--nodes", 2, "--spare-timeout", 1,
        "--drill", "kill-node --node 1 --after 1", script(tmp_path, RENDEZVOUS),
    )  # fmt: skip
    assert done.code == 93
    assert "node1 lost and no spare node came within 1 s" in done.err
    assert "hint:" in done.err


def test_a_fault_is_injected_from_another_terminal(tmp_path: Path, eventually: object) -> None:
    wait = eventually  # typed loosely: a fixture that is a function
    assert callable(wait)
    arguments = ["--nodes", 2, "--spares", 1, "--allow-drills", script(tmp_path, RENDEZVOUS)]
    with started(tmp_path / "home", arguments) as running:
        wait(lambda: len(running.events("worker_started")) == 2, 40)
        dry = run(tmp_path / "home", "inject-fault", "kill-node", "--node", "node1", "--dry-run")
        assert (dry.code, "would kill-node node1" in dry.out) == (0, True)
        real = run(tmp_path / "home", "inject-fault", "kill-node", "--node", "node1")
        assert real.code == 0, real.err
        done = running.wait()
    assert done.code == 0, done.err
    assert [e["target"] for e in done.events("drill")] == ["node1 (rank 1)"]
