"""What a node has for workers that know the runtime: their lines to the agent, and the server that keeps their copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from phoenix_launch.bootstrap import AgentBootstrap
from phoenix_launch.copies import SlotPeer
from phoenix_launch.local_messages import SlotsKept, WorkerDrill
from phoenix_launch.messages import NodePlan, Published, RuntimeReport
from phoenix_launch.node.checkpoint_link import CheckpointLink
from phoenix_launch.node.emergency import EmergencySave
from phoenix_launch.node.plan_terms import SlotTerms, worker_plan
from phoenix_launch.node.poll_loop import PollLoop
from phoenix_launch.node.publisher import Publisher
from phoenix_launch.node.runtime_folder import LONGEST_NAME
from phoenix_launch.node.state import NodeState
from phoenix_launch.node.worker_links import WorkerLinks


class RuntimeSupport:
    """Nothing of it costs anything in a job whose workers do not know the runtime, but for a socket that listens."""

    def __init__(
        self,
        loop: PollLoop,
        bootstrap: AgentBootstrap,
        runtime: Path,
        state: NodeState,
        checkpoint: CheckpointLink,
        remark: Callable[[str], None],
    ) -> None:
        """Listens for workers in the folder `runtime`. Raises OSError."""
        self._node = bootstrap.index
        self._state = state
        self._checkpoint = checkpoint
        self._publisher = Publisher(loop, bootstrap.checkpoint_dir, bootstrap.job, bootstrap.keep, remark)
        self._emergency = EmergencySave(bootstrap.checkpoint_dir, checkpoint, remark)
        self._links = WorkerLinks(loop, f"{runtime}{LONGEST_NAME}", state.workers, remark)
        self._terms = SlotTerms(bootstrap.index)
        self._wanted = False

    def follow(self, plan: NodePlan) -> None:
        """The node has a new plan."""
        self._terms.follow(plan)
        self._publisher.follow(plan)
        self._wanted = self._wanted or plan.ground is not None

    def advance(self, environment: Callable[[], dict[str, str]]) -> None:
        """Tell the checkpoint server and the workers what is new to them. `environment`: of the node's processes."""
        self._links.forget_gone()
        self._wanted = self._wanted or self._links.used
        if not self._wanted:
            return
        self._checkpoint.want(environment)
        pids = tuple(sorted(m.pid for m in self._state.workers() if m.alive and m.pid > 0))
        rules = self._terms.rules(pids)
        if rules is not None:
            self._checkpoint.follow(rules)
        plan, path = self._state.plan, self._checkpoint.path
        if plan is not None and self._emergency.halting:
            plan = msgspec.structs.replace(plan, halt=True)
        published = None if self.published is None else self.published.stamp
        self._links.tell(lambda member: worker_plan(plan, member, self._node, path, published))

    def ended(self, key: int) -> None:
        """This worker's process has ended."""
        self._links.ended(key)

    def drill(self, key: int, drill: WorkerDrill) -> bool:
        """Whether this worker, which harms itself, could be told to."""
        return self._links.drill(key, drill)

    def kill_server(self) -> bool:
        """A drill. Whether there was a checkpoint server."""
        return self._checkpoint.kill()

    def cut_off(self, seconds: float) -> bool:
        """A drill: the checkpoint server and those of other nodes do not hear each other for so long."""
        self._checkpoint.cut_off(seconds)
        return True

    def said(self, key: int) -> RuntimeReport | None:
        """What this worker says of itself; None: it does not know the runtime."""
        return self._links.said(key)

    @property
    def kept(self) -> SlotsKept | None:
        """What this node keeps; None: it has no checkpoint server."""
        return self._checkpoint.kept

    @property
    def peer(self) -> SlotPeer | None:
        """Where this node's checkpoint server is; None: it has none, or none yet."""
        return self._checkpoint.peer

    @property
    def published(self) -> Published | None:
        """What became of the last checkpoint on disk that was to be made visible."""
        return self._publisher.done

    @property
    def can_save(self) -> bool:
        return self._emergency.possible

    def halted(self, now: float) -> bool:
        """Whether all workers here have come to a version that is complete, or cannot. Begins with it, as `saved`."""
        return self._emergency.halted((self.said(m.key) for m in self._state.workers() if m.alive), now)

    def saved(self, now: float) -> bool:
        """Whether all copies in memory are on disk, or cannot be. Begins with it; to be asked again until it is True."""
        return self._emergency.over(self._terms.world, now)

    def close(self) -> None:
        self._publisher.close()
        self._links.close()
        self._checkpoint.close()
