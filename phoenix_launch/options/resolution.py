"""From what flags, environment and file say to the settings of a run: flag > environment > file > default, checked."""

from __future__ import annotations

import dataclasses
import enum
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phoenix_launch.errors import UsageError
from phoenix_launch.hosts.environment import is_text
from phoenix_launch.options.table import OPTIONS, Option, default
from phoenix_launch.settings import RunSettings, check_timeouts

Given = str | bool | Sequence[str]
JOB_KEY = "PHOENIX_JOB_KEY"
UNSUPPORTED: Final[Mapping[str, str]] = {  # variables that torchrun itself acts upon
    "TORCHELASTIC_ENABLE_FILE_TIMER": "no timer watches over the workers, and they get no TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_HEALTH_CHECK_PORT": "nobody listens there; `phoenix-run status --json` says how the job is",
}


class Source(enum.Enum):
    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The value of one option and who said it; `where` names the variable or the file."""

    option: Option
    value: object
    source: Source
    where: str = ""


def resolve(
    flags: Mapping[str, Given], environ: Mapping[str, str], file: Mapping[str, Given] | None = None, file_name: str = ""
) -> dict[str, Resolved]:
    """The value of every option by its field. `flags` and `file` have only what was really given there.

    An empty variable counts as not set. Raises UsageError for a value that an option does not take.
    """
    said = file or {}
    resolved: dict[str, Resolved] = {}
    for option in OPTIONS:
        field = option.field
        variable = next((name for name in option.environment if environ.get(name)), "")
        if field in flags:
            value, source, where = _parsed(option, flags[field], option.flag), Source.FLAG, option.flag
        elif variable:
            value, source, where = _parsed(option, environ[variable], variable), Source.ENVIRONMENT, variable
        elif field in said:
            value, source, where = _parsed(option, said[field], f"{file_name}: {option.name}"), Source.FILE, file_name
        else:
            value, source, where = default(option), Source.DEFAULT, ""
        resolved[field] = Resolved(option, value, source, where)
    return resolved


def _parsed(option: Option, given: Given, where: str) -> object:
    if isinstance(given, bool):
        return given
    try:
        if option.value.repeated:
            words = shlex.split(given) if isinstance(given, str) else given
            return tuple(option.value.parse(word) for word in words)
        assert isinstance(given, str), f"{where}: {given!r}"
        return option.value.parse(given)
    except ValueError as error:
        shown = given if isinstance(given, str) else " ".join(given)
        raise UsageError(f"{where} {shown!r}: {error}", hint=f"{option.flag}: {option.help}") from None


def settings_from(
    resolved: Mapping[str, Resolved], script: str, args: Sequence[str], environ: Mapping[str, str]
) -> RunSettings:
    """The settings of a run; raises UsageError when options contradict each other or lack what they need."""
    given = frozenset(field for field, row in resolved.items() if row.source is not Source.DEFAULT)
    fields = {field: row.value for field, row in resolved.items()}
    raw = RunSettings(script=script, script_args=tuple(args), given=given, **fields)  # type: ignore[arg-type]
    if raw.run_path:  # wins over the other two, as in torchrun
        raw = dataclasses.replace(raw, module=False, no_python=False)
    if raw.no_python and raw.module:
        raise UsageError(
            "--no-python and --module exclude each other", hint="a module can only be run by python: drop one"
        )
    settings = _standalone(_join_timeout(raw)) if raw.standalone else _join_timeout(raw)
    settings = dataclasses.replace(
        settings, allow_drills=settings.allow_drills or bool(settings.drills), remarks=_remarks(settings, environ)
    )
    _check_nodes(settings)
    _check_joining(settings, environ)
    _check_environment(settings, environ)
    check_timeouts(settings.timeouts())
    return settings


def _standalone(settings: RunSettings) -> RunSettings:
    """One host: whatever is said about meeting others is ignored, as torchrun does."""
    if settings.nnodes[0] > 1:
        raise UsageError(
            f"--standalone is for one host, but --nnodes asks for {settings.nnodes[0]}",
            hint="drop --standalone and give --rdzv-endpoint, or use --nodes for several nodes from here",
        )
    return dataclasses.replace(
        settings,
        nnodes=(1, 1),
        node_rank=-1,
        rdzv_backend="c10d",
        rdzv_endpoint="",
        rdzv_id="none",
        master_addr="",
        master_port=None,
    )


def _join_timeout(settings: RunSettings) -> RunSettings:
    if "join_timeout" in settings.given:
        return settings
    text = settings.rdzv_conf.get("join_timeout") or settings.rdzv_conf.get("timeout")
    return dataclasses.replace(settings, join_timeout=float(text)) if text else settings


def _remarks(settings: RunSettings, environ: Mapping[str, str]) -> tuple[str, ...]:
    remarks = [
        f"the environment variable {ascii(name)[1:-1]} is no UTF-8 and is not passed on"
        for name, value in environ.items()
        if not is_text(name + value)
    ]
    if settings.logs_specs:
        remarks.append(f"--logs-specs {settings.logs_specs} has no effect: logs are laid out as the README says")
    if settings.event_log_handler != "null":
        remarks.append("--event-log-handler has no effect: events are in the job's events.jsonl")
    remarks += [
        f"{name} has no effect: {why}" for name, why in UNSUPPORTED.items() if environ.get(name) not in (None, "", "0")
    ]
    return tuple(remarks)


def _check_nodes(settings: RunSettings) -> None:
    counted = settings.nodes.isdecimal()
    if "nnodes" in settings.given and not settings.standalone and (settings.nodes or settings.hostfile):
        wanted = int(settings.nodes) if counted else 0
        if settings.nnodes != (wanted, wanted):
            other = f"--nodes {settings.nodes}" if settings.nodes else f"--hostfile {settings.hostfile}"
            raise UsageError(
                f"--nnodes {settings.nnodes[1]} does not go with {other}",
                hint="give one: --nodes starts all nodes from here, --nnodes expects this command on every host",
            )
    if settings.standalone and (settings.hostfile or (settings.nodes and not counted)):
        raise UsageError("--standalone is for one host, but hosts are given", hint="drop one of them")
    if settings.nodes and settings.hostfile and not counted:
        raise UsageError(
            "hosts come from --nodes or from --hostfile, not from both",
            hint="with --hostfile, --nodes N takes its first N",
        )


def _check_joining(settings: RunSettings, environ: Mapping[str, str]) -> None:
    if settings.node_rank >= settings.nnodes[1] and settings.joins:
        raise UsageError(
            f"--node-rank {settings.node_rank} is not one of --nnodes {settings.nnodes[1]}",
            hint=f"node ranks go from 0 to {settings.nnodes[1] - 1}",
        )
    if not settings.joins:
        return
    _, port = settings.join_endpoint
    if port == 0:
        raise UsageError("several hosts cannot meet at port 0", hint="give --rdzv-endpoint HOST:PORT with a fixed port")
    if not environ.get(JOB_KEY):
        raise UsageError(
            f"{JOB_KEY} is not set: without it anybody could join a job on several hosts",
            hint=f"{JOB_KEY}=$(phoenix-run keygen), the same on every host",
        )


def _check_environment(settings: RunSettings, environ: Mapping[str, str]) -> None:
    for entry in settings.env:
        if "=" not in entry and entry not in environ:
            raise UsageError(f"--env {entry}: it is not set here", hint=f"give its value: --env {entry}=VALUE")
        if entry.partition("=")[0] == JOB_KEY:
            raise UsageError(f"--env {JOB_KEY}: the key is kept from the workers", hint="drop it")
