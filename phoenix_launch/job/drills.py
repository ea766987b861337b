"""Planned faults: what `--drill` says, and whom a drill hits. Pure."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from phoenix_launch.command_messages import DrillKind, FaultRequest
from phoenix_launch.errors import UsageError
from phoenix_launch.job.state import Member, State
from phoenix_launch.wording import ranks_named

_HINT = 'for example --drill "kill-node --node 1 --after 20"'
_NUMBERS = ("--rank", "--after", "--at-step", "--duration")


RANKS: Final = frozenset(
    {
        DrillKind.KILL_WORKER, DrillKind.HANG, DrillKind.HANG_GIL, DrillKind.SLOW, DrillKind.RAISE, DrillKind.EXIT,
        DrillKind.FLIP_BITS, DrillKind.OOM,
    }
)  # fmt: skip  # what only a rank can be hit by
EITHER: Final = frozenset({DrillKind.FREEZE, DrillKind.FILL_DISK})  # a rank alone, or a whole node
HARMLESS: Final = frozenset(
    {DrillKind.SLOW, DrillKind.KILL_SERVER, DrillKind.FAIL_SPARE, DrillKind.FILL_DISK}
)  # no fault follows
CUTS: Final = frozenset(
    {DrillKind.DROP_BUS, DrillKind.DELAY_BUS, DrillKind.PARTITION}
)  # one does if they last long enough
SECONDS: Final = 10.0  # of what has to end by itself, when nothing was said
VALUED: Final = {
    DrillKind.SLOW: (1.0, 1000.0),
    DrillKind.EXIT: (0.0, 255.0),
    DrillKind.DELAY_BUS: (0.01, 60.0),
}  # kinds with a number, and its limits


_EXAMPLES: Final = {DrillKind.SLOW: "4 --rank 1", DrillKind.EXIT: "3 --rank 1", DrillKind.DELAY_BUS: "0.5 --node 1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPlan:
    """One fault to come. `after`: seconds from the moment the workers first run; `at_step`: and the step that all have done."""

    kind: DrillKind
    rank: int = -1
    node: str = ""
    after: float = 0.0
    at_step: int = -1
    value: float = 0.0
    duration: float = 0.0

    @property
    def request(self) -> FaultRequest:
        return FaultRequest(self.kind, self.rank, self.node, value=self.value, duration=self.duration)


def is_due(plan: DrillPlan, state: State, since: float) -> bool:
    """`since`: seconds since the workers first ran, negative: they do not yet."""
    if since < plan.after or since < 0:
        return False
    steps = [holder.step for holder in state.holders.values()]
    return plan.at_step < 0 or bool(steps and min(steps) >= plan.at_step)


def to_come(plans: list[DrillPlan], state: State) -> list[DrillPlan]:
    """Those that are certain to have not been carried out yet: of a step that not all have done."""
    steps = [holder.step for holder in state.holders.values()]
    return [plan for plan in plans if plan.at_step > min(steps, default=0)]


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
    """Read `KIND [NUMBER] [--node N | --rank R] [--after SECONDS] [--at-step S] [--duration T]`. Raises UsageError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"cannot read the drill {text!r}: {error}", hint=_HINT) from None
    if not words:
        raise UsageError("an empty --drill", hint=_HINT)
    kind = parse_kind(words[0])
    number = words.pop(1) if kind in VALUED and len(words) > 1 and not words[1].startswith("--") else ""
    given = dict(zip(words[1::2], words[2::2], strict=False))
    unknown = [name for name in words[1::2] if name not in ("--node", *_NUMBERS)]
    if unknown or len(words) % 2 == 0:
        raise UsageError(f"cannot read the drill {text!r}", hint=_HINT)
    try:
        numbers = {name: float(given[name]) for name in _NUMBERS if name in given}
    except ValueError:
        raise UsageError(f"{', '.join(_NUMBERS)} of the drill {text!r} must be numbers", hint=_HINT) from None
    whole = all(numbers[name].is_integer() for name in ("--rank", "--at-step") if name in numbers)
    if not whole or not all(0 <= each < float("inf") for each in numbers.values()):
        raise UsageError(f"the numbers of the drill {text!r} must not be negative", hint=_HINT)
    node, rank = given.get("--node", ""), int(numbers.get("--rank", -1))
    value = read_value(kind, number)
    check_aim(kind, rank, node)
    return DrillPlan(
        kind=kind, rank=rank, node=node, after=numbers.get("--after", 0.0), value=value,
        at_step=int(numbers.get("--at-step", -1)), duration=numbers.get("--duration", 0.0),
    )  # fmt: skip


def read_value(kind: DrillKind, text: str) -> float:
    """The number that this kind wants. Raises UsageError."""
    limits = VALUED.get(kind)
    if limits is None:
        if text:
            raise UsageError(f"{kind.value} takes no number ({text})", hint=f"leave {text} out")
        return 0.0
    example = f"for example {kind.value} {_EXAMPLES[kind]}"
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{kind.value} needs a number, not {text!r}", hint=example) from None
    if not limits[0] <= value <= limits[1]:
        raise UsageError(f"{kind.value} {text}: must be from {limits[0]:g} to {limits[1]:g}", hint=example)
    return value


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
    if kind is DrillKind.KILL_SUPERVISOR:
        if rank >= 0 or node:
            raise UsageError("kill-supervisor harms no rank and no node", hint="leave --rank and --node out")
        return
    if kind in RANKS and (rank < 0 or node):
        raise UsageError(f"{kind.value} needs a rank", hint="give --rank R")
    if (rank < 0) == (not node):
        raise UsageError(f"{kind.value} needs one target", hint="give either --node N or --rank R")


def find_target(state: State, kind: DrillKind, rank: int, node: str, value: float = 0.0) -> Target:
    """Whom the drill hits now. Raises UsageError when there is no such rank or node, or nothing of it lives."""
    check_aim(kind, rank, node)
    if kind is DrillKind.KILL_SUPERVISOR:
        return Target(-1, -1, "of this job")
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
    if kind is DrillKind.FILL_DISK and not state.rules.save_timeout:
        raise UsageError("fill-disk: this job writes no checkpoints to disk", hint="start it with --checkpoint-dir")
    if not member.alive:
        raise UsageError(f"{member.name} is {member.state.value} already")
    if kind in RANKS or (kind in EITHER and rank >= 0):
        return _rank_target(state, kind, rank, member, value)
    if kind is DrillKind.FAIL_SPARE and not member.parked:
        raise UsageError(f"no spare process waits on {member.name}", hint="`phoenix-run status` shows where some do")
    held = ranks_named([p.rank for p in state.places if p.node == member.index])
    number = f"{value:g} on " if kind in VALUED else ""
    return Target(member.index, -1, f"{number}{member.name} ({held})" if held else f"{number}{member.name}")


def lasting(kind: DrillKind, duration: float) -> float:
    """Seconds that it lasts; 0: to the end, or it is done at once."""
    return duration or (SECONDS if kind in CUTS or kind is DrillKind.FILL_DISK else 0.0)


def _rank_target(state: State, kind: DrillKind, rank: int, member: Member, value: float) -> Target:
    holder = state.holders.get(rank)
    told = holder is not None and holder.runtime is not None
    if kind not in (DrillKind.KILL_WORKER, DrillKind.FREEZE) and not told:
        raise UsageError(
            f"{kind.value}: rank {rank} does not know phoenix_runtime, and would have to do that by itself",
            hint="kill-worker and freeze harm any process",
        )
    number = f"{value:g} on " if kind in VALUED else ""
    return Target(member.index, rank, f"{number}rank {rank} on {member.name}")
