"""The way of a node's output to the supervisor's console, also when that is another one, or for a while nobody.

Used by the output pump's thread; the agent's thread only leaves notes, each a single assignment.
"""

from __future__ import annotations

from phoenix_launch.bootstrap import AgentBootstrap
from phoenix_launch.bus.agent import OutputSender
from phoenix_launch.output_messages import FromOutput


class OutputWay:
    """Lines that a full queue does not take wait, as long as there is a supervisor; else only the files have them: workers that
    wait for a console do not train."""

    def __init__(self, bootstrap: AgentBootstrap) -> None:
        self.orphaned = False
        self._wanted = self._leads_to = bootstrap
        self._sender: OutputSender | None = None

    def connect(self) -> OutputWay:
        self._sender = OutputSender(self._leads_to)
        return self

    def lead_to(self, bootstrap: AgentBootstrap) -> None:
        """There is another supervisor."""
        self._wanted, self.orphaned = bootstrap, False

    def send(self, body: FromOutput, timeout: float) -> bool:
        """False when the queue stayed full for `timeout` seconds."""
        wanted = self._wanted
        if wanted is not self._leads_to or self._sender is None:
            if self._sender is not None:
                self._sender.close(0.0)
            self._leads_to, self._sender = wanted, OutputSender(wanted)
        return self._sender.send(body, timeout) or self.orphaned

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
