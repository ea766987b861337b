"""What people see of a job's status: pure functions from the document to lines of text."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from phoenix_launch.status import CopyStatus, JobState, JobStatus, NodeStatus, RankStatus
from phoenix_launch.wording import counted, rank_ranges, size_named

RANKS_SHOWN: Final = 32  # more ranks than this are summed up by node
NARROWEST: Final = 16  # columns that are left to a command, however long the name of its job is
_HALF_A_YEAR: Final = 182 * 86400.0


class JobLine(msgspec.Struct, frozen=True):
    """One row of `phoenix-run jobs`."""

    job: str
    state: str
    created: float
    exit_code: int | None
    nodes: int
    command: str


def status_text(status: JobStatus) -> str:
    """The job, its nodes, its ranks."""
    parts = [_headline(status)]
    if status.reason and not status.stopped_by:
        parts.append(status.reason)
    if status.state is JobState.ORPHANED and (status.nodes or status.ranks):
        parts.append(f"last seen{_clock(status.as_of)}:")
    if status.nodes:
        parts.append(_nodes(status))
    if status.ranks and len(status.ranks) <= RANKS_SHOWN:
        parts.append(_ranks(status.ranks))
    return "\n".join(parts)


def state_word(status: JobStatus) -> str:
    """For people: a job that was stopped did not fail."""
    return "stopped" if status.stopped_by else status.state.value


def jobs_text(lines: Sequence[JobLine], now: float, columns: int = 0) -> str:
    """In the order in which they come. `columns`: how wide the screen is; 0: nothing is cut."""
    if not lines:
        return "no jobs"
    rows = [
        (line.job, line.state, "" if line.exit_code is None else str(line.exit_code), str(line.nodes or ""),
         _day(line.created, now), line.command)
        for line in lines
    ]  # fmt: skip
    text = table(("JOB", "STATE", "EXIT", "NODES", "STARTED", "COMMAND"), rows)
    if not columns:
        return text
    width = max(columns, text.index("COMMAND") + NARROWEST)
    return "\n".join(line if len(line) <= width else line[: width - 3] + "..." for line in text.split("\n"))


def command_shown(script: str, args: Sequence[str], argv: Sequence[str]) -> str:
    """`train.py --lr 3  (--nodes 2)`: what was run and with which words; then the options, without the launcher's path."""
    options = list(argv[1:])
    if script and options[len(options) - 1 - len(args) :] == [script, *args]:
        options = options[: len(options) - 1 - len(args)]
        if options[-1:] == ["--"]:
            del options[-1]
    else:
        args = ()  # nothing is said twice
    if options[:1] == ["run"]:
        del options[0]
    started = " ".join([script.rpartition("/")[2], shlex.join(args)]).strip()
    text = f"{started}  ({shlex.join(options)})" if options and started else started or shlex.join(options)
    return text.replace("\n", " ")


def _day(at: float, now: float) -> str:
    """As `ls` has it: the time of day only where it still matters."""
    recent = 0 <= now - at < _HALF_A_YEAR
    return time.strftime("%b %d %H:%M" if recent else "%b %d  %Y", time.localtime(at))


def _clock(at: float | None) -> str:
    return "" if at is None else time.strftime(" %H:%M:%S", time.localtime(at))


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two blanks apart."""
    lines = [tuple(heading), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _headline(status: JobStatus) -> str:
    state = f"stopped by {status.stopped_by}" if status.stopped_by else status.state.value
    words = [f"job {status.job}", state, f"generation {status.generation}"]
    if status.step is not None:
        words.append(f"step {status.step}")
    if status.goodput is not None:
        words.append(f"goodput {status.goodput:.1%}")
    if status.redundancy:
        why = f" ({status.redundancy_reason})" if status.redundancy_reason else ""
        words.append(f"redundancy {status.redundancy}{why}")
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
        (str(rank.rank), rank.node, str(rank.pid or ""), _rank_state(rank), "" if rank.step is None else str(rank.step),
         *_copies(rank.copies))
        for rank in sorted(ranks, key=lambda rank: rank.rank)
    ]  # fmt: skip
    heading = ("RANK", "NODE", "PID", "STATE", "STEP", "STATE BYTES", "COPIED", "SENT", "HOLDERS")
    shown = 5 if any(rank.step is not None for rank in ranks) else 4  # the script does not report it
    if any(rank.copies is not None for rank in ranks):
        shown = len(heading)
    return table(heading[:shown], [row[:shown] for row in rows])


def _rank_state(rank: RankStatus) -> str:
    return rank.state if rank.slow is None else f"{rank.state}, slow {rank.slow:.1f}x"


def _copies(copies: CopyStatus | None) -> tuple[str, str, str, str]:
    if copies is None:
        return "", "", "", ""
    sizes = (copies.state_bytes, copies.copied_bytes, copies.sent_bytes)
    state, copied, sent = (size_named(size) for size in sizes)
    return state, copied, sent, counted(copies.holders, "node")
