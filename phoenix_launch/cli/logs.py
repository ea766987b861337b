"""The logs verb."""

from __future__ import annotations

import heapq
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from phoenix_launch.cli.command import Command, job_argument
from phoenix_launch.errors import EXIT_OK, PhoenixError, UsageError
from phoenix_launch.records.folders import JobFolder, JobNode, JobRecord, choose, is_here, jobs_root, wait_for_end
from phoenix_launch.records.log_reader import POLL_SECONDS, STDERR, LogName, log_names
from phoenix_launch.status import NodeStatus
from phoenix_launch.timeouts import timeout
from phoenix_launch.wording import rank_ranges

if TYPE_CHECKING:
    from phoenix_launch.cli.log_sources import Source

MOST_HOSTS: Final = 64  # that are asked at the same time


@dataclass(frozen=True, slots=True)
class Printer:
    """Puts lines where they were written to, stdout or stderr, labelled when there are several writers."""

    labels: bool

    def put(self, node: JobNode, name: LogName, line: bytes) -> None:
        label = f"{node.name}:{name.label}| ".encode() if self.labels else b""
        (sys.stderr if name.stream == STDERR else sys.stdout).buffer.write(label + line)

    def flush(self) -> None:
        sys.stdout.buffer.flush()
        sys.stderr.buffer.flush()


def logs(job: str, rank: str, node: str, follow: bool) -> int:
    """Show what the workers of a job wrote.

    Generation after generation, each process's stdout before its stderr; --follow shows new lines until the job ends.
    """
    from phoenix_launch.cli.log_sources import LocalLogs, RemoteLogs  # subprocess would slow down `--help`

    folder = choose(jobs_root(os.environ), job)
    record = folder.read_record()
    if rank and not rank.isdecimal():
        raise UsageError(f"--rank {rank!r}: must be a whole number from 0", hint="`phoenix-run status` lists the ranks")
    nodes = _nodes(folder, record, node)
    printer = Printer(labels=not rank and (_several(record) or len(nodes) > 1))
    following = follow and folder.is_running()
    if rank:
        _check_rank(folder, record, nodes, int(rank), may_come=following)
    ssh = str(record.settings.get("ssh", "ssh"))
    wanted = str(int(rank)) if rank else ""
    sources: list[Source] = []
    try:
        for known in nodes:
            local = not known.host
            sources.append(LocalLogs(known, wanted) if local else RemoteLogs(known, wanted, ssh, follow=following))
        _follow(sources, record, printer) if following else _once(sources, printer)
    finally:
        failed = [source.node.name for source in sources if not source.close()]
    if failed:
        raise PhoenixError(f"the logs of {', '.join(failed)} could not be read", hint="ssh says why above")
    return EXIT_OK


def _nodes(folder: JobFolder, record: JobRecord, node: str) -> list[JobNode]:
    known = [*record.nodes, *_joined(folder, record)]
    nodes = [each for each in known if node in ("", each.name, str(each.index))]
    if not nodes:
        elsewhere = [each.name for each in _status_nodes(folder) if node in (each.name, str(each.index))]
        if elsewhere:
            raise UsageError(
                f"the logs of {elsewhere[0]} are on that host, which joined by itself",
                hint=f"look there into the same user's {jobs_root({'HOME': '~'})}/{record.job}/logs",
            )
        names = ", ".join(each.name for each in known)
        raise UsageError(f"job {record.job} has no node {node}", hint=f"its nodes: {names}")
    kept = [known for known in nodes if known.log_folder]
    if not kept:
        raise PhoenixError(f"job {record.job} keeps no log files", hint="it was started with --log-dir /dev/null")
    if sum(bool(known.host) for known in kept) > MOST_HOSTS:
        raise UsageError(f"the logs of {len(kept)} hosts are too many at once", hint="say which one: --node N")
    return kept


def _joined(folder: JobFolder, record: JobRecord) -> list[JobNode]:
    """Hosts that joined by themselves, where their logs can be seen from here (a shared home, the same machine)."""
    recorded = {known.name for known in record.nodes}
    places = [(each, folder.logs_path / each.name) for each in _status_nodes(folder) if each.name not in recorded]
    return [JobNode(each.name, each.index, "", "", str(place)) for each, place in places if place.is_dir()]


def _status_nodes(folder: JobFolder) -> tuple[NodeStatus, ...]:
    status = folder.read_status()
    return status.nodes if status else ()


def _check_rank(folder: JobFolder, record: JobRecord, nodes: list[JobNode], rank: int, *, may_come: bool) -> None:
    """Raises UsageError for a rank that the job never had, and, unless it may come, that nobody has had yet."""
    status = folder.read_status()
    known = {each.rank for each in status.ranks} if status else set()
    low, high = record.settings.get("nnodes", (1, 1))
    if rank in known or (may_come and (not known or low != high)):
        return
    from phoenix_launch.records.journal import WorkerStarted, read_events  # would slow down `--help`

    known |= {event.rank for event in read_events(folder.journal_path) if isinstance(event, WorkerStarted)}
    unknown = not known and any(node.host for node in nodes)
    if rank in known or unknown or any(log_names(Path(node.log_folder), str(rank)) for node in nodes if not node.host):
        return
    hint = f"its ranks: {rank_ranges(known)}" if known else "none of its workers has started: see `phoenix-run status`"
    raise UsageError(f"job {record.job} has no rank {rank}", hint=hint)


def _several(record: JobRecord) -> bool:
    """Whether more than one process of the job writes."""
    return len(record.nodes) > 1 or str(record.settings.get("nproc_per_node", "1")) != "1"


def _once(sources: Sequence[Source], printer: Printer) -> None:
    def lines(source: Source) -> Iterator[tuple[JobNode, LogName, bytes]]:
        return ((source.node, name, line) for name, line in source.once())

    for node, name, line in heapq.merge(*map(lines, sources), key=lambda entry: entry[1].order):
        printer.put(node, name, line)
    printer.flush()


def _follow(sources: Sequence[Source], record: JobRecord, printer: Printer) -> None:
    interval = POLL_SECONDS if is_here(record) else timeout("probe")
    ended = False
    while not ended:
        ended = wait_for_end(record, interval)
        for source in sources:
            for name, line in source.finish() if ended else source.poll():
                printer.put(source.node, name, line)
        printer.flush()


command = Command(
    "logs",
    logs,
    [
        job_argument(),
        click.Option(["--rank"], metavar="R", default="", help="Only this rank, wherever it ran."),
        click.Option(["--node"], metavar="N", default="", help="Only this node: its index or its name."),
        click.Option(["--follow"], is_flag=True, help="Show new lines until the job ends."),
    ],
)
