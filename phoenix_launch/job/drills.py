"""Planned faults: what `--drill` says, and whom a drill hits. Pure."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phoenix_launch.command_messages import DrillKind
from phoenix_launch.errors import UsageError
from phoenix_launch.job.state import State
from phoenix_launch.wording import ranks_named

_HINT = 'for example --drill "kill-node --node 1 --after 20"'


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPlan:
    """One fault to come. `after`: seconds from the moment the workers first run."""

    kind: DrillKind
    rank: int = -1
    node: str = ""
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """Whom a drill hits. `rank` is -1 when it is the node."""

    node: int
    rank: int
    text: str


def parse_kind(word: str) -> DrillKind:
    kinds = {kind.value: kind for kind in DrillKind}
    if word not in kinds:
        near = difflib.get_close_matches(word, kinds, n=1)
        raise UsageError(
            f"no such drill: {word}", hint=f"did you mean {near[0]}?" if near else f"there are: {', '.join(kinds)}"
        )
    return kinds[word]


def parse_plan(text: str) -> DrillPlan:
    """Read `KIND [--node N | --rank R] [--after SECONDS]`. Raises UsageError with an example."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"cannot read the drill {text!r}: {error}", hint=_HINT) from None
    if not words:
        raise UsageError("an empty --drill", hint=_HINT)
    kind = parse_kind(words[0])
    given = dict(zip(words[1::2], words[2::2], strict=False))
    unknown = [name for name in words[1::2] if name not in ("--node", "--rank", "--after")]
    if unknown or len(words) % 2 == 0:
        raise UsageError(f"cannot read the drill {text!r}", hint=_HINT)
    try:
        rank, after = int(given.get("--rank", "-1")), float(given.get("--after", "0"))
    except ValueError:
        raise UsageError(f"--rank and --after of the drill {text!r} must be numbers", hint=_HINT) from None
    node = given.get("--node", "")
    if not 0 <= after < float("inf") or ("--rank" in given and rank < 0):
        raise UsageError(f"--rank and --after of the drill {text!r} must not be negative", hint=_HINT)
    check_aim(kind, rank, node)
    return DrillPlan(kind=kind, rank=rank, node=node, after=after)


def check_targets(plans: Iterable[DrillPlan], nodes: Sequence[str], ranks: int) -> None:
    """Raises UsageError for a drill that could never hit: `nodes` are the names by index, `ranks` how many, if known."""
    for plan in plans:
        known = not plan.node or plan.node in nodes or (plan.node.isdecimal() and int(plan.node) < len(nodes))
        if not known:
            raise UsageError(
                f"--drill {plan.kind.value}: there is no node {plan.node}", hint=f"nodes: {', '.join(nodes)}"
            )
        if ranks and plan.rank >= ranks:
            raise UsageError(
                f"--drill {plan.kind.value}: there is no rank {plan.rank}", hint=f"ranks: 0 to {ranks - 1}"
            )


def check_aim(kind: DrillKind, rank: int, node: str) -> None:
    """A worker is named by its rank; a node by itself or by one of its ranks. Raises UsageError."""
    if kind is DrillKind.KILL_WORKER and rank < 0:
        raise UsageError("kill-worker needs a rank", hint="give --rank R")
    if (rank < 0) == (not node):
        raise UsageError(f"{kind.value} needs one target", hint="give either --node N or --rank R")


def find_target(state: State, kind: DrillKind, rank: int, node: str) -> Target:
    """Whom the drill hits now. Raises UsageError when there is no such rank or node, or nothing of it lives."""
    check_aim(kind, rank, node)
    if rank >= 0:
        place = next((p for p in state.places if p.rank == rank), None)
        if place is None:
            raise UsageError(f"there is no rank {rank}", hint=f"ranks are 0 to {len(state.places) - 1}")
        member = state.members[place.node]
    else:
        found = [m for m in state.members.values() if node in (m.name, str(m.index))]
        if not found:
            names = ", ".join(m.name for m in state.members.values())
            raise UsageError(f"there is no node {node}", hint=f"nodes are: {names} (or an index)")
        member = found[0]
    if not member.alive:
        raise UsageError(f"{member.name} is {member.state.value} already")
    if kind is DrillKind.KILL_WORKER:
        return Target(member.index, rank, f"rank {rank} on {member.name}")
    held = ranks_named([p.rank for p in state.places if p.node == member.index])
    return Target(member.index, -1, f"{member.name} ({held})")
