"""Host lists as people write them, `h1,user@h2,gpu[03-16,20]`, spelled out into single destinations for ssh."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from phoenix_launch.errors import UsageError

MAX_NODES = 10_000  # a mistyped range must not fill the memory

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?\.?")  # never a dash first: ssh would see an option
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+$-]*")
_PIECE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_HINT = "a host list looks like h1,user@h2,gpu[03-16,20]"


def parse_hosts(text: str, where: str) -> list[str]:
    """The destinations in `h1,user@h2,gpu[03-16,20],[2001:db8::1]`, ranges spelled out."""
    hosts: list[str] = []
    for item in _split(text, where):
        if item.isdecimal() or re.fullmatch(r"-\d+", item):
            raise UsageError(
                f"{where}: {item!r} between host names is a count",
                hint="simulated and real nodes never mix: give either a count or host names",
            )
        hosts.extend(itertools.islice(_expand(item, where), MAX_NODES + 1))
        check_total(len(hosts))
    return hosts


def _split(text: str, where: str) -> list[str]:
    """Split at the commas outside of brackets."""
    items, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            break
        if letter == "," and depth == 0:
            items.append(text[start:position].strip())
            start = position + 1
    if depth != 0:
        raise UsageError(f"{where}: the brackets in {text!r} do not match", hint=_HINT)
    items.append(text[start:].strip())
    if not all(items):
        raise UsageError(f"{where}: a host name is missing in {text!r}", hint=_HINT)
    return items


def _expand(item: str, where: str) -> Iterator[str]:
    user, at, host = item.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise UsageError(f"{where}: {user!r} in {item!r} is no user name", hint=_HINT)
    address = _address(host)
    if address:
        yield user + at + address
        return
    parts = re.split(r"\[([^\]]*)\]", host)  # literal, range, literal, range, ..., literal
    choices = [_Range(part, item, where) if i % 2 else (part,) for i, part in enumerate(parts)]
    for chosen in _product(choices):
        name = "".join(chosen)
        if not _NAME.fullmatch(name):
            hint = "a port belongs into ssh's configuration: see --ssh 'ssh -F FILE'" if ":" in name else _HINT
            raise UsageError(f"{where}: {name!r} is no host name", hint=hint)
        yield user + at + name


def _product(choices: Sequence[Iterable[str]]) -> Iterator[tuple[str, ...]]:
    """As itertools.product, which would first make tuples of everything, a range of 10^12 numbers included."""
    if not choices:
        yield ()
        return
    for first in choices[0]:
        for rest in _product(choices[1:]):
            yield (first, *rest)


class _Range:
    """The numbers of `03-16,20`, zero-padded as they are written; made one at a time."""

    def __init__(self, text: str, item: str, where: str) -> None:
        self._parts: list[tuple[range, int]] = []
        for piece in text.split(","):
            found = _PIECE.fullmatch(piece.strip())
            if not found:
                wrong = f"{piece.strip()!r} is no number or range" if piece.strip() else "a range is empty"
                raise UsageError(f"{where}: {wrong} in {item!r}", hint=_HINT)
            low, high = found[1], found[2] or found[1]
            if int(high) < int(low):
                raise UsageError(
                    f"{where}: the range {piece.strip()} in {item!r} runs backwards", hint=f"write {high}-{low}"
                )
            self._parts.append((range(int(low), int(high) + 1), len(low) if low.startswith("0") else 0))

    def __iter__(self) -> Iterator[str]:
        return (f"{number:0{width}d}" for numbers, width in self._parts for number in numbers)


def _address(host: str) -> str:
    """An IPv6 address, with or without brackets, as ssh takes it; empty when `host` is something else."""
    inside = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" not in inside:
        return ""
    try:
        return str(ipaddress.IPv6Address(inside))
    except ValueError:
        return ""


def check_total(count: int) -> None:
    if count > MAX_NODES:
        raise UsageError(f"more than {MAX_NODES} nodes", hint="is a range or a count mistyped?")
