"""Decides what an agent does: its processes and the newest wish of the supervisor in, actions out; no I/O, no clock.

The agent tells this state what happened (the `on_...` methods) and then asks `decide` what is to be done. Nothing is
decided twice: what `decide` returned counts as begun. `now` is the agent's own clock in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from phoenix_launch.bootstrap import Command, RunMode, StartMethod
from phoenix_launch.messages import NodePlan, PlanPhase, Prepare, RankOrder, StoreReport
from phoenix_launch.node.actions import (
    Action,
    EndTree,
    Forking,
    HostStore,
    Leave,
    Member,
    ParkProcess,
    PassSignal,
    Role,
    RunWorker,
    StartForkServer,
    StartStoreHost,
    Sweep,
)
from phoenix_launch.node.plan_terms import ends_at_once, goes_on, keeps_store, place_in_time, to_start
from phoenix_launch.wire import NO_GENERATION, Generation

FORK_SERVER_RESTARTS: Final = 3  # within ...
PARK_FAILURES: Final = 10  # ... and this many parked processes may end by themselves within ...
FAILURE_WINDOW: Final = 60.0  # ... so many seconds; more is a complaint
STORE_REFILL_SECONDS: Final = 10.0  # loading torch for the next store host would only slow down workers that start
PARK_RETRY_SECONDS: Final = 0.2  # between two attempts to park a process when the last one ended by itself


class NodeState:
    """See the module. Public attributes are there to be read for reports."""

    def __init__(self, command: Command) -> None:
        spawns = command.start_method is StartMethod.SPAWN or command.mode in (RunMode.EXEC, RunMode.RUN_PATH)
        self._spawns = spawns
        self.forking = Forking.UNPREPARED
        self.members: dict[int, Member] = {}
        self.prepare: Prepare | None = None
        self.plan: NodePlan | None = None
        self.quiesced = NO_GENERATION
        self.applied = NO_GENERATION
        self.store: StoreReport | None = None
        self.complaint = ""
        self._next_key = 1
        self._begun: set[tuple[Generation, int]] = set()  # (generation, rank) of every worker ever begun
        self._store_begun: set[Generation] = set()
        self._unswept = False  # a worker ran since the last sweep
        self._sweeping = False
        self._leaving = False
        self._restarts: deque[float] = deque()
        self._park_failures: deque[float] = deque()
        self._park_after = float("-inf")
        self._store_host_after = float("-inf")

    # --- what happened -----------------------------------------------------------------------------------------------

    def on_prepare(self, prepare: Prepare) -> None:
        """The first one counts; later ones are repetitions and change the number of parked processes at most."""
        if self.prepare is None:
            self.prepare = prepare
        elif prepare.parked != self.prepare.parked:
            self.prepare = Prepare(self.prepare.environment, prepare.parked)

    def on_plan(self, plan: NodePlan, now: float) -> bool:
        """False when it is older than what is known, and ignored."""
        old = self.plan
        if old is not None and place_in_time(plan) < place_in_time(old):
            return False
        self.plan = plan
        for member in self._to_end(plan):
            kill_at = now if ends_at_once(plan) else now + plan.grace
            member.kill_at = kill_at if member.kill_at is None else min(member.kill_at, kill_at)
        for member in self.workers():
            if member.order is not None and (member.order.rank, member.generation) in plan.condemned:
                member.kill_at = now
        return True

    def on_fork_server_up(self, fork_unsafe: str) -> None:
        self.forking = Forking.SPAWN if fork_unsafe else Forking.UP

    def on_fork_server_gone(self, reason: str, now: float) -> None:
        """It ended by itself; processes that it has forked go on."""
        if self.forking is Forking.SPAWN:
            return
        self._park_failures.clear()  # they died of the same cause
        _forget_before(self._restarts, now - FAILURE_WINDOW)
        if len(self._restarts) > FORK_SERVER_RESTARTS:
            self.forking = Forking.DOWN
            self.complaint = f"the fork server ended {len(self._restarts)} times within a minute: {reason}"
        else:
            self.forking = Forking.UNPREPARED

    def on_parked(self, key: int, pid: int) -> None:
        member = self.members[key]
        member.pid = pid
        if member.role is Role.PARKING:
            member.role = Role.PARKED

    def on_exit(self, key: int, code: int, now: float) -> None:
        member = self.members.get(key)
        if member is None or not member.alive:  # one that would not die was given up before
            return
        member.code, member.ended_at = code, now
        if member.role in (Role.PARKING, Role.PARKED) and not member.killed:
            self._park_failed(code, now)
        if member.role is Role.STORE and not member.killed:
            self._store_failed(member.generation, f"the store host ended with exit code {code}")

    def _park_failed(self, code: int, now: float) -> None:
        _forget_before(self._park_failures, now - FAILURE_WINDOW)
        self._park_failures.append(now)
        self._park_after = now + PARK_RETRY_SECONDS
        if len(self._park_failures) > PARK_FAILURES and self.forking in (Forking.UP, Forking.SPAWN):
            self.complaint = (
                f"{len(self._park_failures)} waiting processes ended by themselves within a minute, "
                f"the last one with exit code {code}"
            )

    def _store_failed(self, generation: Generation, error: str) -> None:
        if self.store is None or self.store.generation < generation:
            self.store = StoreReport(generation, "", 0, error)
        elif self.store.generation == generation and not self.store.error:
            self.store = StoreReport(generation, self.store.address, self.store.port, error)

    def on_started(self, key: int, pid: int) -> None:
        """A process that was started afresh has this pid."""
        self.on_parked(key, pid)

    def on_cleared(self, key: int) -> None:
        """Nothing of its tree is left (or what is left will not die)."""
        member = self.members[key]
        member.cleared = True
        if member.role is not Role.WORKER:
            del self.members[key]

    def on_swept(self) -> None:
        self._sweeping = False

    def on_store_up(self, key: int, report: StoreReport) -> None:
        member = self.members.get(key)
        newer = self.store is not None and self.store.generation > report.generation
        if member is not None and not member.killed and not newer:
            self.store = report

    # --- what to do --------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Action]:
        if self._leaving:
            return []
        if self.plan is not None and self.plan.phase is PlanPhase.LEAVE:
            self._leaving = True
            return [Leave()]
        actions = [*self._prepare(now), *self._end(now)]
        self._quiesce()
        if self.prepare is not None and self.plan is not None:
            actions += self._start(self.plan, now)
        actions += self._refill(now)
        self._settle()
        return actions

    def next_deadline(self) -> float | None:
        """The moment at which `decide` will have something new to say by itself."""
        times = [m.kill_at for m in self.members.values() if m.kill_at is not None and m.alive and not m.killed]
        if self._missing() > 0 and self._park_failures:
            times.append(self._park_after)
        if self._lacks_store_host():
            times.append(max(self._park_after, self._store_host_after))
        return min(times, default=None)

    def _prepare(self, now: float) -> Iterator[Action]:
        if self.prepare is None or self.forking is not Forking.UNPREPARED:
            return
        if self._spawns:
            self.forking = Forking.SPAWN
            return
        self.forking = Forking.STARTING
        self._restarts.append(now)
        yield StartForkServer()

    def _end(self, now: float) -> Iterator[Action]:
        plan = self.plan
        if plan is not None and not ends_at_once(plan):
            for member in self._to_end(plan):
                if plan.signal not in member.told and not member.killed:
                    member.told.add(plan.signal)
                    yield PassSignal(member.key, plan.signal)
        for member in self.members.values():
            late = member.alive and member.kill_at is not None and now >= member.kill_at
            outdated = member.role is Role.STORE and plan is not None and self._is_outdated(member, plan)
            if (late or outdated or not member.alive) and not member.killed:
                member.killed = True
                yield EndTree(member.key)
        lives = any(member.role is Role.WORKER and not member.cleared for member in self.members.values())
        if self._unswept and not lives:
            self._unswept, self._sweeping = False, True
            yield Sweep()

    def _to_end(self, plan: NodePlan) -> list[Member]:
        """Workers that this plan wants gone: those of older generations that it does not name, and all there are in STOP."""
        stop = plan.phase is PlanPhase.STOP
        return [
            member
            for member in self.members.values()
            if member.role is Role.WORKER and member.alive and (stop or not goes_on(plan, member))
        ]

    def _is_outdated(self, store: Member, plan: NodePlan) -> bool:
        if plan.host_store and keeps_store(plan) and plan.generation not in self._store_begun:
            return False
        return store.generation < plan.generation and plan.phase in (PlanPhase.RUN, PlanPhase.PARK)

    def _lacks_store(self, plan: NodePlan) -> bool:
        new = plan.host_store and plan.generation not in self._store_begun
        return new and plan.phase is not PlanPhase.STOP and not keeps_store(plan)

    def _start(self, plan: NodePlan, now: float) -> Iterator[Action]:
        if self._lacks_store(plan):
            self._store_host_after = now
            host = self._parked(store=True)
            if host is not None:
                self._store_begun.add(plan.generation)
                host.role, host.generation = Role.STORE, plan.generation
                self._store_host_after = now + STORE_REFILL_SECONDS
                yield HostStore(host.key, plan.generation, plan.store_port)
        for order in self._waiting(plan):
            if self.quiesced < plan.generation or not self._is_quiet(plan):
                return
            afresh = self.forking is Forking.SPAWN
            member = self._new(Role.WORKER) if afresh else self._parked(store=False)
            if member is None:
                return
            member.role, member.generation = Role.WORKER, plan.generation
            member.order, member.attempt, member.alone = order, plan.attempt, plan.phase is PlanPhase.SWAP
            self._begun.add((plan.generation, order.rank))
            self._unswept = True
            yield RunWorker(member.key, order, plan.generation, plan.attempt, afresh)

    def _waiting(self, plan: NodePlan) -> list[RankOrder]:
        return [order for order in to_start(plan) if (plan.generation, order.rank) not in self._begun]

    def _parked(self, store: bool) -> Member | None:
        """A process to become a worker or a store host; one that can only be a store is no worker."""
        ready = [m for m in self.members.values() if m.role is Role.PARKED and m.alive and not m.killed]
        fitting = [m for m in ready if store or not m.store_only]
        return min(fitting, key=lambda member: not member.store_only, default=None)

    def _missing(self) -> int:
        """How many more processes are to be forked now."""
        plan = self.plan
        if self.prepare is None or self.forking is not Forking.UP or (plan and plan.phase is PlanPhase.STOP):
            return 0
        wanted = self.prepare.parked
        if plan is not None:
            wanted += len(self._waiting(plan)) + self._lacks_store(plan)
        there = sum(
            m.role in (Role.PARKING, Role.PARKED) and m.alive and not m.store_only for m in self.members.values()
        )
        return wanted - there

    def _refill(self, now: float) -> Iterator[Action]:
        if now >= self._park_after and not self.complaint:
            for _ in range(self._missing()):
                yield ParkProcess(self._new(Role.PARKING).key)
        if self._lacks_store_host() and now >= max(self._park_after, self._store_host_after):
            host = self._new(Role.PARKING)
            host.store_only = True
            yield StartStoreHost(host.key)

    def _lacks_store_host(self) -> bool:
        stopping = self.plan is not None and self.plan.phase is PlanPhase.STOP
        ready = any(m.store_only and m.role is not Role.STORE and m.alive for m in self.members.values())
        return self.forking is Forking.SPAWN and not stopping and not ready and not self.complaint

    def _quiesce(self) -> None:
        """Note when nothing is left of the workers that the plan does not name, and nothing that is nobody's."""
        plan = self.plan
        if plan is None or self._sweeping or self.quiesced >= plan.generation:
            return
        if self._is_quiet(plan):
            self.quiesced = plan.generation

    def _is_quiet(self, plan: NodePlan) -> bool:
        return all(member.cleared for member in self.workers() if not goes_on(plan, member))

    def _settle(self) -> None:
        """Note what has come true of the plan; what was reported of older generations is history then."""
        plan = self.plan
        if plan is None or self.quiesced < plan.generation:
            return
        if plan.phase is PlanPhase.PARK or (plan.phase is PlanPhase.RUN and not self._waiting(plan)):
            self.applied = plan.generation
            for member in self.workers():
                if member.cleared and not goes_on(plan, member):
                    del self.members[member.key]

    def _new(self, role: Role) -> Member:
        member = Member(self._next_key, role)
        self.members[member.key] = member
        self._next_key += 1
        return member

    # --- for reports -------------------------------------------------------------------------------------------------

    @property
    def prepared(self) -> bool:
        return self.forking in (Forking.UP, Forking.SPAWN)

    @property
    def parking(self) -> bool:
        """Whether a process may exist that has not said its name yet."""
        return any(m.role is Role.PARKING and m.alive and not m.store_only for m in self.members.values())

    def parked_pids(self) -> tuple[int, ...]:
        return tuple(m.pid for m in self.members.values() if m.role is Role.PARKED and m.alive and not m.store_only)

    def workers(self) -> list[Member]:
        return [member for member in self.members.values() if member.role is Role.WORKER]


def _forget_before(moments: deque[float], limit: float) -> None:
    while moments and moments[0] < limit:
        moments.popleft()
