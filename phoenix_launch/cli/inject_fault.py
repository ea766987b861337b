"""The inject-fault verb."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import click

from phoenix_launch.cli.asking import ask
from phoenix_launch.cli.command import Command, job_argument, nearest
from phoenix_launch.errors import EXIT_OK, UsageError
from phoenix_launch.records.folders import choose, jobs_root

if TYPE_CHECKING:
    from phoenix_launch.command_messages import DrillKind

KINDS: Final = ("kill-worker", "kill-node", "kill-agent")  # DrillKind's, named here so that the help loads no messages
_EXAMPLE: Final = "for example phoenix-run inject-fault {} {}"


def inject_fault(kind: str, job: str, rank: str | None, node: str, named: str, dry_run: bool) -> int:
    """Harm a running job on purpose: kill-worker, kill-node (a power loss) or kill-agent.

    The job must have been started with --allow-drills, except for --dry-run. Without JOB: the one that runs.
    """
    from phoenix_launch.command_messages import Answer, DrillKind, FaultRequest

    request = FaultRequest(_kind(kind), _rank(rank), node, dry_run)
    if (rank is None) == (not node):
        raise UsageError(f"{kind}: give one of --rank R and --node N", hint=_EXAMPLE.format(kind, _target(kind)))
    if node and request.kind is DrillKind.KILL_WORKER:
        raise UsageError(
            "kill-worker harms one rank, not a node",
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
    answer = ask(folder, "control", request)
    print(answer.text if isinstance(answer, Answer) and answer.text else f"{kind}: done")
    return EXIT_OK


def _kind(kind: str) -> DrillKind:
    from phoenix_launch.command_messages import DrillKind

    if kind not in KINDS:
        meant = nearest(kind, list(KINDS))
        hint = f"did you mean {meant}?" if meant else f"one of {', '.join(KINDS)}"
        raise UsageError(f"there is no fault {kind}", hint=hint)
    return DrillKind(kind)


def _target(kind: str) -> str:
    return "--rank 0" if kind == "kill-worker" else "--node 1"


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
        job_argument(),
        click.Option(["--rank"], metavar="R", help="The rank whose process (or whose node) is harmed."),
        click.Option(["--node"], metavar="N", default="", help="The node that is harmed: its index or its name."),
        click.Option(["named", "--job"], metavar="JOB", default="", help="The same as JOB after KIND."),
        click.Option(["--dry-run"], is_flag=True, help="Only say what would be harmed."),
    ],
)
