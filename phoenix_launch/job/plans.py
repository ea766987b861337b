"""A wish of the state machine as the message that its node gets. Pure."""

from __future__ import annotations

from phoenix_launch.job.environment import JobIdentity, worker_environment
from phoenix_launch.job.state import State
from phoenix_launch.job.wishes import Wish
from phoenix_launch.messages import NodePlan, PlanPhase, RankOrder, Resumption
from phoenix_launch.wire import NO_GENERATION


def node_plan(state: State, wish: Wish, identity: JobIdentity) -> NodePlan:
    """The plan for one node; its workers' environments only when they are to run."""
    orders: tuple[RankOrder, ...] = ()
    if wish.phase in (PlanPhase.RUN, PlanPhase.SWAP) and state.store is not None:
        world_size = len(state.places)
        orders = tuple(
            RankOrder(
                place.rank,
                place.local_rank,
                worker_environment(
                    identity,
                    place,
                    generation=wish.generation,
                    attempt=state.attempt,
                    store=state.store,
                    world_size=world_size,
                    nodes=len(state.lineup),
                ),
                born=wish.born.get(place.rank, NO_GENERATION),
                sources=() if wish.recovery is None else wish.recovery.sources[place.rank],
                startup=wish.startups.get(place.rank),
            )
            for place in wish.places
        )
    return NodePlan(
        wish.generation,
        wish.phase,
        orders,
        host_store=wish.host_store,
        store_port=wish.store_port,
        signal=wish.signal,
        grace=wish.grace,
        attempt=state.attempt,
        resumption=_resumption(wish),
        ground=wish.ground,
        leave=wish.leave,
        halt=wish.halt,
        condemned=wish.condemned,
        publish=wish.publish,
        save=wish.save,
    )


def _resumption(wish: Wish) -> Resumption | None:
    """None as long as no generation has to do with older ones."""
    if wish.phase is not PlanPhase.SWAP and not wish.lineage.resumes:
        return None
    stamp = None if wish.recovery is None else wish.recovery.stamp
    return Resumption(stamp, wish.lineage.resumes, dict(wish.addresses))
