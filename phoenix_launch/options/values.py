"""How the text of an option becomes its value; each function raises ValueError with what would have been right."""

from __future__ import annotations

import math
import re
import shlex
import signal
from collections.abc import Callable
from typing import Final

from phoenix_launch.settings import AUTO, DEFAULT_RDZV_PORT, parse_endpoint, without_brackets

TRUE: Final = frozenset({"1", "true", "yes", "on"})
FALSE: Final = frozenset({"0", "false", "no", "off"})
DEVICES: Final = ("auto", "cpu", "gpu", "xpu")
UNCATCHABLE: Final = frozenset({"SIGKILL", "SIGSTOP"})
_HOST: Final = re.compile(r"[\w.:%-]+")
_JOB_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) *([KMGTkmgt]?)(?:i?[Bb])?")
_VARIABLE: Final = re.compile(r"[^=\0\s]+")


def text(value: str) -> str:
    return value


def non_empty(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def switch(value: str) -> bool:
    """A boolean in the environment or a file; torchrun takes 0 and 1 (any other number is true)."""
    word = value.strip().lower()
    if word in TRUE or (word.isdecimal() and int(word) != 0):
        return True
    if word in FALSE:
        return False
    raise ValueError("must be 1, true, yes or 0, false, no")


def choice(*words: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return value

    return parse


def at_least(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(value: str) -> int:
        wanted = f"must be a whole number from {low}" + ("" if high is None else f" to {high}")
        try:
            number = int(value)
        except ValueError:
            raise ValueError(wanted) from None
        if number < low or (high is not None and number > high):
            raise ValueError(wanted)
        return number

    return parse


def seconds(low: float = 0.0, *, exclusive: bool = False) -> Callable[[str], float]:
    def parse(value: str) -> float:
        wanted = f"must be a number of seconds, {'more than' if exclusive else 'at least'} {low:g}"
        try:
            number = float(value)
        except ValueError:
            raise ValueError(wanted) from None
        if not math.isfinite(number) or number < low or (exclusive and number == low):
            raise ValueError(wanted)
        return number

    return parse


def size(value: str) -> int:
    """Bytes: a number, with a unit such as K, M, G, T (of 1024; KiB, MB and the like mean the same)."""
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError("must be a number of bytes such as 64G, 500M, 0")
    return int(float(found[1]) * UNITS.get(found[2].upper(), 1))


def bandwidth(value: str) -> int:
    """Bytes a second. Below a megabyte a second a replica would come to a standstill for its receiver."""
    rate = size(value.removesuffix("/s"))
    if 0 < rate < UNITS["M"]:
        raise ValueError("must be 0, or at least 1M bytes a second")
    return rate


def interval(value: str) -> int:
    if value.strip() == "auto":
        return AUTO
    try:
        return at_least(0)(value)
    except ValueError:
        raise ValueError("must be a whole number from 0, or auto") from None


def count_or_hosts(low: int) -> Callable[[str], str]:
    """A count from `low`, or a list of host names, which is read elsewhere."""

    def parse(value: str) -> str:
        cleaned = value.strip()
        if re.fullmatch(r"[+-]?\d+", cleaned):
            return str(at_least(low)(cleaned))
        if not cleaned or cleaned.startswith("-"):
            raise ValueError("must be a count or a list of hosts such as host1,gpu[03-16]")
        return cleaned

    return parse


def processes_per_node(value: str) -> str:
    if value in DEVICES:
        return value
    wanted = f"must be a number from 1, or one of {', '.join(DEVICES)}"
    try:
        number = int(value)
    except ValueError:
        raise ValueError(wanted) from None
    if number < 1:
        raise ValueError(wanted)
    return str(number)


def node_range(value: str) -> tuple[int, int]:
    """`N` or `MIN:MAX`, with 0 < MIN <= MAX."""
    parts = value.split(":")
    try:
        low, high = int(parts[0]), int(parts[-1])
    except ValueError:
        low, high = 0, 0
    if len(parts) > 2 or not 0 < low <= high:
        raise ValueError("must be N or MIN:MAX with 1 <= MIN <= MAX")
    return low, high


def rendezvous_backend(value: str) -> str:
    if value not in ("static", "c10d"):
        raise ValueError(
            "must be static or c10d: no other service is needed here, the hosts meet at --rdzv-endpoint on one of them"
        )
    return value


def endpoint(value: str) -> str:
    stripped = value.strip()
    if not stripped:
        return ""
    try:
        host, _ = parse_endpoint(stripped, DEFAULT_RDZV_PORT)
    except ValueError as error:
        raise ValueError(f"must be HOST or HOST:PORT ({error})") from None
    if not _HOST.fullmatch(host):
        raise ValueError("must be HOST or HOST:PORT, with an IPv6 address in brackets")
    return stripped


def address(value: str) -> str:
    host = without_brackets(value.strip())
    if not _HOST.fullmatch(host):
        raise ValueError("must be a host name or an address")
    return host


def port(value: str) -> int | None:
    """0 is any port, which is what an absent option means too."""
    return at_least(0, 65535)(value) or None


def port_range(value: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,5})[-:](\d{1,5})", value.strip())
    low, high = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < low <= high <= 65535:
        raise ValueError("must be LOW-HIGH, two ports from 1 to 65535")
    return low, high


def rendezvous_configuration(value: str) -> dict[str, str]:
    """`k=v,k=v` as torch reads it; `timeout` and `join_timeout` are the ones that act here."""
    configuration: dict[str, str] = {}
    for pair in value.split(",") if value.strip() else ():
        key, _, content = (part.strip() for part in pair.partition("="))
        if not key or not content:
            raise ValueError("must be KEY=VALUE,KEY=VALUE")
        if key in ("timeout", "join_timeout"):
            try:
                seconds(exclusive=True)(content)
            except ValueError as error:
                raise ValueError(f"{key} {error}") from None
        configuration[key] = content
    return configuration


def streams(value: str) -> dict[int, int]:
    """torchrun's `0..3` for all local ranks (key -1) or `rank:0..3,...`, here with any number of digits in a rank."""
    cleaned = value.strip()
    if re.fullmatch(r"[0-3]", cleaned):
        return {-1: int(cleaned)} if cleaned != "0" else {}
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", cleaned):
        raise ValueError("must be 0 (none), 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:0..3 separated by commas")
    pairs = (pair.split(":") for pair in cleaned.split(","))
    return {int(rank): int(which) for rank, which in pairs}


def ranks(value: str) -> tuple[int, ...] | None:
    if not value.strip():
        return None
    try:
        chosen = {int(rank) for rank in value.split(",")}
    except ValueError:
        chosen = {-1}
    if min(chosen) < 0:
        raise ValueError("must be local ranks separated by commas, such as 0,1,2")
    return tuple(sorted(chosen))


def phrases(value: str) -> tuple[str, ...]:
    """A list separated by commas, in which two commas stand for one, as torchrun reads it; empty text: no filter."""
    placeholder = "\0"
    parts = value.replace(",,", placeholder).split(",")
    return tuple(part.replace(placeholder, ",") for part in parts if part)


def signals(value: str) -> tuple[str, ...]:
    names = [name.strip().upper() for name in value.split(",") if name.strip()]
    full = [name if name.startswith("SIG") else f"SIG{name}" for name in names]
    known = {member.name for member in signal.Signals} - UNCATCHABLE
    wrong = [name for name in full if name not in known]
    if wrong or not full:
        raise ValueError(f"must be signal names separated by commas{f', not {wrong[0]}' if wrong else ''}")
    return tuple(dict.fromkeys(full))


def shell_words(value: str) -> str:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError(f"cannot be read as a command: {error}") from None
    if not words:
        raise ValueError("must be a command, such as 'ssh -F FILE'")
    return value


def variable(value: str) -> str:
    name = value.partition("=")[0]
    if not _VARIABLE.fullmatch(name) or "\0" in value:
        raise ValueError("must be NAME or NAME=VALUE")
    return value


def start_method(value: str) -> str:
    """torchrun's `forkserver` is what `fork` means here."""
    return {"forkserver": "fork"}.get(value, "") or choice("fork", "spawn")(value)


def preload(value: str) -> str:
    if value in ("auto", "none"):
        return value
    modules = [module.strip() for module in value.split(",")]
    if not all(part.isidentifier() for module in modules for part in module.split(".")):
        raise ValueError("must be auto, none, or module names separated by commas")
    return ",".join(modules)


def job_name(value: str) -> str:
    if not _JOB_NAME.fullmatch(value):
        raise ValueError("must be up to 64 letters, digits, dots, dashes and underscores")
    return value


def folder(value: str) -> str:
    if not value or "\0" in value:
        raise ValueError("must be a folder")
    return value


def log_folder(value: str) -> str:
    if not value or "\0" in value:
        raise ValueError("must be a folder, or /dev/null for no log files")
    return value
