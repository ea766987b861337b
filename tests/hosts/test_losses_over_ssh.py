"""Whatever dies on a host, however it dies: nothing of it is left there, and the job goes on where it can."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from jobs_on_hosts import Head
from testhosts import Cluster

from phoenix_launch.timeouts import timeout
from tests.jobs_under_test import Running

pytestmark = pytest.mark.hosts

NOTICED = timeout("heartbeat") + 1.0  # seconds in which the silence of a host is seen


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def faults(running: Running) -> list[tuple[str, str]]:
    return [(event["kind"], event["node"]) for event in running.events("fault")]


def test_a_killed_worker_and_its_children_are_gone_and_all_run_again(head: Head) -> None:
    with head.started("--nodes", "host1,host2", "--max-restarts", 1, head.script()) as running:
        head.await_workers(running, 2)
        tree = set(head.matching("host2", "train.py") + head.matching("host2", "sleep 4242"))
        assert len(tree) == 2
        (worker,) = head.matching("host2", "train.py")
        kill(worker)
        head.await_end(tree)
        head.await_workers(running, 2, generation=2)
        head.go()
        done = running.wait()
    assert done.code == 0, done.err
    assert faults(running) == [("worker", "host2")]
    assert "rank 1 attempt 1 on host2" in done.out
    assert "rank 1 on host2 was killed by SIGKILL" in done.err


@pytest.mark.parametrize("victim", ["agent", "guardian"])
def test_a_killed_agent_or_guardian_takes_its_whole_tree_along_and_the_spare_host_its_ranks(
    head: Head, victim: str
) -> None:
    arguments = ["--nodes", "host1,host2", "--spares", "host3", "--nproc-per-node", 2, head.script()]
    with head.started(*arguments) as running:
        head.await_workers(running, 4)
        guardian, agent = head.guardian("host2"), head.agent("host2")
        tree = {guardian, agent, *head.matching("host2", "train.py"), *head.matching("host2", "sleep 4242")}
        assert len(tree) == 6
        began = time.time()
        kill(agent if victim == "agent" else guardian)
        head.await_end(tree)
        head.await_workers(running, 4, generation=2)
        head.go()
        done = running.wait()
    assert done.code == 0, done.err
    assert faults(running) == [("node", "host2")]
    assert "rank 2 attempt 1 on host3" in done.out
    assert running.events("fault")[0]["t"] - began < timeout("probe") + 1.0  # not by its silence


@pytest.mark.parametrize("victim", ["sshd's session", "ssh client"])
def test_a_lost_channel_changes_nothing_and_is_opened_again_so_that_the_guardians_death_is_seen_at_once(
    head: Head, eventually: Callable[..., object], victim: str
) -> None:
    with head.started("--nodes", "host1,host2", "--spares", "host3", head.script()) as running:
        head.await_workers(running, 2)
        if victim == "ssh client":
            (pid,) = [pid for pid in head.matching("head", "ssh -T") if " host2 " in head.hosts.command_line(pid)]
        else:
            (pid,) = head.matching("host2", "root@notty")
        kill(pid)
        eventually(lambda: head.matching("host2", "tail --pid"), 10, "a channel that watches the guardian")
        assert faults(running) == []
        tree = head.tree("host2") - set(head.matching("host2", "root@notty"))
        began = time.time()
        kill(head.guardian("host2"))
        head.await_end(tree)
        head.await_workers(running, 2, generation=2)
        head.go()
        done = running.wait()
    assert done.code == 0, done.err
    assert faults(running) == [("node", "host2")]
    assert "rank 1 attempt 1 on host3" in done.out
    assert running.events("fault")[0]["t"] - began < 2.0


def test_when_the_supervisor_dies_every_host_ends_after_the_orphan_timeout(head: Head) -> None:
    arguments = ["--heartbeat-timeout", 1, "--orphan-timeout", 2, "--nodes", "host1,host2", head.script()]
    with head.started(*arguments, "--spares", "host3") as running:
        head.await_workers(running, 2)
        trees = head.tree("host1") | head.tree("host2") | head.tree("host3")
        (supervisor,) = [
            pid for pid in head.matching("head", "phoenix_launch") if "train.py" in head.hosts.command_line(pid)
        ]
        kill(supervisor)
        assert 1.0 < head.await_end(trees | head.tree("head"), 10) < 6.0
        assert running.wait().code == 128 + 9
    assert timeout("orphan") == 600


def test_a_host_that_lost_power_is_noticed_in_time_replaced_and_comes_back_as_a_spare(
    head: Head, hosts: Cluster, eventually: Callable[..., object]
) -> None:
    with head.started("--nodes", "host1,host2", "--spares", "host3", head.script()) as running:
        head.await_workers(running, 2)
        began = time.time()
        hosts.kill("host2")
        (fault,) = eventually(lambda: running.events("fault"), NOTICED + 2)  # type: ignore[misc]
        assert fault["t"] - began < NOTICED
        head.await_workers(running, 2, generation=2)
        hosts.boot("host2")
        eventually(lambda: head.node("host2") == ("spare", "ready"), 30, "host2 is a spare")
        hosts.kill("host3")
        head.await_workers(running, 2, generation=3)
        head.go()
        done = running.wait()
    assert done.code == 0, done.err
    assert "rank 1 attempt 1 on host3" in done.out
    assert "rank 1 attempt 2 on host2" in done.out


def test_a_frozen_host_is_lost_and_when_it_thaws_its_processes_end_and_it_returns_as_a_spare(
    head: Head, hosts: Cluster, eventually: Callable[..., object]
) -> None:
    with head.started("--nodes", "host1,host2", "--spares", "host3", head.script()) as running:
        head.await_workers(running, 2)
        tree = set(head.matching("host2", "train.py") + head.matching("host2", "sleep 4242"))
        tree |= {head.guardian("host2"), head.agent("host2")}
        began = time.time()
        hosts.freeze("host2")
        head.await_workers(running, 2, generation=2)
        assert running.events("fault")[0]["t"] - began < NOTICED
        assert faults(running) == [("node", "host2")]
        hosts.thaw("host2")
        head.await_end(tree)
        eventually(lambda: head.node("host2") == ("spare", "ready"), 30, "host2 is a spare")
        head.go()
        done = running.wait()
    assert done.code == 0, done.err
    assert "rank 1 attempt 1 on host3" in done.out
