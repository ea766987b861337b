"""Puts what is known of a node into its report, and says whether a report is news. No I/O but the progress pages."""

from __future__ import annotations

from phoenix_launch.messages import ExitReport, NodeReport, RankReport
from phoenix_launch.node.actions import Member
from phoenix_launch.node.process import NodeProcess
from phoenix_launch.node.state import NodeState


def rank_report(member: Member, process: NodeProcess, now: float) -> RankReport:
    ended = None
    if member.code is not None:
        age = now - member.ended_at
        ended = ExitReport(member.code, age, process.error, process.tail, process.oom_killed)
    rank = member.order.rank if member.order is not None else -1
    return RankReport(rank, member.generation, member.pid, member.state, process.step(), ended)


def node_report(incarnation: str, seq: int, state: NodeState, ranks: tuple[RankReport, ...]) -> NodeReport:
    parked = state.parked_pids()
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
    )


def is_news(report: NodeReport, last: NodeReport | None) -> bool:
    """Whether it says something that cannot wait for the next heartbeat: anything but steps and ages."""
    return last is None or _news(report) != _news(last)


def _news(report: NodeReport) -> tuple[object, ...]:
    state = (report.prepared, report.parked_pids, report.quiesced, report.applied, report.store, report.complaint)
    ranks = tuple((r.rank, r.generation, r.pid, r.state) for r in report.ranks)
    exits = tuple((r.exit.code, r.exit.error, r.exit.tail, r.exit.oom_killed) for r in report.ranks if r.exit)
    return (*state, ranks, exits)
