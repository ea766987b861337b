"""Hosts that are added to a running job (`add-host`): launched like all others, and taken in as spare nodes when they are fit.

Asked again and again by the command, which so hears what became of its host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from phoenix_launch.command_messages import HostReply, HostStage
from phoenix_launch.errors import UsageError
from phoenix_launch.hosts import specs
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.job.state import State
from phoenix_launch.supervision.muster import Muster


@dataclass
class Additions:
    """`on_hosts`: whether the job's nodes are reached by ssh; `named`: a node came that the command did not name."""

    muster: Muster
    on_hosts: bool
    named: Callable[[NodeSpec], None]
    _asked: set[int] = field(default_factory=set)  # nodes that this is about

    def ask(self, word: str, state: State) -> tuple[HostReply, int | None]:
        """Where it stands; and the index of a node that is wanted anew. Raises UsageError: this cannot be a host of the job."""
        spec = self._spec(word, state)
        index, member = spec.index, state.members.get(spec.index)
        if member is not None and member.alive:
            if not member.usable:
                return HostReply(HostStage.COMING, f"{spec.name} gets ready"), None
            seated = any(seat.node == index for seat in state.lineup)
            return HostReply(
                HostStage.READY, f"{spec.name} is {'a training' if seated else 'ready, as a spare'} node"
            ), None
        if index in self._asked and (why := self.muster.failures.pop(index, "")):
            self._asked.discard(index)
            self.muster.forget(index)
            return HostReply(HostStage.REFUSED, f"{spec.name} cannot take part: {why}"), None
        if index in self._asked and self.muster.wants(index):
            return HostReply(HostStage.COMING, f"{spec.name} is on its way"), None
        self._asked.add(index)
        self.muster.forget(index)
        self.muster.waiting.append(spec)
        self.named(spec)
        return HostReply(HostStage.COMING, f"{spec.name} is added as a spare node"), index

    def _spec(self, word: str, state: State) -> NodeSpec:
        known = {spec.name: spec for spec in self.muster.specs.values()}
        known |= {spec.name: spec for spec in self.muster.waiting}
        new = 1 + max([*state.members, *(spec.index for spec in known.values())], default=-1)
        if self.on_hosts:
            found = specs.resolve(nodes=word)
            if len(found) != 1 or not found[0].host:
                raise UsageError(f"{word} is not one host", hint="add one host at a time, by its name")
            spec = found[0]
        else:
            spec = NodeSpec(index=new, name=word)
            if word not in known and word != f"node{new}":
                raise UsageError(
                    f"the nodes of this job are simulated on this machine: {word} is none of them",
                    hint=f"add node{new}, or one that has left",
                )
        before = known.get(spec.name)
        return replace(spec if before is None else before, index=new if before is None else before.index, spare=True)
