"""The inject-fault verb."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import click

from phoenix_launch.cli.asking import ask
from phoenix_launch.cli.command import Command, nearest
from phoenix_launch.cli.fault_schedule import Times
from phoenix_launch.cli.fault_schedule import run as run_schedule
from phoenix_launch.errors import EXIT_OK, UsageError
from phoenix_launch.records.folders import choose, jobs_root

if TYPE_CHECKING:
    from phoenix_launch.command_messages import DrillKind

KINDS: Final = (  # DrillKind's, named here so that the help loads no messages
    "kill-worker", "kill-node", "kill-agent", "kill-server", "kill-supervisor", "fail-spare",
    "freeze", "hang", "hang-gil", "slow", "raise", "exit", "flip-bits",
    "oom", "fill-disk", "drop-bus", "delay-bus", "partition",
)  # fmt: skip
_EXAMPLE: Final = "for example phoenix-run inject-fault {} {}"
RANKS: Final = ("kill-worker", "hang", "hang-gil", "slow", "raise", "exit", "flip-bits", "oom")
VALUED: Final = {"slow": "4", "exit": "3", "delay-bus": "0.5"}  # kinds with a number, and an example of it


def inject_fault(
    kind: str,
    words: tuple[str, ...],
    rank: str | None,
    node: str,
    named: str,
    duration: str,
    dry_run: bool,
    every: str = "",
    count: str = "",
    mtbf: str = "",
    seed: str = "",
) -> int:
    """Harm a running job on purpose: kill, freeze, hang, slow ... a rank or a node.

    To a rank: kill-worker, freeze (SIGSTOP), hang, hang-gil (it keeps python's lock), slow FACTOR, raise, exit CODE,
    flip-bits (of a parameter in its memory: see --verify-replicas).
    oom: it allocates within a memory control group of its own until the kernel kills it (needs root; else refused).
    To a node: kill-node (a power loss), freeze, kill-agent, kill-server (its copies in memory), fail-spare,
    fill-disk (to its workers the folder of checkpoints is full; nothing is filled), drop-bus, delay-bus SECONDS (what
    its agent and the supervisor say to each other), partition (drop-bus, and no copies from and to other nodes).
    What is not over by itself lasts 10 s, or --duration.
    To the job: kill-supervisor.

    Again and again with --every or --mtbf, until the job ends: then without a target it is a random one.

    The job must have been started with --allow-drills, except for --dry-run. Without JOB: the one that runs.
    """
    from phoenix_launch.command_messages import Answer, FaultRequest

    found, number, job, times = _kind(kind), "", "", Times(every, count, mtbf, seed)
    times.check()
    if kind in VALUED and words:
        number, *words_left = words
        words = tuple(words_left)
    if len(words) > 1:
        raise UsageError(f"{words[1]}: one job at a time", hint=_EXAMPLE.format(kind, _target(kind)))
    job = words[0] if words else ""
    request = FaultRequest(found, _rank(rank), node, dry_run, _value(kind, number), _seconds(duration))
    if kind == "kill-supervisor":
        if rank is not None or node:
            raise UsageError("kill-supervisor harms no rank and no node", hint="leave --rank and --node out")
    elif (rank is None) == (not node) and not (times.given and rank is None):
        raise UsageError(f"{kind}: give one of --rank R and --node N", hint=_EXAMPLE.format(kind, _target(kind)))
    elif node and kind in RANKS:
        raise UsageError(
            f"{kind} harms one rank, not a node",
            hint=f"say which with --rank R, or harm all of {node}: phoenix-run inject-fault kill-node --node {node}",
        )
    if job and named and job != named:
        raise UsageError(f"two jobs are named, {job} and {named}", hint="a fault harms one: leave one of them out")
    folder = choose(jobs_root(os.environ), job or named)
    if not folder.is_running():
        raise UsageError(
            f"job {folder.job} does not run: there is nothing to harm",
            hint="start one with `phoenix-run --allow-drills SCRIPT`",
        )
    if times.given:
        return run_schedule(folder, request, times)
    answer = ask(folder, "control", request)
    print(answer.text if isinstance(answer, Answer) and answer.text else f"{kind}: done")
    return EXIT_OK


def _value(kind: str, text: str) -> float:
    from phoenix_launch.job.drills import parse_kind, read_value

    return read_value(parse_kind(kind), text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"--duration {text!r}: must be seconds, 0 or more", hint="for example --duration 5")
    return seconds


def _kind(kind: str) -> DrillKind:
    from phoenix_launch.command_messages import DrillKind

    if kind not in KINDS:
        meant = nearest(kind, list(KINDS))
        hint = f"did you mean {meant}?" if meant else f"one of {', '.join(KINDS)}"
        raise UsageError(f"there is no fault {kind}", hint=hint)
    return DrillKind(kind)


def _target(kind: str) -> str:
    return f"{VALUED.get(kind, '')} {'--rank 0' if kind in RANKS else '--node 1'}".strip()


def _rank(rank: str | None) -> int:
    if rank is None:
        return -1
    if not rank.isdecimal():
        raise UsageError(f"--rank {rank!r}: must be a whole number from 0", hint="`phoenix-run status` lists the ranks")
    return int(rank)


command = Command(
    "inject-fault",
    inject_fault,
    [
        click.Argument(["kind"]),
        click.Argument(["words"], nargs=-1, metavar="[NUMBER] [JOB]"),
        click.Option(["--rank"], metavar="R", help="The rank whose process (or whose node) is harmed."),
        click.Option(["--node"], metavar="N", default="", help="The node that is harmed: its index or its name."),
        click.Option(["named", "--job"], metavar="JOB", default="", help="The same as JOB after KIND."),
        click.Option(
            ["--duration"],
            metavar="T",
            default="",
            help="Seconds until it is over (a freeze, a hang, a partition ...).",
        ),
        click.Option(["--every"], metavar="T", default="", help="Again every T seconds, until the job ends."),
        click.Option(["--count"], metavar="N", default="", help="So many times at most, with --every or --mtbf."),
        click.Option(["--mtbf"], metavar="T", default="", help="At random times, T seconds apart on average."),
        click.Option(["--seed"], metavar="S", default="", help="Of random times and targets. [0]"),
        click.Option(["--dry-run"], is_flag=True, help="Only say what would be harmed."),
    ],
)
