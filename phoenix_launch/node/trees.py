"""Decides which process belongs to whom below an agent; pure, over a process table that somebody else has read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from phoenix_launch.process_table import ProcessStat, Table, descendants


@dataclass(frozen=True, slots=True)
class Claim:
    """A process that an agent started, dead or alive: its session, its descendants and whatever has its marker.

    `marker` is NAME=VALUE as it stands in the environment of whatever the process starts; empty when it has none.
    """

    key: int
    pid: int
    marker: bytes = b""


def owners(
    table: Table, agent: int, claims: Iterable[Claim], environment: Callable[[int], bytes]
) -> dict[int, int | None]:
    """For every process below `agent` the key of the claim it belongs to; None: nobody's.

    By descent first. An orphan, which has become the agent's own child, is known by its session, and one that left that
    too by the environment it was started with.
    """
    claimed = list(claims)
    by_pid = {claim.pid: claim.key for claim in claimed}
    marked = [(b"\0" + claim.marker + b"\0", claim.key) for claim in claimed if claim.marker]
    found: dict[int, int | None] = {}
    for pid in sorted(descendants(table, agent), key=lambda pid: _depth(table, pid)):
        entry = table[pid]
        key = by_pid.get(pid)
        if key is None:
            key = found.get(entry.parent)
        if key is None:
            key = by_pid.get(entry.session)
        if key is None and marked and entry.alive:
            started_with = b"\0" + environment(pid)
            key = next((owner for marker, owner in marked if marker in started_with), None)
        found[pid] = key
    return found


def _depth(table: Table, pid: int) -> int:
    depth = 0
    while pid in table and depth < len(table):
        pid = table[pid].parent
        depth += 1
    return depth


def living(table: Table, owned: dict[int, int | None], key: int | None) -> list[ProcessStat]:
    """What is still to be killed of one claim, or (None) of what is nobody's."""
    return [table[pid] for pid, owner in owned.items() if owner == key and table[pid].alive]
