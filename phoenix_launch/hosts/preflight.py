"""What keeps a job from starting: compares what the hosts say of themselves and each other; one table of problems."""

from __future__ import annotations

import dataclasses
import ipaddress
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from phoenix_launch.hosts.ssh_failures import Reason
from phoenix_launch.messages import HostFacts, PeerProbe
from phoenix_launch.wording import counted

MIN_DISK: Final = 64 << 20  # bytes free where the logs go
MIN_MEMORY: Final = 1 << 30  # bytes free; torch alone needs a good part of it
WIDTH: Final = 120
_GAP: Final = 2


class Problem(NamedTuple):
    """One thing that is wrong on one node."""

    node: str
    what: str
    hint: str = ""


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class Expected:
    """What every node must have, as it is where phoenix-run was typed; empty: the first node's is the measure."""

    phoenix: str = ""
    python: str = ""
    torch: str = ""
    script_digest: str = ""
    interface: str = ""


def problems(
    own: Expected,
    facts: Mapping[str, HostFacts],
    failures: Mapping[str, str] | None = None,
    probes: Mapping[str, Sequence[PeerProbe]] | None = None,
) -> list[Problem]:
    """Everything that is wrong, node by node in the order of `facts`, hosts that never came first.

    Args:
        own: the measure.
        facts: what each node that said hello found out about itself.
        failures: why the others never said hello; a Reason brings its hint along.
        probes: for each node, how its dials to its neighbours went.
    """
    found: list[Problem] = []
    for node, reason in (failures or {}).items():
        found.append(Problem(node, str(reason), reason.hint if isinstance(reason, Reason) else ""))
    measure = _measure(own, facts)
    for node, fact in facts.items():
        found.extend(Problem(node, what, hint) for what, hint in _node_problems(measure, own, fact))
    found.extend(_address_problems(own, facts))
    for node, peers in (probes or {}).items():
        found.extend(
            Problem(
                node,
                f"cannot reach {peer.node} at {_endpoint(peer.address, peer.port)}: {peer.error}",
                "a firewall, or the wrong network: see --interface and --port-range",
            )
            for peer in peers
            if peer.error
        )
    return found


def _measure(own: Expected, facts: Mapping[str, HostFacts]) -> Expected:
    first = next(iter(facts.values()), None)
    if first is None:
        return own
    return dataclasses.replace(
        own,
        phoenix=own.phoenix or first.phoenix,
        python=own.python or first.python,
        torch=own.torch or first.torch,
        script_digest=own.script_digest or first.script_digest,
    )


def _node_problems(measure: Expected, own: Expected, fact: HostFacts) -> Iterator[tuple[str, str]]:
    if fact.phoenix != measure.phoenix:
        where = "here" if own.phoenix else "on the first host"
        yield f"phoenix-run {fact.phoenix} there, {measure.phoenix} {where}", "install the same version everywhere"
    if not fact.torch:
        yield "torch is not installed there", "python= in a --hostfile names the interpreter that has it"
    elif fact.torch != measure.torch:
        where = "here" if own.torch else "on the first host"
        yield f"torch {fact.torch} there, {measure.torch} {where}", "install the same version everywhere"
    if _series(fact.python) != _series(measure.python):
        where = "here" if own.python else "on the first host"
        yield (
            f"Python {fact.python} there, {measure.python} {where}",
            "python= in a --hostfile names another interpreter",
        )
    yield from _file_problems(measure, fact)
    if fact.memory_free < MIN_MEMORY:
        yield f"only {_size(fact.memory_free)} of memory free", f"at least {_size(MIN_MEMORY)} is needed"


def _file_problems(measure: Expected, fact: HostFacts) -> Iterator[tuple[str, str]]:
    if fact.cwd_error:
        yield f"folder {fact.cwd_error}", "the folder you are in must exist on every host"
    elif fact.script_error:
        yield f"script {fact.script_error}", "the same script must stand on every host"
    elif fact.script_digest != measure.script_digest:
        yield "the script there is not the same as here", "copy it to every host, or use a shared folder"
    if fact.log_error:
        yield f"log folder {fact.log_error}", "--log-dir moves the logs"
    elif fact.disk_free < MIN_DISK:
        what = f"only {_size(fact.disk_free)} of disk free where the logs go"
        yield what, f"at least {_size(MIN_DISK)} is needed; --log-dir moves the logs"


def _address_problems(own: Expected, facts: Mapping[str, HostFacts]) -> Iterator[Problem]:
    """Simulated nodes share one host and its loopback address: that is as it must be."""
    several = len({fact.hostname for fact in facts.values()}) > 1
    owners: dict[str, str] = {}
    for node, fact in facts.items():
        if not fact.address:
            what = f"no address on interface {own.interface}" if own.interface else "no address that others can dial"
            yield Problem(node, what, "`ip address` there shows them; --interface chooses")
        elif _is_loopback(fact.address):
            if several:
                yield Problem(
                    node, f"its address {fact.address} is known to itself alone", "--interface chooses another"
                )
        elif owners.setdefault(fact.address, node) != node:
            what = f"has the same address as {owners[fact.address]}: {fact.address}"
            yield Problem(node, what, "is it the same host under two names?")


# --- the table -------------------------------------------------------------------------------------------------------


def table(found: Sequence[Problem], width: int = WIDTH) -> str:
    """Plain text, at most `width` columns wide; nodes with the same problem share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for problem in found:
        rows.setdefault((problem.what, problem.hint), []).append(problem.node)
    cells = [("node", "problem", "what to do")]
    cells += [(", ".join(nodes), what, hint) for (what, hint), nodes in rows.items()]
    widths = _widths(cells, width - 2 * _GAP)
    lines: list[str] = []
    for row in cells:
        wrapped = [_wrap(cell, size) for cell, size in zip(row, widths, strict=True)]
        for number in range(max(len(column) for column in wrapped)):
            parts = [column[number] if number < len(column) else "" for column in wrapped]
            line = (" " * _GAP).join(part.ljust(size) for part, size in zip(parts, widths, strict=True))
            lines.append(line.rstrip())
    return "\n".join(lines)


def _widths(cells: Sequence[tuple[str, str, str]], room: int) -> tuple[int, int, int]:
    """As wide as needed; when that is too wide, the nodes get up to a fifth and the others share the rest."""
    need = [max(len(row[column]) for row in cells) for column in range(3)]
    if sum(need) <= room:
        return need[0], need[1], need[2]
    nodes = min(need[0], max(len("node"), room // 5))
    rest = room - nodes
    hint = min(need[2], max(rest * 2 // 5, rest - need[1]))
    return nodes, min(need[1], rest - hint), hint


def _wrap(text: str, width: int) -> list[str]:
    plain = "".join(letter if letter.isprintable() else " " for letter in text)  # hosts may say anything
    return textwrap.wrap(" ".join(plain.split()), width, break_on_hyphens=False) or [""]


def _series(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def failure_line(found: Sequence[Problem]) -> str:
    """The one line below the table."""
    nodes = {problem.node for problem in found}
    many = counted(len(found), "problem")
    where = f"on {next(iter(nodes))}" if len(nodes) == 1 else f"on {len(nodes)} nodes"
    return f"the job did not start: {many} {where}"
