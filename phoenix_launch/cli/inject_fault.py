"""The inject-fault verb."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import click

from phoenix_launch.cli.asking import ask
from phoenix_launch.cli.command import Command, nearest
from phoenix_launch.errors import EXIT_OK, UsageError
from phoenix_launch.records.folders import choose, jobs_root

if TYPE_CHECKING:
    from phoenix_launch.messages import DrillKind

KINDS: Final = ("kill-worker", "kill-node", "kill-agent")  # DrillKind's, named here so that the help loads no messages


def inject_fault(kind: str, rank: str | None, node: str, job: str, dry_run: bool) -> int:
    """Harm a running job on purpose: kill-worker, kill-node (a power loss) or kill-agent.

    The job must have been started with --allow-drills, except for --dry-run.
    """
    from phoenix_launch.messages import Answer, DrillKind, FaultRequest

    request = FaultRequest(_kind(kind), _rank(rank), node, dry_run)
    if (rank is None) == (not node):
        raise UsageError(f"{kind}: say which rank or which node", hint="give one of --rank R and --node N")
    if node and request.kind is DrillKind.KILL_WORKER:
        raise UsageError("kill-worker harms one rank, not a node", hint="give --rank R")
    folder = choose(jobs_root(os.environ), job)
    if not folder.is_running():
        raise UsageError(f"job {folder.job} does not run", hint="see `phoenix-run jobs`")
    answer = ask(folder, "control", request)
    print(answer.text if isinstance(answer, Answer) and answer.text else f"{kind}: done")
    return EXIT_OK


def _kind(kind: str) -> DrillKind:
    from phoenix_launch.messages import DrillKind

    if kind not in KINDS:
        meant = nearest(kind, list(KINDS))
        hint = f"did you mean {meant}?" if meant else f"one of {', '.join(KINDS)}"
        raise UsageError(f"there is no fault {kind}", hint=hint)
    return DrillKind(kind)


def _rank(rank: str | None) -> int:
    if rank is None:
        return -1
    if not rank.isdecimal():
        raise UsageError(f"--rank {rank!r}: must be a whole number from 0", hint="ranks as in `phoenix-run status`")
    return int(rank)


command = Command(
    "inject-fault",
    inject_fault,
    [
        click.Argument(["kind"]),
        click.Option(["--rank"], metavar="R", help="The rank whose process (or whose node) is harmed."),
        click.Option(["--node"], metavar="N", default="", help="The node that is harmed: its index or its name."),
        click.Option(["--job"], metavar="JOB", default="", help="Which job, when several run."),
        click.Option(["--dry-run"], is_flag=True, help="Only say what would be harmed."),
    ],
)
