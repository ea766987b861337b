"""What each node has to make true, as it follows from the state of the job; and whether it has. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from phoenix_launch.job.placement import RankPlace
from phoenix_launch.job.state import SIGTERM, Phase, State
from phoenix_launch.messages import Generation, PlanPhase


@dataclass(frozen=True, slots=True)
class Wish:
    """What one node has to make true; the supervisor turns it into a NodePlan."""

    generation: Generation
    phase: PlanPhase
    places: tuple[RankPlace, ...] = ()
    host_store: bool = False
    store_port: int = 0
    signal: int = SIGTERM
    grace: float = 0.0


def wish_for(state: State, index: int) -> Wish:
    """What node `index` has to make true now."""
    member = state.members[index]
    generation = state.generation
    grace = state.rules.shutdown_timeout
    if not member.alive or state.phase in (Phase.LEAVING, Phase.FINISHED):
        return Wish(generation, PlanPhase.LEAVE)
    if state.phase is Phase.STOPPING:
        return Wish(generation, PlanPhase.STOP, signal=state.signal, grace=state.grace)
    if state.phase in (Phase.QUIESCING, Phase.WAITING):
        hosts_store = state.phase is Phase.QUIESCING and index == state.store_node
        port = state.rules.master_port if generation.n == state.first else 0
        return Wish(generation, PlanPhase.QUIESCE, host_store=hosts_store, store_port=port, grace=grace)
    if state.phase is Phase.RUNNING:
        places = tuple(place for place in state.places if place.node == index)
        if places or index == state.store_node:
            return Wish(generation, PlanPhase.RUN, places, host_store=index == state.store_node, grace=grace)
    return Wish(generation, PlanPhase.PARK)


def fulfilled(state: State, index: int) -> bool:
    """Whether the node's last report shows that its wish came true (else it is told again)."""
    wish, member = wish_for(state, index), state.members[index]
    if wish.phase is PlanPhase.QUIESCE:
        return member.quiesced >= wish.generation and (not wish.host_store or state.store is not None)
    if wish.phase is PlanPhase.RUN:
        return member.applied >= wish.generation
    if wish.phase is PlanPhase.STOP:
        return member.live == 0
    return wish.phase is PlanPhase.PARK or member.left
