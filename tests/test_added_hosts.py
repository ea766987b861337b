"""`add-host` on a whole running job."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

from tests.quick_jobs import Ground
from tests.quick_jobs import ground as ground

Eventually = Callable[..., object]

PATIENT = """
import signal
signal.pause()
"""


def test_a_node_is_added_to_a_running_job_as_a_spare_one(ground: Ground, eventually: Eventually) -> None:
    with ground.started("--nodes", 1, ground.script(PATIENT)) as running:
        eventually(lambda: running.events("worker_started"), 20)
        refused = ground.run("add-host", "gpu7")
        assert refused.code == 1 and "add node1, or one that has left" in refused.err
        added = ground.run("add-host", "node1")
        assert added.code == 0, added.err
        assert added.out.splitlines()[0] == "node1 is added as a spare node"
        assert added.out.splitlines()[-1] == "node1 is ready, as a spare node"
        nodes = json.loads(ground.run("status", "--json").out)["nodes"]
        assert [(node["name"], node["role"], node["state"]) for node in nodes] == [
            ("node0", "training", "ready"), ("node1", "spare", "ready"),
        ]  # fmt: skip
        assert ground.run("drain", "node1").out.splitlines()[-1] == "node1 is drained"
        assert ground.run("add-host", "node1").out.splitlines()[-1] == "node1 is ready, as a spare node"
        running.signal(signal.SIGTERM)
        assert running.wait().code == 143
    late = ground.run("add-host", "node2")
    assert late.code == 1 and "does not run" in late.err
