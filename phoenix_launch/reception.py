"""Takes in hosts that started the same command by themselves: gives each its bootstrap, an index and a name of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from phoenix_launch.bus import KeyPair
from phoenix_launch.hosts import NodeSpec
from phoenix_launch.messages import AgentBootstrap, JoinReply, JoinRequest
from phoenix_launch.muster import Muster


@dataclass
class Reception:
    """One a job. A request that is repeated gets the same answer."""

    muster: Muster
    bootstrap: Callable[[NodeSpec, str, KeyPair], AgentBootstrap]
    enlisted: list[NodeSpec]  # the supervisor's own node, then whoever came
    given: dict[str, JoinReply] = field(default_factory=dict)

    def answer(self, request: JoinRequest, now: float) -> JoinReply:
        if request.incarnation not in self.given:
            self.given[request.incarnation] = self._enlist(request, now)
        return self.given[request.incarnation]

    def _enlist(self, request: JoinRequest, now: float) -> JoinReply:
        taken = {spec.index for spec in self.enlisted}
        if request.node_rank in taken:
            return JoinReply(None, f"there is a node of rank {request.node_rank} already")
        index = request.node_rank
        if index < 0:
            index = next(i for i in range(len(taken) + 1) if i not in taken)
        spec = NodeSpec(
            index=index,
            name=self._free_name(request.hostname),
            slots=request.slots,
            python=request.python,
            group_rank=request.node_rank,
        )
        self.enlisted.append(spec)
        recruit = self.muster.enlist(spec, now)
        bootstrap = self.bootstrap(spec, recruit.incarnation, recruit.keys)
        return JoinReply(msgspec.structs.replace(bootstrap, environment=request.environment, cwd=request.cwd))

    def _free_name(self, hostname: str) -> str:
        """Several on one machine (or machines of one name): host, host-2, host-3."""
        names = {spec.name for spec in self.enlisted}
        name, number = hostname, 2
        while name in names:
            name, number = f"{hostname}-{number}", number + 1
        return name
