"""Takes in hosts that started the same command by themselves: gives each its bootstrap, an index and a name of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from phoenix_launch.bootstrap import AgentBootstrap
from phoenix_launch.bus.keys import KeyPair
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.messages import JoinReply, JoinRequest
from phoenix_launch.supervision.muster import Muster


@dataclass
class Reception:
    """One a job. A request that is repeated gets the same answer.

    A host that was started again asks for the node rank it had; its predecessor may not have been missed yet, so a
    rank that is taken is refused only after `patience` seconds. `is_gone`: nothing of this index takes part any more.
    """

    muster: Muster
    bootstrap: Callable[[NodeSpec, str, KeyPair], AgentBootstrap]
    enlisted: list[NodeSpec]  # the supervisor's own node, then whoever came
    patience: float = 0.0
    is_gone: Callable[[int], bool] = lambda _: False
    given: dict[str, JoinReply] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)

    def answer(self, request: JoinRequest, now: float) -> JoinReply | None:
        """None: not yet, it is to ask again."""
        if request.incarnation not in self.given:
            reply = self._enlist(request, now, self.asked.setdefault(request.incarnation, now))
            if reply is None:
                return None
            self.given[request.incarnation] = reply
        return self.given[request.incarnation]

    def _enlist(self, request: JoinRequest, now: float, asked: float) -> JoinReply | None:
        taken = {spec.index for spec in self.enlisted}
        if request.node_rank in taken:
            if self.is_gone(request.node_rank):
                return self._admit(self._again(request), request, now)
            if now - asked < self.patience:
                return None
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
            log_dir=request.log_dir,
        )
        self.enlisted.append(spec)
        return self._admit(spec, request, now)

    def _again(self, request: JoinRequest) -> NodeSpec:
        """The node that was known by this rank, on the host that comes in its place."""
        known = next(spec for spec in self.enlisted if spec.index == request.node_rank)
        self.enlisted.remove(known)
        self.enlisted.append(
            replace(
                known,
                name=self._free_name(request.hostname),
                slots=request.slots,
                python=request.python,
                log_dir=request.log_dir,
            )
        )
        return self.enlisted[-1]

    def _admit(self, spec: NodeSpec, request: JoinRequest, now: float) -> JoinReply:
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
