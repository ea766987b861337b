"""The host of the supervisor loses its power, or is cut off: another host takes over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jobs_on_hosts import Head
from testhosts import Cluster

pytestmark = [pytest.mark.hosts, pytest.mark.slow]


def test_a_supervisor_whose_host_lost_its_power_is_replaced_from_another_one(
    head: Head, hosts: Cluster, eventually: Callable[..., object]
) -> None:
    arguments = ["--nodes", "host1,host2", "--spares", "host3", "--max-restarts", 1, head.script()]
    with head.started(*arguments) as running:
        head.await_workers(running, 2)
        workers = set(head.matching("host1", "train.py") + head.matching("host2", "train.py"))
        assert len(workers) == 2
        hosts.kill("head")
        running.process.wait(20)
        with head.started("resume", host="host4") as resumed:
            eventually(lambda: resumed.events("supervisor_resumed"), 30, "host4 supervises")
            (event,) = resumed.events("supervisor_resumed")
            assert event["adopted"] and event["nodes"] == ["host1", "host2", "host3"]
            assert workers == set(head.matching("host1", "train.py") + head.matching("host2", "train.py"))
            hosts.kill("host2")
            eventually(
                lambda: len([e for e in resumed.events("worker_started") if e["generation"]["term"] == 2]) == 2, 40
            )
            head.go()
            done = resumed.wait()
    assert done.code == 0, done.err
    assert [(fault["kind"], fault["node"]) for fault in done.events("fault")] == [("node", "host2")]
    assert "rank 1 attempt 1 on host3" in done.out
