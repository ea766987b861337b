"""Agents and workers of the swap model: the simplest that do what they are told and say what they are."""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

from phoenix_launch.copies import KeptSlot, Slot, Stamp
from phoenix_launch.messages import (
    ExitReport,
    NodeReport,
    PlanPhase,
    ProcessState,
    RankReport,
    RuntimeReport,
    StoreReport,
)
from phoenix_launch.wire import NO_GENERATION, Generation

RANKS: Final = 2
TERM: Final = 1000  # generations of one term; (1, n) is n
RUNS, LEFT, NEW, LOADED = "runs", "left", "new", "loaded"
OUTSIDE: Final = "outside"  # its notice found it in a collective outside of a step: it never leaves it
EARLY: Final = 1000  # in place of exit code 0, which stands for a process that lives


class Worker(NamedTuple):
    rank: int
    born: int
    joined: int
    mode: str
    stamp: tuple[int, int]  # generation that computed its state, version
    restored: int = 0
    code: int = 0  # of its end


class Told(NamedTuple):
    """A wish, as far as agents of this model look at it."""

    generation: int
    stage: int
    phase: PlanPhase
    ranks: tuple[int, ...] = ()
    born: tuple[tuple[int, int], ...] = ()
    stamp: tuple[int, int] | None = None
    store: bool = False


class Agent(NamedTuple):
    told: Told
    workers: tuple[Worker, ...] = ()
    slots: tuple[int, int] | None = None  # of every bundle, at this stamp
    quiesced: int = 0
    offered: int = 0
    applied: int = 0
    store: int = 0
    complete: int = -1
    alive: bool = True


@cache
def generation_of(number: int) -> Generation:
    return Generation(1 + number // TERM, number % TERM)


def number_of(generation: Generation) -> int:
    return (generation.term - 1) * TERM + generation.n


@cache
def report(node: int, agent: Agent) -> NodeReport:
    kept: tuple[KeptSlot, ...] = ()
    if agent.slots is not None:
        kept = tuple(KeptSlot(f"own{rank}", Slot(stamp_of(agent.slots))) for rank in range(RANKS))
    return NodeReport(
        f"i{node}", 1, True, 1, (1,), generation_of(agent.quiesced), generation_of(agent.applied),
        tuple(rank_report(worker, agent.complete) for worker in agent.workers),
        StoreReport(generation_of(agent.store), "here", 4000) if agent.store else None,
        offered=generation_of(agent.offered) if agent.offered else NO_GENERATION, kept=kept,
    )  # fmt: skip


def rank_report(worker: Worker, complete: int) -> RankReport:
    runtime = RuntimeReport(
        holds=(f"own{worker.rank}",),
        private=f"own{worker.rank}",
        complete=complete if worker.mode == RUNS else -1,
        joined=generation_of(worker.joined),
        live=stamp_of(worker.stamp) if worker.mode == LEFT else None,
        address=f"{worker.rank}.{worker.joined}",
        restored=generation_of(worker.restored) if worker.restored else NO_GENERATION,
        returns=1,
        outside="a collective outside of a step" if worker.mode == OUTSIDE else "",
    )
    ended = ExitReport(worker.code % EARLY if worker.code > 0 else worker.code, 0.0) if worker.code else None
    state = ProcessState.GONE if worker.code else ProcessState.RUNNING
    born = generation_of(worker.born)
    version = max(worker.stamp[1], 0)
    inside = version + 1 if worker.mode == RUNS and not worker.code else -1
    return RankReport(worker.rank, born, 1000 + worker.rank, state, version, ended, runtime, inside)


def stamp_of(stamp: tuple[int, int]) -> Stamp:
    return Stamp(generation_of(stamp[0]), stamp[1])


@cache
def take(agent: Agent, told: Told) -> Agent | None:
    """The node makes true what can be true at once; None: it does not take this wish (any more)."""
    if (told.generation, told.stage) <= (agent.told.generation, agent.told.stage):
        return None
    if told.phase is PlanPhase.LEAVE:
        return agent._replace(told=told, workers=(), slots=None, alive=False)
    g, born = told.generation, dict(told.born)
    agent = agent._replace(told=told, store=g if told.store and told.phase is PlanPhase.QUIESCE else agent.store)
    if told.phase in (PlanPhase.QUIESCE, PlanPhase.STOP):
        return quiet(agent._replace(workers=()), g)
    if told.phase is PlanPhase.PARK:
        return quiet(agent._replace(workers=(), applied=g), g)
    named = tuple(w for w in agent.workers if w.rank in told.ranks and w.born == born.get(w.rank, g))
    new = tuple(
        Worker(rank, g, g, NEW, told.stamp or (g, 0))
        for rank in told.ranks
        if rank not in born and not any(w.rank == rank for w in named)
    )
    agent = quiet(agent._replace(workers=tuple(sorted((*named, *new)))), g)
    if told.phase is PlanPhase.RUN:
        running = tuple(
            w._replace(mode=RUNS, restored=w.restored if w.rank in born else g) if w.joined == g else w
            for w in agent.workers
        )
        agent = agent._replace(workers=running, applied=g)
    return agent


def quiet(agent: Agent, generation: int) -> Agent:
    """What is not named has ended; slots stand still when the survivors here have left their step."""
    still = all(w.joined == generation or w.code for w in agent.workers)
    offered = generation if still else agent.offered
    return agent._replace(quiesced=generation, offered=offered)


def exchange(agent: Agent, worker: Worker) -> Agent:
    workers = tuple(worker if w.rank == worker.rank else w for w in agent.workers)
    return quiet(agent._replace(workers=workers), agent.quiesced) if agent.quiesced else agent._replace(workers=workers)
