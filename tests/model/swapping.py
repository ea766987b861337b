"""Membership, its wishes and the nodes' reports during swaps, over a bus that loses, doubles and reorders: a graph of states.

Two nodes with one rank each and a spare node. The supervisor is the real `membership.step` and `wish_for`; agents, workers and
the bus are the simplest that do what they are told. Processes are killed, nodes lose power or are cut off (the supervisor
gives them up while they live on), deadlines are missed, in any order with deliveries. What becomes of the training state
within a generation is the other model's subject (training.py): here a version is a number, and every node of a line-up that
has made a step together keeps a slot of each bundle.

The bus: a node sends a report whenever anything about it changes, the supervisor a wish whenever that changes. Any message that
the receiver would still take may arrive at any time, so a message may be late, overtaken or never arrive. Those that it would
not take are left out: a report that is not newer than the last one taken (`seq`), a wish that is not above the one taken
(generation, then stage). So a doubled message is left out, too. A resent message says what is true now: the newest of each
channel, which stays there until it is taken.

Time: all stands still at 0, so no deadline passes by itself; that one passes is a move of its own. That a survivor or a
restore is too slow is one of the faults; that the patience for a spare node ends is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Final, NamedTuple, TypeVar

from model.agents import (
    EARLY,
    LEFT,
    LOADED,
    NEW,
    OUTSIDE,
    RANKS,
    RUNS,
    Agent,
    Told,
    Worker,
    exchange,
    number_of,
    report,
    take,
)
from model.exploration import Move
from phoenix_launch.errors import EXIT_DO_NOT_REQUEUE
from phoenix_launch.job import events as job_events
from phoenix_launch.job import membership, wishes
from phoenix_launch.job.events import Event
from phoenix_launch.job.state import Phase, Rules, Rung, State
from phoenix_launch.messages import PlanPhase

T = TypeVar("T")

NODES: Final = 3
LONG_AGO: Final = -1e6
ENDS: Final = (Phase.STOPPING, Phase.LEAVING, Phase.FINISHED)
RULES: Final = Rules(seats_min=RANKS, seats_max=RANKS, max_failures_per_host=9)
SIGNALS: Final = (-9, -11, -6, -4, -7)  # each fault another: two that are alike would be taken for a bug

_STAGE: Final = {PlanPhase.QUIESCE: 0, PlanPhase.SWAP: 0, PlanPhase.PARK: 3, PlanPhase.RUN: 3}


class World(NamedTuple):
    state: int  # number of the supervisor's state
    agents: tuple[Agent, ...]
    reports: tuple[tuple[Agent, ...], ...]  # by node, on their way to the supervisor: what the node was like
    told: tuple[tuple[Told, ...], ...]  # by node, on their way there
    faults: int


class Swapping:
    """What may happen beside the death of a process: `lost`: nodes lose power, deadlines pass; `cut`: the supervisor gives up a
    node that lives; `rare`: a rank ends well in the middle of the job, or is in a collective outside of a step when the
    notice comes."""

    def __init__(
        self, faults: int = 2, *, lost: bool = True, cut: bool = True, rare: bool = False, nodes: int = NODES
    ) -> None:
        self.nodes = nodes
        self.lost, self.cut, self.rare, self.most = lost, cut, rare, faults
        self.states: list[State] = []
        self.numbers: dict[str, int] = {}
        self.phases: set[Phase] = set()
        self.rungs: set[int] = set()
        self.step = cache(self._step)
        self.wish = cache(self._wish)
        self.start = self._begun()._replace(faults=faults)

    # --- the supervisor ---

    def number(self, state: State) -> int:
        """Of a state in which time and numbers of reports, of which only the order counts, are set back."""
        members = {i: replace(m, seq=0, heard=0.0, reported=0.0) for i, m in sorted(state.members.items())}
        holders = dict(sorted(state.holders.items()))
        swap = state.swap and replace(state.swap, planned=0.0)
        state = replace(state, members=members, holders=holders, swap=swap, since=0.0)
        known = self.numbers.setdefault(repr(state), len(self.states))
        if known == len(self.states):
            self.states.append(state)
            self.phases.add(state.phase)
            self.rungs.add(state.rung)
        return known

    def _step(self, number: int, event: Event | None) -> int:
        """`event` None: the deadline that could pass now does so."""
        state = self.states[number]
        if event is None:
            swap = state.swap and replace(state.swap, planned=LONG_AGO)
            state, event = replace(state, since=LONG_AGO, swap=swap), job_events.Ticked()
        return self.number(membership.step(state, event, 0.0)[0])

    def _wish(self, number: int, node: int) -> Told:
        wish = wishes.wish_for(self.states[number], node)
        stage = {PlanPhase.STOP: 8, PlanPhase.LEAVE: 9}.get(wish.phase, _STAGE.get(wish.phase, 0) + wish.stage)
        its = None if wish.recovery is None else wish.recovery.stamp
        stamp = None if its is None else (number_of(its.generation), its.version)
        return Told(
            number_of(wish.generation), 3 if wish.phase is PlanPhase.RUN else stage, wish.phase,
            tuple(place.rank for place in wish.places),
            tuple(sorted((rank, number_of(born)) for rank, born in wish.born.items())), stamp, wish.host_store,
        )  # fmt: skip

    def _begun(self) -> World:
        """Generation 1 runs on nodes 0 and 1, past its first steps; version 1 is complete."""
        state = membership.start(RULES, 1, 0.0)
        for node in range(self.nodes):
            admitted = job_events.Admitted(
                index=node, name=f"node{node}", domain=f"d{node}", slots=1, incarnation=f"i{node}", spare=node >= RANKS
            )
            state, _ = membership.step(state, admitted, 0.0)
        nobody = Told(0, 0, PlanPhase.PARK)
        agents = [Agent(nobody) for _ in range(self.nodes)]
        number = self.number(state)
        for _ in range(4):
            for node in range(self.nodes):
                number = self.step(number, job_events.Reported(node, report(node, agents[node])))
                agents[node] = take(agents[node], self.wish(number, node)) or agents[node]
        agents = [
            agent._replace(
                workers=tuple(w._replace(stamp=(1, 1)) for w in agent.workers),
                slots=(1, 1) if agent.workers else None, complete=1,
            )
            for agent in agents
        ]  # fmt: skip
        for node in range(self.nodes):
            number = self.step(number, job_events.Reported(node, report(node, agents[node])))
        assert self.states[number].phase is Phase.RUNNING
        nothing: tuple[()] = ()
        return World(number, tuple(agents), (nothing,) * self.nodes, (nothing,) * self.nodes, 0)

    # --- moves ---

    def moves(self, world: World) -> Iterator[Move[World]]:
        state = self.states[world.state]
        self.promise(world, state)
        if state.phase in ENDS:
            left = sum(member.alive for member in state.members.values())
            no_nodes = state.outcome is not None and state.outcome.exit_code == EXIT_DO_NOT_REQUEUE and left < RANKS
            assert no_nodes or state.rung is Rung.FROM_SCRIPT, f"the job ends for no good reason: {state.outcome}"
            return
        for node, agent in enumerate(world.agents):
            yield from self.deliveries(world, node)
            if agent.alive:
                yield from self.work(world, node, agent)
            elif state.members[node].alive:
                ended = job_events.AgentEnded(node, f"i{node}")
                yield Move(f"node {node} is known to be lost", self.heard(world, ended))
        if state.phase is Phase.WAITING:
            yield Move("nobody waits any longer", self.heard(world, None))
        if self.all_run(world, state) and not self.progressed(world, state):
            yield Move("a step is made", self.stepped(world, state))
        if world.faults:
            yield from self.harm(world._replace(faults=world.faults - 1), state)

    def deliveries(self, world: World, node: int) -> Iterator[Move[World]]:
        for at, then in enumerate(world.reports[node]):
            after = world._replace(reports=put(world.reports, node, world.reports[node][at + 1 :]))
            if self.states[world.state].members[node].alive:
                event = job_events.Reported(node, report(node, then))
                yield Move(f"report {at} of node {node} arrives", self.heard(after, event))
        for at, told in enumerate(world.told[node]):
            taken = take(world.agents[node], told)
            if taken is not None and world.agents[node].alive:
                after = world._replace(told=put(world.told, node, world.told[node][at + 1 :]))
                label = f"node {node} hears {told.phase.value} {told.generation}.{told.stage}"
                yield Move(label, self.changed(after, node, taken))

    def heard(self, world: World, event: Event | None) -> World:
        """The supervisor takes it; nodes whose wish is another one now are told."""
        number = self.step(world.state, event)
        if number == world.state:
            return world
        before, after = self.states[world.state], self.states[number]
        if after.phase is Phase.RUNNING and before.phase is not Phase.RUNNING:
            self.check_restored(world, after)
        climbed = before.phase is Phase.RUNNING and before.rung is Rung.FROM_SLOTS  # which did not help
        if after.rung is Rung.FROM_SCRIPT and before.rung is not Rung.FROM_SCRIPT and not climbed:
            having = [i for i, agent in enumerate(world.agents) if agent.slots and after.members[i].alive]
            assert not having, f"the state is given up although nodes {having} have all of it"
        told = []
        for node, on_the_way in enumerate(world.told):
            wish, agent = self.wish(number, node), world.agents[node]
            idle = wish.phase in (PlanPhase.PARK, PlanPhase.SWAP) and not (wish.ranks or wish.store or agent.workers)
            if not idle and (not on_the_way or on_the_way[-1] != wish):
                on_the_way = (*on_the_way, wish)
            if not agent.alive:
                on_the_way = ()
            told.append(
                tuple(w for w in on_the_way if (w.generation, w.stage) > (agent.told.generation, agent.told.stage))
            )
        return world._replace(state=number, told=tuple(told))

    def changed(self, world: World, node: int, agent: Agent) -> World:
        """The node is another one now, and says so; wishes that it would no longer take are gone."""
        if agent == world.agents[node]:
            return world
        said = () if not agent.alive else (agent,)
        told = tuple(w for w in world.told[node] if (w.generation, w.stage) > (agent.told.generation, agent.told.stage))
        reports = world.reports[node]
        if said and reports and report(node, reports[-1]) == report(node, agent):
            reports = reports[:-1]
        if not self.states[world.state].members[node].alive:
            reports, said = (), ()
        return world._replace(
            agents=put(world.agents, node, agent),
            reports=put(world.reports, node, (*reports, *said)),
            told=put(world.told, node, told if agent.alive else ()),
        )

    def work(self, world: World, node: int, agent: Agent) -> Iterator[Move[World]]:
        told = agent.told
        for worker in agent.workers:
            if worker.code or told.phase is not PlanPhase.SWAP or worker.rank not in told.ranks:
                continue
            if worker.mode == OUTSIDE:
                continue
            if worker.joined < told.generation:
                left = worker._replace(joined=told.generation, mode=LEFT)
                yield Move(f"rank {worker.rank} leaves its step", self.changed(world, node, exchange(agent, left)))
            elif told.stage == 2 and worker.restored < told.generation and self.is_there(world, worker, told):
                assert told.stamp is not None
                loaded = worker._replace(mode=LOADED, restored=told.generation, stamp=told.stamp)
                yield Move(f"rank {worker.rank} restores", self.changed(world, node, exchange(agent, loaded)))

    def is_there(self, world: World, worker: Worker, told: Told) -> bool:
        """Whether what it is to restore still is somewhere; a source that has died means that a next generation comes."""
        itself = worker.mode != NEW and worker.stamp == told.stamp
        return itself or any(agent.slots == told.stamp for agent in world.agents if agent.alive)

    def stepped(self, world: World, state: State) -> World:
        """All make a step together and copy it; one of the two versions that a node keeps is enough here."""
        stamp = (
            number_of(state.generation),
            max(w.stamp[1] for a in world.agents for w in a.workers if w.mode == RUNS) + 1,
        )
        after = world
        for node in {seat.node for seat in state.lineup}:
            agent = after.agents[node]
            workers = tuple(w._replace(stamp=stamp) if not w.code else w for w in agent.workers)
            after = self.changed(after, node, agent._replace(workers=workers, slots=stamp, complete=stamp[1]))
        return after

    def harm(self, world: World, state: State) -> Iterator[Move[World]]:
        for node, agent in enumerate(world.agents):
            if not agent.alive:
                continue
            for worker in agent.workers:
                if not worker.code:
                    killed = exchange(agent, worker._replace(code=SIGNALS[world.faults]))
                    yield Move(f"rank {worker.rank} is killed", self.changed(world, node, killed), fault=True)
                    if self.rare:
                        yield from self.rarer(world, node, agent, worker)
            if self.lost:
                dead = agent._replace(alive=False, workers=(), slots=None)
                yield Move(f"node {node} loses power", self.changed(world, node, dead), fault=True)
            if self.cut and state.members[node].alive:
                cut = job_events.AgentEnded(node, f"i{node}")
                yield Move(f"node {node} is cut off", self.heard(world, cut), fault=True)
        if self.lost and state.phase in (Phase.SWAPPING, Phase.QUIESCING):
            yield Move("a deadline passes", self.heard(world, None), fault=True)

    def rarer(self, world: World, node: int, agent: Agent, worker: Worker) -> Iterator[Move[World]]:
        told = agent.told
        if world.faults == self.most - 1:  # a second time would be taken for a bug
            ended = exchange(agent, worker._replace(code=EARLY))
            yield Move(f"rank {worker.rank} ends with code 0", self.changed(world, node, ended), fault=True)
        if told.phase is PlanPhase.SWAP and worker.joined < told.generation and worker.mode != OUTSIDE:
            caught = exchange(agent, worker._replace(mode=OUTSIDE))
            yield Move(f"rank {worker.rank} is caught outside", self.changed(world, node, caught), fault=True)

    # --- promises ---

    def promise(self, world: World, state: State) -> None:
        live = [w for agent in world.agents for w in agent.workers if not w.code]
        for generation in {w.joined for w in live}:
            here = [w for w in live if w.joined == generation]
            assert len({w.rank for w in here}) == len(here), f"two hold a rank in generation {generation}"
            running = {w.stamp for w in here if w.mode == RUNS}
            assert len(running) <= 1, f"ranks of generation {generation} run with different states: {running}"
        assert all(w.joined <= number_of(state.generation) for w in live)

    def check_restored(self, world: World, state: State) -> None:
        """All that run on in this generation hold its state; who has died or is new from the slots does not count."""
        if state.recovery is None or all(h.born == state.generation for h in state.holders.values()):
            return
        for holder in state.holders.values():
            agent = world.agents[holder.node]
            for worker in agent.workers:
                if worker.rank == holder.rank and worker.born == number_of(holder.born):
                    assert worker.restored == number_of(state.generation), (
                        f"all go on, but rank {worker.rank} has not restored"
                    )

    def all_run(self, world: World, state: State) -> bool:
        if state.phase is not Phase.RUNNING:
            return False
        return all(
            any(
                w.rank == place.rank and w.mode == RUNS and not w.code and w.joined == number_of(state.generation)
                for w in world.agents[place.node].workers
            )
            for place in state.places
        )

    def progressed(self, world: World, state: State) -> bool:
        return all(world.agents[place.node].complete > state.resume for place in state.places)

    def goal(self, world: World) -> bool:
        state = self.states[world.state]
        return state.phase in ENDS or (self.all_run(world, state) and self.progressed(world, state))


def put(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])
