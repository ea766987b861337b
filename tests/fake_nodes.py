"""A job without processes: nodes that really follow their wishes, a network that loses, doubles and delays what they say,
and a supervisor that is nothing but `membership.step` and `wish_for`. Time is a number; all chance comes from one seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from phoenix_launch.job import events as job_events
from phoenix_launch.job import membership, wishes
from phoenix_launch.job.events import Action, Event
from phoenix_launch.job.state import Member, Outcome, Phase, Rules, State
from phoenix_launch.job.wishes import Wish
from phoenix_launch.messages import ExitReport, NodeReport, PlanPhase, ProcessState, RankReport, StoreReport
from phoenix_launch.wire import NO_GENERATION, Generation

TICK: Final = 0.25
HEARTBEAT: Final = 0.5
RESEND: Final = 1.0
FORCED: Final = -9

_ORDER: Final = {PlanPhase.QUIESCE: 0, PlanPhase.PARK: 1, PlanPhase.RUN: 1, PlanPhase.STOP: 2, PlanPhase.LEAVE: 3}


@dataclass(slots=True)
class FakeWorker:
    """`ends_at`: when it will end by itself, with `code`. `killed_at`: when its agent's patience is over."""

    rank: int
    generation: Generation
    ends_at: float
    code: int = 0
    killed_at: float | None = None
    told: bool = False
    ended_at: float | None = None

    @property
    def live(self) -> bool:
        return self.ended_at is None


@dataclass(slots=True)
class FakeNode:
    """One incarnation of a node: its agent and its workers."""

    index: int
    incarnation: str
    chance: random.Random
    prepared_at: float
    alive: bool = True  # the agent lives
    frozen_until: float = 0.0
    left_in_order: bool = False
    workers: list[FakeWorker] = field(default_factory=list)
    wish: Wish | None = None
    quiesced: Generation = NO_GENERATION
    applied: Generation = NO_GENERATION
    store: StoreReport | None = None
    store_at: float = 0.0
    seq: int = 0
    said_at: float = -1.0
    changed: bool = True

    def live_workers(self) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.live]

    def hear(self, wish: Wish, now: float) -> None:
        if not self.alive:
            return
        old = self.wish
        if old is not None and (wish.generation, _ORDER[wish.phase]) < (old.generation, _ORDER[old.phase]):
            return
        self.wish = wish
        for worker in self.live_workers():
            if wish.phase is PlanPhase.STOP or worker.generation < wish.generation:
                limit = now + wish.grace
                worker.killed_at = limit if worker.killed_at is None else min(worker.killed_at, limit)
                if not worker.told:
                    worker.told, worker.code = True, -wish.signal
                    worker.ends_at = now + self.chance.choice((0.0, 0.3, 2.0, 1e9))  # some do not listen
        if wish.host_store and (self.store is None or self.store.generation < wish.generation):
            self.store = StoreReport(wish.generation, f"node{self.index}", 40000 + wish.generation.n)
            self.store_at = now + self.chance.choice((0.0, 0.3, 1.0))

    def advance(self, now: float) -> None:
        """What happens here by itself."""
        if not self.alive or now < self.frozen_until:
            return
        wish = self.wish
        for worker in self.live_workers():
            limit = worker.ends_at if worker.killed_at is None else min(worker.ends_at, worker.killed_at)
            if now >= limit:
                self.end(worker, now, worker.code if worker.ends_at <= limit else FORCED)
        if wish is None:
            return
        if wish.phase is PlanPhase.LEAVE:
            self.left_in_order = True
            self.die(now)
            return
        if self.quiesced < wish.generation and not any(w.generation < wish.generation for w in self.live_workers()):
            self.quiesced, self.changed = wish.generation, True
        if self.quiesced >= wish.generation and wish.phase in (PlanPhase.RUN, PlanPhase.PARK):
            self._run(wish, now)

    def _run(self, wish: Wish, now: float) -> None:
        if self.applied >= wish.generation or now < self.prepared_at:
            return
        self.workers = [worker for worker in self.workers if worker.generation == wish.generation]
        for place in wish.places if wish.phase is PlanPhase.RUN else ():
            ends_at = now + self.chance.choice((2.0, 8.0, 20.0, 30.0))
            self.workers.append(FakeWorker(place.rank, wish.generation, ends_at))
        self.applied, self.changed = wish.generation, True

    def end(self, worker: FakeWorker, now: float, code: int) -> None:
        worker.code, worker.ended_at, self.changed = code, now, True

    def die(self, now: float) -> None:
        """With the agent everything ends, and nobody reports it."""
        self.alive = False
        for worker in self.live_workers():
            worker.ended_at, worker.code = now, FORCED

    def report(self, now: float) -> NodeReport | None:
        """The next report, if one is due."""
        if not self.alive or now < self.frozen_until:
            return None
        if not self.changed and now - self.said_at < HEARTBEAT:
            return None
        self.changed, self.said_at, self.seq = False, now, self.seq + 1
        return node_report(
            self.incarnation,
            self.seq,
            prepared=now >= self.prepared_at,
            quiesced=self.quiesced,
            applied=self.applied,
            ranks=[rank_report(w.rank, w.generation, _exit_of(w, now)) for w in self.workers],
            store=self.store if now >= self.store_at else None,
        )


def _exit_of(worker: FakeWorker, now: float) -> ExitReport | None:
    return None if worker.ended_at is None else ExitReport(worker.code, now - worker.ended_at)


def rank_report(rank: int, generation: Generation, ended: ExitReport | None = None) -> RankReport:
    state = ProcessState.RUNNING if ended is None else ProcessState.GONE
    return RankReport(rank, generation, 1000 + rank, state, exit=ended)


def node_report(
    incarnation: str,
    seq: int,
    *,
    prepared: bool = True,
    quiesced: Generation = NO_GENERATION,
    applied: Generation = NO_GENERATION,
    ranks: Iterable[RankReport] = (),
    store: StoreReport | None = None,
    complaint: str = "",
) -> NodeReport:
    return NodeReport(incarnation, seq, prepared, 1, (1,), quiesced, applied, tuple(ranks), store, complaint)


@dataclass(slots=True)
class _InFlight:
    due: float
    node: FakeNode
    message: NodeReport | Wish


@dataclass(slots=True)
class Weather:
    """Shares of messages that are lost, doubled, late."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What a node says of itself when it is admitted."""

    index: int
    slots: int = 1
    spare: bool = False
    domain: str = ""
    group_rank: int = -1


class FakeJob:
    """Supervisor, nodes and network. `check` is called after each step of the state machine."""

    def __init__(self, rules: Rules, enrolments: Iterable[Enrolment], seed: int = 0) -> None:
        self.now = 100.0
        self.chance = random.Random(seed)
        self.weather = Weather()
        self.state: State = membership.start(rules, 1, self.now)
        self.enrolments = {enrolment.index: enrolment for enrolment in enrolments}
        self.nodes: dict[int, list[FakeNode]] = {index: [] for index in self.enrolments}  # all incarnations
        self.fenced: set[str] = set()
        self.actions: list[Action] = []
        self.own_failures = 0  # workers that failed by themselves, not because another did
        self.outcome: Outcome | None = None
        self._flying: list[_InFlight] = []
        self._history: list[tuple[int, NodeReport]] = []
        self._told: dict[str, tuple[Wish, float]] = {}
        self._returns: dict[int, float] = {}  # nodes that are being launched again: when they are there
        self._notices: list[tuple[float, Event]] = []  # what the supervisor will see of dead guardians

    # --- what tests do to it -----------------------------------------------------------------------------------------

    def node(self, index: int) -> FakeNode | None:
        """The newest incarnation, if it is alive."""
        incarnations = self.nodes[index]
        return incarnations[-1] if incarnations and incarnations[-1].alive else None

    def join(self, index: int) -> None:
        """The node is started, for the first time or again after the supervisor gave it up."""
        known = self.state.members.get(index)
        if self.node(index) is not None or (known is not None and known.alive):
            return
        enrolment, earlier = self.enrolments[index], self.nodes[index]
        name = f"node{index}"
        incarnation = f"{name}.{len(earlier)}"
        earlier.append(FakeNode(index, incarnation, self.chance, self.now + self.chance.choice((0.0, 0.5, 1.5))))
        self._returns.pop(index, None)
        self.apply(
            job_events.Admitted(
                index=index, name=name, domain=enrolment.domain or name, slots=enrolment.slots,
                incarnation=incarnation, spare=enrolment.spare, group_rank=enrolment.group_rank,
            )
        )  # fmt: skip
        admitted = self.state.members.get(index)
        if admitted is None or admitted.incarnation != incarnation:  # quarantined, or the job is over
            earlier[-1].die(self.now)

    def fail_worker(self, index: int, code: int) -> None:
        """One worker of the node ends by itself; its peers may fail of that."""
        node = self.node(index)
        workers = node.live_workers() if node is not None else []
        if node is None or not workers:
            return
        worker = self.chance.choice(workers)
        self.own_failures += 0 if worker.told else 1
        node.end(worker, self.now, code)
        self._peers_fail(worker.generation)

    def power_off(self, index: int, seen: bool) -> None:
        """The whole node is gone; `seen`: and the supervisor sees its guardian's end."""
        node = self.node(index)
        if node is None:
            return
        generations = {worker.generation for worker in node.live_workers()}
        node.die(self.now)
        self._flying = [flight for flight in self._flying if flight.node is not node]
        if seen:
            self._notices.append((self.now + self.chance.choice((0.0, 0.5)), _ended(node)))
        for generation in generations:
            self._peers_fail(generation)

    def freeze(self, index: int, seconds: float) -> None:
        node = self.node(index)
        if node is not None:
            node.frozen_until = self.now + seconds

    def say_again(self) -> None:
        """The network delivers a report that it has delivered before, however old."""
        if self._history:
            index, report = self.chance.choice(self._history)
            self.apply(job_events.Reported(index, report))

    def _peers_fail(self, generation: Generation) -> None:
        """Workers in a collective with one that is gone raise an error soon, or wait in vain."""
        for node in self.living_nodes():
            for worker in node.live_workers():
                if worker.generation == generation and not worker.told and self.chance.random() < 0.8:
                    worker.ends_at, worker.code = self.now + self.chance.choice((0.0, 0.25, 1.0, 3.0)), 1
                elif worker.generation == generation and not worker.told:
                    worker.ends_at = 1e9

    # --- time --------------------------------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            self._tick()

    def calm(self) -> None:
        """From here on the network is perfect and nothing new goes wrong."""
        self.weather = Weather()
        for node in self.living_nodes():
            node.frozen_until = 0.0

    def run_to_the_end(self, seconds: float) -> Outcome | None:
        end = self.now + seconds
        while self.outcome is None and self.now < end:
            self.pass_time(TICK)
        return self.outcome

    def _tick(self) -> None:
        for index in [i for i, at in self._returns.items() if self.now >= at]:
            self.join(index)
        for due, event in [notice for notice in self._notices if self.now >= notice[0]]:
            self._notices.remove((due, event))
            self.apply(event)
        for node in self.living_nodes():
            node.advance(self.now)
            if node.left_in_order:
                self._notices.append((self.now + TICK, _ended(node)))
            report = node.report(self.now)
            if report is not None:
                self._send(node, report)
        self._deliver()
        self.apply(job_events.Ticked())
        self._spread()

    def _send(self, node: FakeNode, message: NodeReport | Wish) -> None:
        weather, chance = self.weather, self.chance
        if chance.random() < weather.lost:
            return
        for _ in range(2 if chance.random() < weather.doubled else 1):
            late = chance.choice((0.5, 1.0, 3.0)) if chance.random() < weather.late else 0.0
            self._flying.append(_InFlight(self.now + late, node, message))

    def _deliver(self) -> None:
        due = [flight for flight in self._flying if self.now >= flight.due]
        self._flying = [flight for flight in self._flying if self.now < flight.due]
        for flight in due:
            if isinstance(flight.message, Wish):
                flight.node.hear(flight.message, self.now)
            elif flight.message.incarnation in self.fenced:
                self._send(flight.node, Wish(self.state.generation, PlanPhase.LEAVE))
            else:
                self._history.append((flight.node.index, flight.message))
                self.apply(job_events.Reported(flight.node.index, flight.message))

    def _spread(self) -> None:
        for index, member in self.state.members.items():
            node = self._node_of(member)
            if node is None or not (member.alive or self.state.phase is Phase.LEAVING):
                continue
            wish, told = wishes.wish_for(self.state, index), self._told.get(member.incarnation)
            again = told is not None and self.now - told[1] > RESEND and not wishes.fulfilled(self.state, index)
            if told is None or told[0] != wish or again:
                self._told[member.incarnation] = (wish, self.now)
                self._send(node, wish)

    # --- the state machine -------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        before = self.state
        self.state, actions = membership.step(before, event, self.now)
        self.actions.extend(actions)
        for action in actions:
            match action:
                case job_events.Fence(_, incarnation):
                    self.fenced.add(incarnation)
                case job_events.Relaunch(index):
                    self._returns[index] = self.now + self.chance.choice((1.0, 4.0, 30.0))
                case job_events.Finished(outcome):
                    self.outcome = outcome
        self.check(before)

    def check(self, before: State) -> None:
        """Overridden by tests that hold something true at all times."""

    # --- what tests look at ------------------------------------------------------------------------------------------

    def living_nodes(self) -> list[FakeNode]:
        return [node for incarnations in self.nodes.values() for node in incarnations if node.alive]

    def _node_of(self, member: Member) -> FakeNode | None:
        return next((n for n in self.nodes[member.index] if n.incarnation == member.incarnation), None)

    def well_nodes(self) -> list[FakeNode]:
        """Those that live and that the supervisor holds for ready."""
        found = [self._node_of(member) for member in self.state.members.values() if member.usable]
        return [node for node in found if node is not None and node.alive]

    def alive_members(self) -> list[tuple[Member, FakeNode]]:
        """Members that the supervisor counts on, with the node that is behind each."""
        pairs = [(member, self._node_of(member)) for member in self.state.members.values() if member.alive]
        return [(member, node) for member, node in pairs if node is not None]


def _ended(node: FakeNode) -> job_events.AgentEnded:
    return job_events.AgentEnded(node.index, node.incarnation, "its agent ended")
