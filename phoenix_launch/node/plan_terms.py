"""What a node's plan means for one of its workers and for its checkpoint server: who goes on, who is told what. Pure."""

from __future__ import annotations

from phoenix_launch.copies import SlotPeer, Stamp
from phoenix_launch.local_messages import SlotRules, WorkerPlan
from phoenix_launch.messages import NodePlan, PlanPhase, RankOrder
from phoenix_launch.node.actions import Member
from phoenix_launch.wire import NO_GENERATION, Generation

_ORDER = {
    PlanPhase.QUIESCE: 0, PlanPhase.SWAP: 0, PlanPhase.PARK: 1, PlanPhase.RUN: 1, PlanPhase.STOP: 2, PlanPhase.LEAVE: 3
}  # fmt: skip
_HAS_WORKERS = (PlanPhase.RUN, PlanPhase.SWAP)
_MOVES_SLOTS = (PlanPhase.QUIESCE, PlanPhase.SWAP, PlanPhase.RUN)


def place_in_time(plan: NodePlan) -> tuple[Generation, int, int]:
    """Plans that are below the newest one known are out of date. A swap says more and more: stamp, then addresses."""
    stage = 0
    if plan.phase is PlanPhase.SWAP and plan.resumption is not None and plan.resumption.stamp is not None:
        stage = 2 if plan.resumption.addresses else 1
    return plan.generation, _ORDER[plan.phase], stage


def order_for(plan: NodePlan, member: Member) -> RankOrder | None:
    """The order that names this very process; None: it has no part in this plan."""
    if plan.phase not in _HAS_WORKERS or member.order is None:
        return None
    for order in plan.ranks:
        if order.rank == member.order.rank and member.generation == (born_in(plan, order)):
            return order
    return None


def born_in(plan: NodePlan, order: RankOrder) -> Generation:
    """The generation that started the process which an order is about."""
    return plan.generation if order.born == NO_GENERATION else order.born


def to_start(plan: NodePlan) -> list[RankOrder]:
    """The orders that no process of an older generation fills."""
    return [order for order in plan.ranks if order.born == NO_GENERATION] if plan.phase in _HAS_WORKERS else []


def goes_on(plan: NodePlan, member: Member) -> bool:
    """Whether this worker may live: it is of the plan's own generation, or an order names it."""
    return member.generation >= plan.generation or order_for(plan, member) is not None


def ends_at_once(plan: NodePlan) -> bool:
    """Whether who has no part in it ends without a grace: beside survivors it must not write on."""
    return plan.phase is PlanPhase.SWAP or any(order.born != NO_GENERATION for order in plan.ranks)


def keeps_store(plan: NodePlan) -> bool:
    """Whether an older generation's store goes on: survivors are connected to it."""
    return plan.phase in _HAS_WORKERS and plan.resumption is not None


def worker_plan(
    plan: NodePlan | None, member: Member, node: int, slots: str, published: Stamp | None = None
) -> WorkerPlan | None:
    """What this worker is to be told now; None: nothing new. `slots`: the path of the checkpoint server's socket."""
    if plan is None or (order := order_for(plan, member)) is None:
        return None
    return WorkerPlan(
        plan.generation,
        plan.phase,
        node,
        member.alone,
        slots,
        plan.ground,
        plan.resumption,
        order.sources,
        order.startup,
        plan.leave,
        published if order.rank == 0 else None,
        plan.halt,
    )


class SlotTerms:
    """Where the job stands, for the checkpoint server: gathered from plan after plan, since not each one says it all."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._generation = NO_GENERATION
        self._resume = 0
        self._lineage: tuple[Stamp, ...] = ()
        self._peers: tuple[SlotPeer, ...] = ()
        self.world = 0  # ranks of the job, 0: not known

    def follow(self, plan: NodePlan) -> None:
        if plan.phase in _MOVES_SLOTS:
            self._generation = plan.generation
        if plan.ground is not None:
            self.world = len(plan.ground.places) or self.world
            self._peers = tuple(peer for peer in plan.ground.servers if peer.node != self._node)
        if plan.resumption is not None:
            self._lineage = plan.resumption.lineage
            if plan.resumption.stamp is not None:
                self._resume = plan.resumption.stamp.version

    def rules(self, workers: tuple[int, ...]) -> SlotRules | None:
        """None as long as no generation has begun here. `workers`: the pids that may ask."""
        if self._generation == NO_GENERATION:
            return None
        return SlotRules(self._generation, self._resume, self._lineage, workers, self._peers)
