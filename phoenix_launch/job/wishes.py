"""What each node has to make true, as it follows from the state of the job; and whether it has. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from phoenix_launch.copies import Stamp, StartupCopy
from phoenix_launch.errors import EXIT_DO_NOT_REQUEUE, EXIT_OK, EXIT_SIGNAL_BASE
from phoenix_launch.job import holding
from phoenix_launch.job.commit import Lineage
from phoenix_launch.job.placement import RankPlace
from phoenix_launch.job.recovery import Recovery
from phoenix_launch.job.state import SIGTERM, Phase, State
from phoenix_launch.messages import Ground, PlanPhase
from phoenix_launch.wire import Generation


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
    born: Mapping[int, Generation] = field(
        default_factory=dict
    )  # ranks here that a process of an older generation holds
    recovery: Recovery | None = None
    startups: Mapping[int, StartupCopy] = field(default_factory=dict)  # of new processes, until there is a recovery
    addresses: Mapping[int, str] = field(default_factory=dict)  # of all ranks, as soon as all are known
    lineage: Lineage = field(default_factory=Lineage)
    ground: Ground | None = None
    leave: bool = False  # all scripts are over
    halt: bool = False  # the job is about to stop: all ranks are to come to a version that is complete
    condemned: tuple[tuple[int, Generation], ...] = ()  # ranks here that hang, with the generation that started them
    publish: Stamp | None = None  # a checkpoint on disk
    save: bool = False  # what is in memory goes to disk first

    @property
    def stage(self) -> int:
        """Wishes of one generation for a swap grow: leave the step, restore, connect. What is below is out of date."""
        return (self.recovery is not None) + (self.recovery is not None and bool(self.addresses))


def wish_for(state: State, index: int) -> Wish:
    """What node `index` has to make true now."""
    member = state.members[index]
    generation = state.generation
    grace = state.rules.shutdown_timeout
    if not member.alive or state.phase in (Phase.LEAVING, Phase.FINISHED):
        return Wish(generation, PlanPhase.LEAVE, save=member.alive and _must_stop(state))
    if state.phase is Phase.STOPPING:
        return Wish(generation, PlanPhase.STOP, signal=state.signal, grace=state.grace)
    if state.swap is not None:
        return _swap_wish(state, index)
    if state.phase in (Phase.QUIESCING, Phase.WAITING):
        hosts_store = state.phase is Phase.QUIESCING and index == state.store_node
        port = state.rules.master_port if generation.n == state.first else 0
        return Wish(
            generation, PlanPhase.QUIESCE, host_store=hosts_store, store_port=port, grace=grace, lineage=state.lineage,
            ground=ground(state),
        )  # fmt: skip
    if state.phase is Phase.RUNNING:
        places = tuple(place for place in state.places if place.node == index)
        if places or index == state.store_node:
            return Wish(
                generation, PlanPhase.RUN, places, host_store=index == state.store_node, grace=grace,
                born=_born(state, places), recovery=state.recovery, lineage=state.lineage,
                ground=ground(state), leave=state.leave, halt=state.halt is not None, publish=to_publish(state, index),
                condemned=_condemned(state, index),
            )  # fmt: skip
    return Wish(generation, PlanPhase.PARK, lineage=state.lineage, ground=ground(state))


def _swap_wish(state: State, index: int) -> Wish:
    """What no longer belongs here ends; what is missing is started, unless the job waits for a node; the others stay."""
    assert state.swap is not None
    places = tuple(place for place in state.places if place.node == index and place.rank in state.holders)
    return Wish(
        state.generation, PlanPhase.SWAP, places, host_store=index == state.store_node, grace=state.rules.shutdown_timeout,
        born=_born(state, places), recovery=state.swap.recovery, addresses=holding.addresses(state),
        startups=holding.startups(state, (place.rank for place in places)) if state.swap.recovery is None else {},
        lineage=state.lineage, ground=ground(state),
    )  # fmt: skip


def _born(state: State, places: tuple[RankPlace, ...]) -> dict[int, Generation]:
    born = {place.rank: state.holders[place.rank].born for place in places if place.rank in state.holders}
    return {rank: generation for rank, generation in born.items() if generation < state.generation}


def _condemned(state: State, index: int) -> tuple[tuple[int, Generation], ...]:
    found = [state.holders[rank] for rank in sorted(state.condemned) if rank in state.holders]
    return tuple((holder.rank, holder.born) for holder in found if holder.node == index)


def _must_stop(state: State) -> bool:
    """The job ends in the middle, and not by its own fault."""
    code = state.outcome.exit_code if state.outcome is not None else EXIT_OK
    return code == EXIT_DO_NOT_REQUEUE or code > EXIT_SIGNAL_BASE


def to_publish(state: State, index: int) -> Stamp | None:
    """The checkpoint that rank 0, on this node, says is whole on disk. Of an older generation than the job's it may be
    whole or not: whoever was replaced may still be writing."""
    holder = state.holders.get(0)
    if holder is None or holder.node != index or holder.runtime is None:
        return None
    written = holder.runtime.written
    return written if written is not None and written.generation == state.generation else None


def ground(state: State) -> Ground | None:
    """Who runs where and keeps what: as soon as it is clear that this job is repaired, or a node keeps copies for it."""
    alive = [member for _, member in sorted(state.members.items()) if member.alive]
    servers = tuple(member.server for member in alive if member.server is not None)
    if not servers and not holding.resilient(state):
        return None
    return Ground(
        {place.rank: place.node for place in state.places},
        tuple((seat.node, state.members[seat.node].domain) for seat in state.lineup),
        servers,
        state.rules.replicas,
        state.rules.replica_distance,
        state.rules.snapshot_interval,
        state.rules.verify_replicas,
    )


def fulfilled(state: State, index: int) -> bool:
    """Whether the node's last report shows that its wish came true (else it is told again)."""
    wish, member = wish_for(state, index), state.members[index]
    if wish.phase is PlanPhase.QUIESCE:
        return member.quiesced >= wish.generation and (not wish.host_store or state.store is not None)
    if wish.phase is PlanPhase.SWAP:
        here = [state.holders[place.rank] for place in wish.places]
        return member.quiesced >= wish.generation and all(holding.has_restored(state, holder) for holder in here)
    if wish.phase is PlanPhase.RUN:
        return member.applied >= wish.generation and (not wish.leave or member.live == 0)
    if wish.phase is PlanPhase.STOP:
        return member.live == 0
    return wish.phase is PlanPhase.PARK or member.left
