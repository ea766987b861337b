"""The swap model with a supervisor that may die at any moment, and another one that takes over: by `membership.step` too.

What the supervisor had sent may still arrive, or not; what it had written down may be one step old. Meanwhile nodes train on,
or end workers that cannot. Whoever takes over has the promise of most nodes of the live map, one that trains among them; a node
that does not answer then lives on, and the old supervisor, which lives with it behind a partition, goes on telling it
what it wishes. How terms are promised is a graph of its own (`Claims`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Final, NamedTuple

from model.agents import RANKS, RUNS, Agent, Told, exchange, generation_of, report
from model.exploration import Move
from model.swapping import ENDS, NODES, Swapping, World, put
from phoenix_launch.job import events as job_events
from phoenix_launch.job import membership
from phoenix_launch.job.events import Event, Inherited, Resumed
from phoenix_launch.job.state import Phase, State
from phoenix_launch.messages import NodePlan
from phoenix_launch.node.fencing import Allegiance

FENCED: Final = -15  # not a signal that other faults have: two that are alike would be taken for a bug


class Job(NamedTuple):
    """`inner.state`: of the supervisor, or what the last one has written down."""

    inner: World
    supervised: bool = True
    before: int = -1  # the state of the supervisor before what it took last
    deaths: int = 1  # of supervisors that may still happen


class Takeover(Swapping):
    """`fences`: nodes end workers that cannot go on; `quorum`: how many nodes have to follow; `deaf`: who follows a new
    supervisor hears no other; `lost`: nodes lose power, deadlines pass; `trains`: one of those that follow has to train.

    That a message is overtaken by a later one is the swap model's subject: here only the newest of a channel is under way.
    """

    def __init__(
        self, faults: int, *, deaths: int = 1, fences: bool = True, deaf: bool = True, lost: bool = False,
        nodes: int = NODES, quorum: int = 0, trains: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(faults, lost=lost, cut=False, nodes=nodes)
        self.trains = trains
        quorum = quorum or nodes // 2 + 1
        self.fences, self.quorum, self.deaf = fences, quorum, deaf
        self.adopted = self.anew = 0
        self.begin = Job(self.start, deaths=deaths)

    def ways(self, job: Job) -> Iterator[Move[Job]]:
        world, state = job.inner, self.states[job.inner.state]
        self.never_two_at_once(world)
        if not job.supervised:
            yield from self.alone(job)
            return
        for move in self.moves(world):
            moved = move.target.state != world.state
            then = job._replace(inner=newest(move.target), before=world.state if moved else job.before)
            yield Move(move.label, then, move.fault)
        yield from self.left_behind(job)
        if job.deaths and state.phase not in ENDS:
            for written in {world.state, job.before if job.before >= 0 else world.state}:
                silent = world._replace(state=written, reports=((),) * self.nodes)
                dead = job._replace(inner=silent, supervised=False, before=-1, deaths=job.deaths - 1)
                yield Move(
                    "the supervisor dies" + " before it has written" * (written != world.state), dead, fault=True
                )

    # --- without a supervisor ---

    def alone(self, job: Job) -> Iterator[Move[Job]]:
        world, state = job.inner, self.states[job.inner.state]

        def after(label: str, inner: World, fault: bool = False) -> Move[Job]:
            return Move(label, job._replace(inner=inner._replace(reports=((),) * self.nodes)), fault)

        for node in range(self.nodes):
            for move in self.deliveries(world, node):
                yield after(move.label, move.target)
        running = computing(world)
        if running and not self.progressed(world, state):
            yield after("a step is made alone", self.stepped_alone(world, min(running)))
        if world.faults:
            for move in self.harm(world._replace(faults=world.faults - 1), state):
                if "deadline" not in move.label:
                    yield after(move.label, move.target, fault=True)
        for node, agent in enumerate(world.agents):
            if (
                self.fences
                and not running
                and agent.alive
                and any(not w.code and w.mode == RUNS for w in agent.workers)
            ):
                yield after(f"node {node} ends its workers", self.fenced(world, node, agent))
        yield from self.takeovers(job)

    def stepped_alone(self, world: World, generation: int) -> World:
        version = max(w.stamp[1] for a in world.agents for w in a.workers if w.mode == RUNS) + 1
        for node, agent in enumerate(world.agents):
            if agent.alive and any(w.joined == generation and w.mode == RUNS for w in agent.workers):
                workers = tuple(w._replace(stamp=(generation, version)) if not w.code else w for w in agent.workers)
                made = agent._replace(workers=workers, slots=(generation, version), complete=version)
                world = world._replace(agents=put(world.agents, node, made))
        return world

    def fenced(self, world: World, node: int, agent: Agent) -> World:
        for worker in agent.workers:
            if not worker.code:
                agent = exchange(agent, worker._replace(code=FENCED))
        return world._replace(agents=put(world.agents, node, agent))

    # --- another supervisor ---

    def takeovers(self, job: Job) -> Iterator[Move[Job]]:
        world, state = job.inner, self.states[job.inner.state]
        able = [n for n in range(self.nodes) if world.agents[n].alive and state.members[n].alive]
        seats = {seat.node for seat in state.lineup}
        for size in range(self.quorum, len(able) + 1):
            for nodes in combinations(able, size):
                if self.trains and not seats & set(nodes):
                    continue
                yield Move(f"{nodes} follow another supervisor", self.taken_over(job, nodes), fault=size < len(able))
        if len(able) < self.quorum:
            yield Move(
                "too few nodes are left to go on", job._replace(supervised=True, deaths=0, inner=self.given_up(world))
            )

    def given_up(self, world: World) -> World:
        """As a job ends that waits for a node in vain: by --orphan-timeout."""
        event: Event = job_events.Ticked()
        state = self.states[world.state]
        for node in range(self.nodes):
            if state.members[node].alive:
                world = self.heard(world, job_events.AgentEnded(node, f"i{node}"))
        for _ in range(3):
            world = self.heard(world, None if self.states[world.state].phase is Phase.WAITING else event)
        return world

    def taken_over(self, job: Job, nodes: tuple[int, ...]) -> Job:
        world = job.inner
        old = self.states[world.state]
        inherited = {
            node: Inherited(plan_of(world.agents[node].told), report(node, world.agents[node])) for node in nodes
        }
        event = Resumed(old.term + 1, inherited)
        behind = [n for n in range(self.nodes) if n not in nodes and world.agents[n].alive and old.members[n].alive]
        kept = world.told if not self.deaf else ((),) * self.nodes
        number = self.number(membership.step(old, event, 0.0)[0])
        told = [self.wish_of_old(world, node, nodes) if node in behind else kept[node] for node in range(self.nodes)]
        after = world._replace(state=world.state, told=tuple(told), reports=((),) * self.nodes)
        if self.states[number].generation == old.generation:
            self.adopted += 1
        else:
            self.anew += 1
        return job._replace(inner=self.told_anew(after, number, nodes), supervised=True, before=-1)

    def told_anew(self, world: World, number: int, nodes: tuple[int, ...]) -> World:
        """The new supervisor tells all that follow it; what they told it is what it knows."""
        told = list(world.told)
        for node in nodes:
            wish, agent = self.wish(number, node), world.agents[node]
            told[node] = (
                *(w for w in told[node] if not self.deaf),
                *((wish,) if (wish.generation, wish.stage) > (agent.told.generation, agent.told.stage) else ()),
            )
        return world._replace(state=number, told=tuple(told))

    def wish_of_old(self, world: World, node: int, followers: tuple[int, ...]) -> tuple[Told, ...]:
        """What an old supervisor that is cut off with this node wishes, when it has given up those that follow another one."""
        number = world.state
        for other in followers:
            number = self.step(number, job_events.AgentEnded(other, f"i{other}"))
        wish, agent = self.wish(number, node), world.agents[node]
        return (wish,) if (wish.generation, wish.stage) > (agent.told.generation, agent.told.stage) else ()

    def left_behind(self, job: Job) -> Iterator[Move[Job]]:
        """Nodes that follow nobody, or one that is a supervisor no longer: they end what cannot go on, and themselves."""
        world, state = job.inner, self.states[job.inner.state]
        for node, agent in enumerate(world.agents):
            if state.members[node].alive or not agent.alive or not agent.workers:
                continue
            if self.fences and not all_there(world, agent):
                ended = agent._replace(workers=(), alive=False)
                inner = world._replace(agents=put(world.agents, node, ended), told=put(world.told, node, ()))
                yield Move(f"node {node}, left behind, ends", job._replace(inner=inner))
            for told in world.told[node]:
                yield from self._old_plan(job, node, told)

    def _old_plan(self, job: Job, node: int, told: Told) -> Iterator[Move[Job]]:
        for move in self.deliveries(job.inner, node):
            if "hears" in move.label:
                inner = move.target._replace(reports=put(move.target.reports, node, ()))
                yield Move(f"{move.label} from the old supervisor ({told.generation})", job._replace(inner=inner))

    # --- promises ---

    def never_two_at_once(self, world: World) -> None:
        assert len(computing(world)) <= 1, f"generations {sorted(computing(world))} compute at once"

    def promise(self, world: World, state: State) -> None:
        """Of the nodes that follow the supervisor of this state."""
        mine = tuple(
            agent if state.members[node].alive else agent._replace(workers=())
            for node, agent in enumerate(world.agents)
        )
        super().promise(world._replace(agents=mine), state)

    def over(self, job: Job) -> bool:
        world, state = job.inner, self.states[job.inner.state]
        strays = [
            node for node, agent in enumerate(world.agents)
            if agent.alive and not state.members[node].alive and any(not w.code for w in agent.workers)
        ]  # fmt: skip
        return job.supervised and self.goal(world) and (state.phase in ENDS or not strays)


def newest(world: World) -> World:
    return world._replace(
        reports=tuple(queue[-1:] for queue in world.reports), told=tuple(queue[-1:] for queue in world.told)
    )


def plan_of(told: Told) -> NodePlan | None:
    return NodePlan(generation_of(told.generation), told.phase) if told.generation else None


def computing(world: World) -> set[int]:
    """Generations all of whose ranks run: only such a one can make a step."""
    there: dict[int, set[int]] = {}
    for agent in world.agents:
        for worker in agent.workers if agent.alive else ():
            if worker.mode == RUNS and not worker.code:
                there.setdefault(worker.joined, set()).add(worker.rank)
    return {generation for generation, ranks in there.items() if len(ranks) == RANKS}


def all_there(world: World, agent: Agent) -> bool:
    return any(worker.joined in computing(world) for worker in agent.workers)


# --- terms -----------------------------------------------------------------------------------------------------------


class Node(NamedTuple):
    term: int = 1
    promised: int = 0
    claimant: str = ""

    def asked(self, term: int, claimant: str, take: bool) -> tuple[Node, bool]:
        real = Allegiance(*self)
        granted = real.follow(term, claimant) if take else real.promise(term, claimant)
        return Node(real.term, real.promised, real.claimant), granted


class Claimant(NamedTuple):
    name: str
    term: int = 2
    promises: frozenset[int] = frozenset()
    followers: frozenset[int] = frozenset()
    asked: frozenset[int] = frozenset()
    told: frozenset[int] = frozenset()
    over: bool = False  # it heard of a higher term


class Election(NamedTuple):
    nodes: tuple[Node, ...]
    claimants: tuple[Claimant, ...]


class Claims:
    """Two that take over at once; each question may come at any time, or never. `terms`: by which they begin."""

    def __init__(self, terms: tuple[int, int], quorum: int = NODES // 2 + 1) -> None:
        self.quorum = quorum
        names = ("a", "b")
        self.start = Election((Node(),) * NODES, tuple(Claimant(n, t) for n, t in zip(names, terms, strict=True)))

    def moves(self, election: Election) -> Iterator[Move[Election]]:
        self.promise(election)
        for (i, its), n in product(enumerate(election.claimants), range(NODES)):
            take = len(its.promises) >= self.quorum
            if its.over or n in (its.told if take else its.asked):
                continue
            node, granted = election.nodes[n].asked(its.term, its.name, take)
            assert node.term >= election.nodes[n].term and (not granted or node.promised >= election.nodes[n].promised)
            if take:
                after = its._replace(told=its.told | {n}, followers=its.followers | ({n} if granted else set()))
            else:
                after = its._replace(asked=its.asked | {n}, promises=its.promises | ({n} if granted else set()))
            if not granted and take:
                after = after._replace(over=True)
            then = Election(put(election.nodes, n, node), put(election.claimants, i, after))
            yield Move(f"{its.name} {'takes' if take else 'asks'} {n}", then, fault=True)

    def promise(self, election: Election) -> None:
        supervisors = [its for its in election.claimants if len(its.followers) >= self.quorum]
        assert len({its.term for its in supervisors}) == len(supervisors), "two supervisors have one term"
        for its, n in product(election.claimants, range(NODES)):
            node = election.nodes[n]
            if n in its.followers and node.claimant != its.name and node.term > its.term:
                continue  # it follows a higher one now
            if n in its.followers:
                assert node.term >= its.term, f"node {n} follows a lower term than it had granted"
