"""What people see of a job's status: pure functions from the document to lines of text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from phoenix_launch.status import JobStatus, NodeStatus, RankStatus

RANKS_SHOWN: Final = 32  # more ranks than this are summed up by node


@dataclass(frozen=True, slots=True)
class JobLine:
    """One row of `phoenix-run jobs`."""

    job: str
    state: str
    created: float
    exit_code: int | None
    nodes: int
    argv: tuple[str, ...]


def status_text(status: JobStatus) -> str:
    """The job, its nodes, its ranks."""
    parts = [_headline(status)]
    if status.reason:
        parts.append(status.reason)
    if status.nodes:
        parts.append(_nodes(status))
    if status.ranks and len(status.ranks) <= RANKS_SHOWN:
        parts.append(_ranks(status.ranks))
    return "\n".join(parts)


def jobs_text(lines: Sequence[JobLine]) -> str:
    """All jobs, oldest first."""
    if not lines:
        return "no jobs"
    rows = [
        (line.job, line.state, "" if line.exit_code is None else str(line.exit_code), str(line.nodes or ""),
         time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.created)), " ".join(line.argv)[:60])
        for line in lines
    ]  # fmt: skip
    return table(("JOB", "STATE", "EXIT", "NODES", "STARTED", "COMMAND"), rows)


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two blanks apart."""
    lines = [tuple(heading), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def rank_ranges(ranks: Iterable[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _headline(status: JobStatus) -> str:
    words = [f"job {status.job}", status.state.value, f"generation {status.generation}"]
    if status.step is not None:
        words.append(f"step {status.step}")
    if status.goodput is not None:
        words.append(f"goodput {status.goodput:.1%}")
    if status.redundancy:
        words.append(f"redundancy {status.redundancy}")
    if status.restarts:
        words.append(f"restarts {status.restarts}")
    if status.exit_code is not None:
        words.append(f"exit code {status.exit_code}")
    return ", ".join(words)


def _nodes(status: JobStatus) -> str:
    at: dict[str, list[RankStatus]] = {}
    for rank in status.ranks:
        at.setdefault(rank.node, []).append(rank)

    def row(node: NodeStatus) -> tuple[str, ...]:
        ranks = at.get(node.name, [])
        return (
            node.name,
            node.role,
            node.state,
            rank_ranges(rank.rank for rank in ranks),
            _states(ranks),
            str(node.spares),
        )

    return table(("NODE", "ROLE", "STATE", "RANKS", "PROCESSES", "SPARES"), map(row, status.nodes))


def _states(ranks: Sequence[RankStatus]) -> str:
    counted = Counter(rank.state for rank in ranks)
    return ", ".join(f"{count} {state}" for state, count in sorted(counted.items()))


def _ranks(ranks: Sequence[RankStatus]) -> str:
    rows = [
        (str(rank.rank), rank.node, str(rank.pid or ""), rank.state, "" if rank.step is None else str(rank.step))
        for rank in sorted(ranks, key=lambda rank: rank.rank)
    ]
    return table(("RANK", "NODE", "PID", "STATE", "STEP"), rows)
