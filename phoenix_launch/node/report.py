"""Puts what is known of a node into its report, and says whether a report is news. No I/O but the progress pages."""

from __future__ import annotations

import msgspec

from phoenix_launch.copies import KeptSlot, SlotPeer
from phoenix_launch.local_messages import SlotsKept
from phoenix_launch.messages import (
    ExitReport,
    NodePlan,
    NodeReport,
    PlanPhase,
    Published,
    RankReport,
    RuntimeReport,
)
from phoenix_launch.node.actions import Member
from phoenix_launch.node.process import NodeProcess
from phoenix_launch.node.state import NodeState
from phoenix_launch.wire import NO_GENERATION, Generation


def rank_report(member: Member, process: NodeProcess, said: RuntimeReport | None, now: float) -> RankReport:
    ended = None
    if member.code is not None:
        age = now - member.ended_at
        ended = ExitReport(member.code, age, process.error, process.tail, process.oom_killed)
    rank = member.order.rank if member.order is not None else -1
    runtime = msgspec.structs.replace(said, complete=process.complete()) if said is not None else None
    step, inside = process.step(), process.inside()
    copies = process.copies() if runtime is not None and runtime.holds else None
    still = process.standstill(now) if member.code is None else None
    pace = process.pace() if runtime is not None and member.code is None else None
    return RankReport(
        rank, member.generation, member.pid, member.state, step, ended, runtime, inside, copies, still, pace
    )


def offer(plan: NodePlan | None, kept: SlotsKept | None) -> tuple[Generation, tuple[KeptSlot, ...]]:
    """What the node offers, and to which generation; what it keeps is only of interest while one is made.

    `kept` is None where there is no checkpoint server: nobody writes to slots that there are not.
    """
    if plan is None:
        return NO_GENERATION, ()
    if kept is None:
        return plan.generation, ()
    asked = plan.phase in (PlanPhase.SWAP, PlanPhase.QUIESCE) and kept.generation == plan.generation
    return kept.generation, kept.kept if asked else ()


def node_report(
    incarnation: str,
    seq: int,
    state: NodeState,
    ranks: tuple[RankReport, ...],
    kept: SlotsKept | None,
    slots: SlotPeer | None,
    published: Published | None = None,
) -> NodeReport:
    parked = state.parked_pids()
    offered, offer_of = offer(state.plan, kept)
    return NodeReport(
        incarnation=incarnation,
        seq=seq,
        prepared=state.prepared,
        parked=len(parked),
        parked_pids=parked,
        quiesced=state.quiesced,
        applied=state.applied,
        ranks=ranks,
        store=state.store,
        complaint=state.complaint,
        offered=offered,
        kept=offer_of,
        slots=slots,
        sent=kept.sent if kept is not None else 0,
        published=published,
    )


def is_news(report: NodeReport, last: NodeReport | None) -> bool:
    """Whether it says something that cannot wait for the next heartbeat: anything but steps, ages, and what is complete.

    What is kept changes with every copy; as an offer it comes together with the generation that it is made to.
    """
    return last is None or _news(report) != _news(last)


def _news(report: NodeReport) -> tuple[object, ...]:
    state = (report.prepared, report.parked_pids, report.quiesced, report.applied, report.store, report.complaint)
    slots = (report.offered, report.slots, report.published)
    ranks = tuple((r.rank, r.generation, r.pid, r.state, _runtime_news(r.runtime)) for r in report.ranks)
    exits = tuple((r.exit.code, r.exit.error, r.exit.tail, r.exit.oom_killed) for r in report.ranks if r.exit)
    return (*state, *slots, ranks, exits)


def _runtime_news(runtime: RuntimeReport | None) -> RuntimeReport | None:
    return msgspec.structs.replace(runtime, complete=-1) if runtime is not None else None
