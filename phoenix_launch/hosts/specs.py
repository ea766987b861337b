"""Which nodes a job has: counts, host lists and host files, read into one list; nothing here dials anybody."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from phoenix_launch.errors import UsageError
from phoenix_launch.hosts.lists import check_total, parse_hosts
from phoenix_launch.wording import counted

_KEYS = ("slots", "rack", "python", "spare")
_LINE_HINT = "a line looks like: gpu07 slots=8 rack=a python=/opt/env/bin/python spare"


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class NodeSpec:
    """One node as it was asked for."""

    index: int
    name: str
    """How the node is called everywhere: node3, or the host without its user."""
    host: str = ""
    """The destination for ssh, `user@` included; empty for a simulated node."""
    slots: int | None = None
    """Workers the node can take; None: as many as --nproc-per-node says."""
    rack: str = ""
    """What fails together with it; empty: nothing else does."""
    python: str = ""
    """The interpreter there; empty: the path of the one that runs phoenix-run."""
    spare: bool = False
    group_rank: int = -1
    """GROUP_RANK as --node-rank fixes it; -1: any."""
    log_dir: str = ""
    """Where a host that joined wants its logs; empty: where the job's are."""


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class _Entry:
    """A host as written down somewhere; `where` says at which place."""

    host: str
    where: str = ""
    slots: int | None = None
    rack: str = ""
    python: str = ""
    spare: bool = False

    @property
    def name(self) -> str:
        return self.host.rpartition("@")[2]

    @property
    def key(self) -> str:
        return self.name.lower().rstrip(".")


def resolve(
    *, nodes: str = "", spares: str = "0", hostfile_text: str | None = None, hostfile: str = "", nproc: str = "1"
) -> tuple[NodeSpec, ...]:
    """All nodes of a job, those that train first, then the spares.

    Args:
        nodes: --nodes, a count or a host list.
        spares: --spares, a count or a host list.
        hostfile_text: what stands in the host file; None: there is none.
        hostfile: its path, for messages.
        nproc: --nproc-per-node, for the comparison of slots (auto, cpu and gpu are known to the hosts alone).

    Raises UsageError for everything that cannot be meant.
    """
    nodes, spares = nodes.strip(), spares.strip() or "0"
    if hostfile_text is not None:
        training, extra = _from_file(parse_hostfile(hostfile_text, hostfile or "hostfile"), nodes, spares)
    elif nodes and not _is_count(nodes):
        training, extra = _from_list(nodes, spares)
    else:
        return _simulated(_count(nodes or "1", "--nodes", least=1), spares)
    if not training:
        raise UsageError("no host is left to train on", hint="give more hosts than spares")
    _check_slots(training, extra, int(nproc) if nproc.strip().isdecimal() else None)
    return tuple(
        NodeSpec(
            index=index,
            name=entry.name,
            host=entry.host,
            slots=entry.slots,
            rack=entry.rack,
            python=entry.python,
            spare=index >= len(training),
        )
        for index, entry in enumerate([*training, *extra])
    )


def read_hostfile(path: str) -> str:
    """What stands in a host file. The one function here that touches a disk."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text file"
        raise UsageError(f"cannot read the host file {path}: {reason}", hint=_LINE_HINT) from None


# --- the three sources -----------------------------------------------------------------------------------------------


def _simulated(count: int, spares: str) -> tuple[NodeSpec, ...]:
    if not _is_count(spares):
        raise UsageError(
            f"--spares {spares} names hosts, but the training nodes are simulated on this machine",
            hint="simulated and real nodes never mix: give --nodes a host list too, or --spares a count",
        )
    total = count + _count(spares, "--spares", least=0)
    check_total(total)
    return tuple(NodeSpec(index=index, name=f"node{index}", spare=index >= count) for index in range(total))


def _from_list(nodes: str, spares: str) -> tuple[list[_Entry], list[_Entry]]:
    hosts = [_Entry(host=host, where="--nodes") for host in parse_hosts(nodes, "--nodes")]
    if _is_count(spares):
        count = _count(spares, "--spares", least=0)
        if count >= len(hosts):
            raise UsageError(
                f"--spares {count} of {counted(len(hosts), 'host')} leaves none to train on",
                hint="with a host list, --spares N means its last N: name more hosts in --nodes",
            )
        _check_different(hosts)
        return hosts[: len(hosts) - count], hosts[len(hosts) - count :]
    extra = [_Entry(host=host, where="--spares") for host in parse_hosts(spares, "--spares")]
    _check_different([*hosts, *extra])
    return hosts, extra


def _from_file(entries: list[_Entry], nodes: str, spares: str) -> tuple[list[_Entry], list[_Entry]]:
    """Names in --nodes and --spares pick lines of the file; counts take them in the file's order."""
    if not _is_count(spares):
        extra = _picked(entries, spares, "--spares")
        entries = [entry for entry in entries if entry not in extra]
        return _training(entries, nodes), extra
    count = _count(spares, "--spares", least=0)
    marked = [entry for entry in entries if entry.spare]
    training = _training(entries, nodes)
    if count == 0:
        return training, [entry for entry in marked if entry not in training]
    if nodes:
        rest = [entry for entry in entries if not entry.spare and entry not in training]
        pool = [entry for entry in marked if entry not in training] + rest
    else:  # as with a host list: the last ones, after those that the file itself calls spares
        wanted = max(0, count - len(marked))
        pool = marked + (training[-wanted:] if wanted and wanted < len(training) else [])
        training = training[: len(training) - (len(pool) - len(marked))]
    if count > len(pool):
        raise UsageError(
            f"--spares {count}, but the host file has only {counted(len(pool), 'host')} beyond those that train",
            hint="add lines to the host file, or ask for fewer spares",
        )
    return training, pool[:count]


def _training(entries: list[_Entry], nodes: str) -> list[_Entry]:
    free = [entry for entry in entries if not entry.spare]
    if not nodes:
        return free
    if not _is_count(nodes):
        return _picked(entries, nodes, "--nodes")
    count = _count(nodes, "--nodes", least=1)
    if count > len(free):
        raise UsageError(
            f"--nodes {count}, but the host file has only {counted(len(free), 'host')} that are not spares",
            hint="with a host file, --nodes N takes its first N hosts",
        )
    return free[:count]


def _picked(entries: list[_Entry], text: str, option: str) -> list[_Entry]:
    known = {entry.key: entry for entry in entries}
    wanted = [_Entry(host=host, where=option) for host in parse_hosts(text, option)]
    _check_different(wanted)
    for entry in wanted:
        if entry.key not in known:
            raise UsageError(
                f"{option} names {entry.name}, which is not in the host file",
                hint=_nearest(entry.key, known) or "with --hostfile, names pick lines of the file",
            )
    return [known[entry.key] for entry in wanted]


# --- the host file ---------------------------------------------------------------------------------------------------


def parse_hostfile(text: str, path: str) -> list[_Entry]:
    """The hosts of a file of lines such as `gpu[01-08] slots=8 rack=a python=/path spare  # comment`."""
    entries: list[_Entry] = []
    for number, line in enumerate(text.lstrip("\ufeff").splitlines(), start=1):
        words = re.sub(r"(^|\s)#.*", "", line).split()
        if words:
            entries.extend(_line(words, f"{path} line {number}"))
            check_total(len(entries))
    if not entries:
        raise UsageError(f"no host stands in {path}", hint=_LINE_HINT)
    _check_different(entries)
    return entries


def _line(words: list[str], where: str) -> list[_Entry]:
    given: dict[str, str] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key not in _KEYS or bool(equals) == (key == "spare"):
            raise UsageError(f"{where}: {word!r} is not understood", hint=_nearest(key, _KEYS) or _LINE_HINT)
        if key in given:
            raise UsageError(f"{where}: {key} is given twice", hint=_LINE_HINT)
        if equals and not value:
            raise UsageError(f"{where}: {key}= has no value", hint=_LINE_HINT)
        given[key] = value
    slots = given.get("slots")
    if slots is not None and not re.fullmatch(r"0*[1-9][0-9]{0,5}", slots):
        raise UsageError(f"{where}: slots={slots} is no number of workers", hint="slots is a whole number from 1 on")
    python = given.get("python", "")
    if python.startswith("~") or ("/" in python and not python.startswith("/")):
        raise UsageError(f"{where}: python={python} is no absolute path", hint="write the whole path, from / on")
    return [
        _Entry(
            host=host,
            where=where,
            slots=None if slots is None else int(slots),
            rack=given.get("rack", ""),
            python=python,
            spare="spare" in given,
        )
        for host in parse_hosts(words[0], where)
    ]


# --- checks ----------------------------------------------------------------------------------------------------------


def _is_count(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]{1,18}", text) is not None


def _count(text: str, option: str, least: int) -> int:
    count = int(text)
    if count < least:
        raise UsageError(f"{option} {text} is too few", hint=f"give at least {least}")
    check_total(count)
    return count


def _check_different(entries: Sequence[_Entry]) -> None:
    seen: dict[str, _Entry] = {}
    for entry in entries:
        before = seen.setdefault(entry.key, entry)
        if before is not entry:
            twice = entry.where if entry.where == before.where else f"{before.where} and {entry.where}"
            raise UsageError(
                f"the host {entry.name} is named twice ({twice})",
                hint="every host runs one agent: name it once, and say slots=N for more workers",
            )


def _check_slots(training: Sequence[_Entry], spares: Sequence[_Entry], nproc: int | None) -> None:
    """A spare may have to take the place of any node. Where a number is known to the hosts alone, they check it."""
    known = [(entry.slots or nproc or 0, entry) for entry in training]
    need, largest = max(known, key=lambda pair: pair[0])
    for entry in spares:
        slots = entry.slots or nproc
        if slots is not None and slots < need:
            where = f"{entry.where}: " if "line" in entry.where else ""
            raise UsageError(
                f"{where}the spare {entry.name} has {counted(slots, 'slot')}, {largest.name}, which it may replace, has {need}",
                hint=f"a spare needs as many slots as what it replaces: give it slots={need}",
            )


def _nearest(word: str, known: Sequence[str] | dict[str, _Entry]) -> str:
    near = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f"did you mean {near[0]}?" if near else ""
