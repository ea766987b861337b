"""A whole AgentBootstrap for tests that need one and care for little of it."""

from __future__ import annotations

from collections.abc import Mapping

from phoenix_launch.bootstrap import AgentBootstrap, AgentTimeouts, Command, OutputSettings, RunMode


def bootstrap(node: str = "node0", environment: Mapping[str, str] | None = None, index: int = 0) -> AgentBootstrap:
    return AgentBootstrap(
        job="job-0000",
        node=node,
        index=index,
        term=1,
        incarnation="f00d",
        control_endpoint="tcp://127.0.0.1:1",
        output_endpoint="tcp://127.0.0.1:2",
        server_key="server",
        public_key="public",
        secret_key="very secret",
        environment=dict(environment or {}),
        cwd="/",
        command=Command(RunMode.SCRIPT, "train.py", ("--name", "a b"), "python"),
        output=OutputSettings(folder="/nowhere"),
        timeouts=AgentTimeouts(0.5, 15.0, 10.0, 120.0, 2.0, 5.0),
    )
