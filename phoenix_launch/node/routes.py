"""Decides where each stream of a process goes: which files, whether to the console, with which prefix; no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from string import Template

from phoenix_launch.bootstrap import OutputSettings, StreamChoice
from phoenix_launch.wire import Generation

STDOUT = 1
STDERR = 2


@dataclass(frozen=True, slots=True)
class WorkerLabel:
    """A process that holds a rank. `attempt` is TORCHELASTIC_RESTART_COUNT."""

    rank: int
    local_rank: int
    generation: Generation
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class SpareLabel:
    """A process that waits; what it writes goes to its own file only."""

    pid: int


Label = WorkerLabel | SpareLabel


@dataclass(frozen=True, slots=True)
class Route:
    """Where one stream goes. Of the torchrun layout, `copy` takes the bytes as they came, `filtered` chosen lines."""

    log: Path | None
    copy: Path | None = None
    console: bool = False
    prefix: str = ""  # what --tee puts before each line
    filtered: Path | None = None
    needles: tuple[bytes, ...] = ()


def route(settings: OutputSettings, label: Label, stream: int) -> Route:
    """The route of `stream` (STDOUT or STDERR), by torchrun's rules.

    A redirected stream leaves the console, a tee'd one comes back to it with a prefix. --local-ranks-filter silences
    the console, and with it the filtered copies, as torchrun makes both from the same tail. Without files nothing is
    redirected.
    """
    suffix = "out" if stream == STDOUT else "err"
    folder = Path(settings.folder)
    if isinstance(label, SpareLabel):
        return Route(log=folder / f"spare-{label.pid}.{suffix}" if settings.files else None)
    log = folder / f"{label.rank}.{label.generation}.{suffix}" if settings.files else None
    wanted = settings.console_local_ranks is None or label.local_rank in settings.console_local_ranks
    if not settings.files or not settings.torchrun_folder:
        return Route(log=log, console=wanted)
    tee = bool(_choice(settings.tees, label.local_rank) & stream)
    redirected = tee or bool(_choice(settings.redirects, label.local_rank) & stream)
    attempt = Path(settings.torchrun_folder) / f"attempt_{label.attempt}"
    name = "stdout" if stream == STDOUT else "stderr"
    needles = settings.stdout_filters if stream == STDOUT else settings.stderr_filters
    return Route(
        log=log,
        copy=attempt / str(label.local_rank) / f"{name}.log" if redirected else None,
        console=wanted and (tee or not redirected),
        prefix=_prefix(settings, label) if tee else "",
        filtered=attempt / f"filtered_{name}.log" if needles and tee and wanted else None,
        needles=tuple(needle.encode() for needle in needles) if tee and wanted else (),
    )


def _choice(table: dict[int, int], local_rank: int) -> StreamChoice:
    return StreamChoice(table.get(local_rank, table.get(-1, 0)))


def _prefix(settings: OutputSettings, label: WorkerLabel) -> str:
    if not settings.line_prefix_template:
        return f"[{settings.role}{label.local_rank}]:"
    return Template(settings.line_prefix_template).safe_substitute(
        role_name=settings.role, rank=label.rank, local_rank=label.local_rank
    )
