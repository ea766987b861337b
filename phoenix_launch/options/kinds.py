"""The kinds of value that options have: how each is read from text, named in the help, completed, and shown again."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from phoenix_launch.options import values
from phoenix_launch.settings import AUTO


@dataclass(frozen=True, slots=True)
class Value:
    """A kind of value. What `parse` returns is what `show` takes, of a type that only the two know."""

    parse: Callable[[str], object]
    metavar: str
    choices: tuple[str, ...] = ()  # for completions
    show: Callable[[Any], str] = str
    switch: bool = False  # no value on the command line, a boolean elsewhere
    repeated: bool = False  # may be given several times; elsewhere: words as a shell splits them


# --- back to text, as it would be typed ------------------------------------------------------------------------------


def shown_switch(value: bool) -> str:
    return "yes" if value else "no"


def shown_seconds(value: float) -> str:
    return f"{value:g}"


def shown_size(value: int) -> str:
    """In the largest unit that says it exactly."""
    units = [unit for unit, size in values.UNITS.items() if value and value % size == 0]
    return f"{value // values.UNITS[units[-1]]}{units[-1]}" if units else str(value)


def shown_interval(value: int) -> str:
    return "auto" if value == AUTO else str(value)


def shown_optional(value: int | None) -> str:
    return "" if value is None or value < 0 else str(value)


def shown_nodes(value: tuple[int, int]) -> str:
    return str(value[0]) if value[0] == value[1] else f"{value[0]}:{value[1]}"


def shown_ports(value: tuple[int, int]) -> str:
    return f"{value[0]}-{value[1]}" if value[0] else ""


def shown_list(value: tuple[object, ...] | None) -> str:
    return ",".join(str(part) for part in value or ())


def shown_words(value: tuple[str, ...]) -> str:
    return shlex.join(value)


def shown_phrases(value: tuple[str, ...]) -> str:
    return ",".join(part.replace(",", ",,") for part in value)


def shown_streams(value: dict[int, int]) -> str:
    if -1 in value or not value:
        return str(value.get(-1, 0))
    return ",".join(f"{rank}:{which}" for rank, which in value.items())


def shown_pairs(value: dict[str, str]) -> str:
    return ",".join(f"{key}={content}" for key, content in value.items())


# --- the kinds themselves --------------------------------------------------------------------------------------------


def one_of(*words: str) -> Value:
    return Value(values.choice(*words), "|".join(words), choices=words)


SWITCH: Final = Value(values.switch, "", show=shown_switch, switch=True)
TEXT: Final = Value(values.text, "TEXT")
NAME: Final = Value(values.non_empty, "NAME")
FILE: Final = Value(values.non_empty, "FILE")
FOLDER: Final = Value(values.folder, "FOLDER")
LOG_FOLDER: Final = Value(values.log_folder, "FOLDER")
COUNT: Final = Value(values.at_least(0), "N")
COUNT_FROM_1: Final = Value(values.at_least(1), "N")
PLACE: Final = Value(values.at_least(0), "N", show=shown_optional)
SIZE: Final = Value(values.size, "SIZE", show=shown_size)
BANDWIDTH: Final = Value(values.bandwidth, "SIZE", show=shown_size)
INTERVAL: Final = Value(values.interval, "N|auto", choices=("auto",), show=shown_interval)
SECONDS: Final = Value(values.seconds(exclusive=True), "SECONDS", show=shown_seconds)
SECONDS_FROM_0: Final = Value(values.seconds(), "SECONDS", show=shown_seconds)
NODES: Final = Value(values.count_or_hosts(1), "N|HOSTS")
SPARES: Final = Value(values.count_or_hosts(0), "N|HOSTS")
PROCESSES: Final = Value(values.processes_per_node, "N|" + "|".join(values.DEVICES), choices=values.DEVICES)
NODE_RANGE: Final = Value(values.node_range, "N|MIN:MAX", show=shown_nodes)
RENDEZVOUS: Final = Value(values.rendezvous_backend, "static|c10d", choices=("static", "c10d"))
RENDEZVOUS_CONFIGURATION: Final = Value(values.rendezvous_configuration, "KEY=VALUE,...", show=shown_pairs)
ENDPOINT: Final = Value(values.endpoint, "HOST[:PORT]")
ADDRESS: Final = Value(values.address, "HOST")
PORT: Final = Value(values.port, "PORT", show=shown_optional)
PORT_RANGE: Final = Value(values.port_range, "LOW-HIGH", show=shown_ports)
STREAMS: Final = Value(values.streams, "0..3|RANK:0..3,...", choices=("0", "1", "2", "3"), show=shown_streams)
RANKS: Final = Value(values.ranks, "RANK,...", show=shown_list)
PHRASES: Final = Value(values.phrases, "TEXT,...", show=shown_phrases)
SIGNALS: Final = Value(values.signals, "NAME,...", show=shown_list)
COMMAND: Final = Value(values.shell_words, "COMMAND")
VARIABLE: Final = Value(values.variable, "NAME[=VALUE]", show=shown_words, repeated=True)
DRILL: Final = Value(values.non_empty, "DRILL", show=shown_words, repeated=True)
START_METHOD: Final = Value(values.start_method, "fork|spawn", choices=("fork", "spawn", "forkserver"))
PRELOAD: Final = Value(values.preload, "auto|none|LIST", choices=("auto", "none"))
JOB_NAME: Final = Value(values.job_name, "NAME")
