"""What was decided about a job before anything of it was started, and what each of its agents is given."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from phoenix_launch.bootstrap import AgentBootstrap, AgentTimeouts, Command, OutputSettings, RunMode, StartMethod
from phoenix_launch.bus.keys import KeyPair
from phoenix_launch.bus.supervisor import SupervisorBus
from phoenix_launch.hosts.environment import job_environment
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.records.folders import JobFolder
from phoenix_launch.settings import RunSettings, timeout

TERM = 1  # the first supervisor of a job
JOINED_PATIENCE = 15.0  # seconds


@dataclass(frozen=True, slots=True)
class Joining:
    """The same command on every host: how many are wanted, and the key pair that they all show first."""

    seats: tuple[int, int]
    keys: KeyPair


@dataclass(frozen=True, slots=True)
class Job:
    """What was decided about a job before anything of it was started."""

    settings: RunSettings
    environ: Mapping[str, str]
    folder: JobFolder
    specs: tuple[NodeSpec, ...]
    keys: KeyPair
    address: str  # where the bus listens
    port: int  # 0: any
    joining: Joining | None = None  # hosts come by themselves
    slots_key: str = field(default_factory=lambda: secrets.token_hex(32))  # by which checkpoint servers know each other
    cwd: str = field(default_factory=os.getcwd)  # of the command, and of its workers

    @property
    def name(self) -> str:
        return self.folder.job

    @property
    def run_id(self) -> str:
        given = self.settings.rdzv_id
        return given if given and given != "none" else self.name

    @property
    def on_hosts(self) -> bool:
        return any(spec.host for spec in self.specs)

    @property
    def logs(self) -> Path:
        chosen = self.settings.log_dir
        return Path(chosen).absolute() if chosen and chosen != os.devnull else self.folder.logs_path

    def logs_of(self, spec: NodeSpec) -> Path:
        """On another host relative to where jobs are kept there (its user's home), unless it was said where."""
        if spec.log_dir and spec.log_dir != os.devnull:
            return Path(spec.log_dir) / spec.name
        said = self.settings.log_dir or self.environ.get("PHOENIX_HOME")
        logs = self.logs if said or not spec.host else self.folder.logs_path.relative_to(self.folder.path.parent)
        return logs / spec.name


def command_of(settings: RunSettings, python: str) -> Command:
    """What every worker runs, with the interpreter of its node."""
    if settings.run_path:
        mode = RunMode.RUN_PATH
    elif settings.no_python:
        mode = RunMode.EXEC
    else:
        mode = RunMode.MODULE if settings.module else RunMode.SCRIPT
    return Command(
        mode,
        settings.script,
        settings.script_args,
        python,
        StartMethod.FORK if settings.start_method == "fork" else StartMethod.SPAWN,
        settings.preload,
        settings.virtual_local_rank,
        settings.numa_binding,
    )


def output_of(
    settings: RunSettings, folder: Path, run_id: str, environ: Mapping[str, str], *, files: bool
) -> OutputSettings:
    """Where the output of one node's workers goes. Filters alone ask for no second copy: they are about --tee."""
    torchrun_layout = any(settings.redirects.values()) or any(settings.tee.values())
    base = folder.with_name(f"{run_id}_{secrets.token_hex(4)}_{folder.name}")
    return OutputSettings(
        folder=str(folder),
        redirects=settings.redirects,
        tees=settings.tee,
        console_local_ranks=settings.local_ranks_filter,
        stdout_filters=settings.duplicate_stdout_filters,
        stderr_filters=settings.duplicate_stderr_filters,
        torchrun_folder=str(base) if torchrun_layout and files else "",
        line_prefix_template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
        role=settings.role,
        files=files,
    )


def _orphan_timeout(job: Job) -> float:
    """Nobody can take over a job whose hosts joined by themselves: unless it was said how long, they do not wait for that."""
    said = job.settings.orphan_timeout
    alone = job.joining is not None and "orphan_timeout" not in job.settings.given
    return min(said, JOINED_PATIENCE) if alone else said


def bootstrap(
    job: Job, bus: SupervisorBus, term: int, spec: NodeSpec, incarnation: str, keys: KeyPair
) -> AgentBootstrap:
    settings = job.settings
    python = job.environ.get("PYTHON_EXEC") or spec.python or sys.executable
    return AgentBootstrap(
        job=job.name,
        node=spec.name,
        index=spec.index,
        term=term,
        incarnation=incarnation,
        control_endpoint=bus.control_endpoint,
        output_endpoint=bus.output_endpoint,
        server_key=bus.keys.public,
        public_key=keys.public,
        secret_key=keys.secret,
        environment=job_environment(job.environ, settings.env, simulated=not spec.host),
        cwd=job.cwd,
        command=command_of(settings, python),
        output=output_of(
            settings, job.logs_of(spec), job.run_id, job.environ, files=(spec.log_dir or settings.log_dir) != os.devnull
        ),
        timeouts=AgentTimeouts(
            heartbeat_interval=timeout("heartbeat_interval"),
            orphan=_orphan_timeout(job),
            connect=timeout("connect"),
            fork_server=timeout("fork_server"),
            drain_output=timeout("drain_output"),
            reap=timeout("reap"),
            heartbeat=settings.heartbeat_timeout,
            first_step=max(timeout("first_step"), settings.hang_timeout),
        ),
        interface=settings.interface,
        port_low=settings.port_range[0],
        port_high=settings.port_range[1],
        simulated=not spec.host and job.joining is None,
        copy_memory=settings.copy_memory,
        replica_bandwidth=settings.replica_bandwidth,
        encrypt=settings.encrypt,
        checkpoint_dir=os.path.abspath(settings.checkpoint_dir) if settings.checkpoint_dir else "",
        keep=settings.keep,
        slots_key=job.slots_key,
    )
