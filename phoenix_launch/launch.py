"""From settings to a running job: its folder, keys, bus and nodes; then the supervisor's loop; then the last words."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from phoenix_launch import __version__, hosts, membership, preflight
from phoenix_launch.arrival import EVERYWHERE
from phoenix_launch.bus import KeyPair, Peer, PeerKind, SupervisorBus, new_key_pair
from phoenix_launch.chronicle import Chronicle
from phoenix_launch.console import Console
from phoenix_launch.detach import detached
from phoenix_launch.drills import parse_plan
from phoenix_launch.environment import JobIdentity, job_wide_environment
from phoenix_launch.errors import EXIT_SIGNAL_BASE, StartError, UsageError
from phoenix_launch.facts import interface_addresses, package_version
from phoenix_launch.host_environment import job_environment
from phoenix_launch.hosts import NodeSpec
from phoenix_launch.job_state import Outcome, Rules
from phoenix_launch.jobs import ClientKeys, JobFolder, JobNode, JobRecord, jobs_root, new_job_id, settings_document
from phoenix_launch.last_words import write_error_file
from phoenix_launch.messages import (
    AgentBootstrap,
    AgentTimeouts,
    Command,
    OutputSettings,
    Prepare,
    RunMode,
    StartMethod,
)
from phoenix_launch.muster import Muster, Recruit, worker_slots
from phoenix_launch.processes import start_time
from phoenix_launch.reception import Reception
from phoenix_launch.settings import RunSettings, check_timeouts, timeout
from phoenix_launch.signals import SignalPipe
from phoenix_launch.supervisor import Supervisor, allow_commands

LOOPBACK = "127.0.0.1"
TERM = 1  # the first supervisor of a job


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


def launch(settings: RunSettings, environ: Mapping[str, str]) -> int:
    """Run a job to its end; returns the exit code. Raises PhoenixError for what the user can mend."""
    check_timeouts(settings.timeouts())
    for text in settings.drills:
        parse_plan(text)
    if settings.joins:
        from phoenix_launch.joining import launch_joined  # only these jobs need it

        return launch_joined(settings, environ)
    hostfile = hosts.read_hostfile(settings.hostfile) if settings.hostfile else None
    specs = hosts.resolve(
        nodes=settings.nodes or ("" if settings.hostfile else str(settings.nnodes[1])),
        spares=settings.spares,
        hostfile_text=hostfile,
        hostfile=settings.hostfile,
        nproc=settings.nproc_per_node,
    )
    on_hosts = any(spec.host for spec in specs)
    if settings.interface or settings.local_addr:
        address = address_of(settings.interface) if settings.interface else settings.local_addr
    else:
        address = EVERYWHERE if on_hosts else LOOPBACK
    root = jobs_root(environ)
    job = new_job_id(settings.script, root, settings.job_name)
    folder = JobFolder.create(root, job)
    plan = Job(settings, environ, folder, specs, new_key_pair(), address, 0)
    if settings.detach:
        return detached(lambda started: run_job(plan, started), job, folder.logs_path)
    return run_job(plan)


def address_of(interface: str) -> str:
    """The address of a named interface of this machine, or the address itself. Raises UsageError."""
    known = interface_addresses()
    if known.get(interface):
        return known[interface][0]
    if any(interface in addresses for addresses in known.values()):
        return interface
    raise UsageError(f"this machine has no interface {interface}", hint=f"there are: {', '.join(sorted(known))}")


def run_job(job: Job, started: Callable[[], None] | None = None) -> int:
    """Open the bus, run the supervisor, clean up. `started` is called when all nodes were found fit."""
    settings = job.settings
    runtime = Path(tempfile.mkdtemp(prefix="phoenix-", dir=job.environ.get("XDG_RUNTIME_DIR") or None))
    bus = SupervisorBus(job.name, job.keys, job.address, port=job.port, ports=settings.port_range)
    console = Console(bus.output, bus.decode_output, labels=_wants_labels(settings, len(job.specs)))
    chronicle = Chronicle.open(job.folder, console, [spec.host for spec in job.specs], settings)
    supervisor = _supervisor(job, bus, console, chronicle, runtime)
    if started is not None:
        supervisor.on_start = started
    console.start()
    try:
        _write_record(job, bus)
        chronicle.started(job.specs, settings, job.logs)
        for remark in settings.remarks:
            console.say(f"phoenix-run: {remark}")
        with SignalPipe(settings.signals_to_handle) as signals:
            if settings.detach:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
            supervisor.muster.begin(job.specs, supervisor.clock.now)
            outcome = supervisor.run(signals)
        chronicle.finished(supervisor.state, outcome, job.logs)
        write_error_file(job.environ.get("TORCHELASTIC_ERROR_FILE", ""), outcome)
        return exit_code(settings, outcome)
    except StartError as error:
        chronicle.refused(supervisor.state, error)
        raise
    finally:
        supervisor.close()
        console.finish(timeout("exit_output"))
        bus.close()
        shutil.rmtree(runtime, ignore_errors=True)


def exit_code(settings: RunSettings, outcome: Outcome) -> int:
    """`--exit-code=worker` passes the root cause's on, a signal as 128 + its number."""
    if settings.exit_code == "worker" and outcome.cause is not None:
        code = outcome.cause.report.code
        return code if code >= 0 else EXIT_SIGNAL_BASE - code
    return outcome.exit_code


def _supervisor(
    job: Job,
    bus: SupervisorBus,
    console: Console,
    chronicle: Chronicle,
    runtime: Path,
) -> Supervisor:
    settings = job.settings
    seats = job.joining.seats if job.joining else None
    status, control = new_key_pair(), new_key_pair()
    allow_commands(bus, status.public, control.public)
    job.folder.write_client_keys("status", ClientKeys(status.public, status.secret))
    job.folder.write_client_keys("control", ClientKeys(control.public, control.secret))
    training = sum(not spec.spare for spec in job.specs)
    rules = Rules(
        seats_min=seats[0] if seats else training,
        seats_max=seats[1] if seats else training,
        max_restarts=settings.max_restarts,
        max_failures_per_host=settings.max_failures_per_host,
        heartbeat_timeout=settings.heartbeat_timeout,
        probe_timeout=timeout("probe"),
        join_timeout=settings.join_timeout,
        spare_timeout=settings.spare_timeout,
        shutdown_timeout=settings.shutdown_timeout,
        teardown_timeout=timeout("reap") + timeout("drain_output"),
        master_port=settings.master_port or 0 if not settings.standalone and not seats else 0,
    )
    muster = Muster(
        bus=bus,
        expected=_expected(job),
        nproc=settings.nproc_per_node,
        python=sys.executable,
        ssh=settings.ssh,
        control_folder=str(runtime),
        bootstrap=lambda spec, incarnation, keys: bootstrap(job, bus, spec, incarnation, keys),
    )
    wide = _JobWide(job, muster)
    reception = Reception(muster, muster.bootstrap, list(job.specs))
    if job.joining:
        bus.allow(job.joining.keys.public, Peer(PeerKind.JOINER))
    return Supervisor(
        bus=bus,
        console=console,
        chronicle=chronicle,
        muster=muster,
        identity=JobIdentity(
            job=job.name,
            run_id=job.run_id,
            role=settings.role,
            max_restarts=settings.max_restarts,
            signals=settings.signals_to_handle,
        ),
        state=membership.start(rules, TERM, time.monotonic()),
        prepare=lambda recruit: wide.prepare(recruit, console),
        join=reception.answer if job.joining else None,
        drills=[parse_plan(text) for text in settings.drills],
        drills_allowed=settings.allow_drills or bool(settings.drills),
    )


@dataclass
class _JobWide:
    """The environment that is fixed for the whole job, decided when the first node is prepared."""

    job: Job
    muster: Muster
    decided: dict[str, str] | None = None

    def prepare(self, recruit: Recruit, console: Console) -> Prepare:
        settings = self.job.settings
        assert recruit.facts is not None
        slots = worker_slots(settings.nproc_per_node, recruit.spec, recruit.facts)
        if self.decided is None:
            self.decided, remark = self._decide()
            if remark:
                console.say(f"phoenix-run: {remark}")
        return Prepare(self.decided, slots if recruit.spec.spare else settings.local_spares)

    def _decide(self) -> tuple[dict[str, str], str]:
        """The smallest node decides: the one with the fewest cores for each of its workers."""
        nproc = self.job.settings.nproc_per_node
        known = [
            (r.facts.cores, worker_slots(nproc, r.spec, r.facts), bool(r.spec.host))
            for r in self.muster.recruits.values()
            if r.facts is not None and not r.spec.spare
        ]
        machines = [(cores, slots) for cores, slots, real in known if real] or [
            (min(cores for cores, _, _ in known), sum(slots for _, slots, _ in known))
        ]
        cores, workers = min(machines, key=lambda machine: machine[0] / machine[1])
        inherited = job_environment(self.job.environ, self.job.settings.env, simulated=not self.job.on_hosts)
        return job_wide_environment(inherited, cores=cores, workers_on_machine=workers, workers_per_node=workers)


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
    )


def output_of(settings: RunSettings, logs: Path, node: str, run_id: str, environ: Mapping[str, str]) -> OutputSettings:
    """Where the output of one node's workers goes."""
    torchrun_layout = bool(
        any(settings.redirects.values()) or any(settings.tee.values())
        or settings.duplicate_stdout_filters or settings.duplicate_stderr_filters
    )  # fmt: skip
    base = logs / f"{run_id}_{secrets.token_hex(4)}_{node}"
    return OutputSettings(
        folder=str(logs / node),
        redirects=settings.redirects,
        tees=settings.tee,
        console_local_ranks=settings.local_ranks_filter,
        stdout_filters=settings.duplicate_stdout_filters,
        stderr_filters=settings.duplicate_stderr_filters,
        torchrun_folder=str(base) if torchrun_layout and settings.log_dir != os.devnull else "",
        line_prefix_template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
        role=settings.role,
        files=settings.log_dir != os.devnull,
    )


def bootstrap(job: Job, bus: SupervisorBus, spec: NodeSpec, incarnation: str, keys: KeyPair) -> AgentBootstrap:
    settings = job.settings
    python = job.environ.get("PYTHON_EXEC") or spec.python or sys.executable
    return AgentBootstrap(
        job=job.name,
        node=spec.name,
        index=spec.index,
        term=TERM,
        incarnation=incarnation,
        control_endpoint=bus.control_endpoint,
        output_endpoint=bus.output_endpoint,
        server_key=bus.keys.public,
        public_key=keys.public,
        secret_key=keys.secret,
        environment=job_environment(job.environ, settings.env, simulated=not spec.host),
        cwd=os.getcwd(),
        command=command_of(settings, python),
        output=output_of(settings, job.logs, spec.name, job.run_id, job.environ),
        timeouts=AgentTimeouts(
            heartbeat_interval=timeout("heartbeat_interval"),
            orphan=settings.orphan_timeout,
            connect=timeout("connect"),
            fork_server=timeout("fork_server"),
            drain_output=timeout("drain_output"),
            reap=timeout("reap"),
        ),
        interface=settings.interface,
        port_low=settings.port_range[0],
        port_high=settings.port_range[1],
        simulated=not spec.host and job.joining is None,
    )


def _expected(job: Job) -> preflight.Expected:
    return preflight.Expected(
        phoenix=__version__,
        python=platform.python_version(),
        torch=package_version("torch"),
        interface=job.settings.interface,
    )


def _wants_labels(settings: RunSettings, nodes: int) -> bool:
    """`node:rank|` before lines: on a terminal with several workers, or when asked for."""
    if settings.prefix != "auto":
        return settings.prefix == "always"
    several = nodes > 1 or settings.nproc_per_node != "1"
    return several and sys.stdout.isatty()


def _write_record(job: Job, bus: SupervisorBus) -> None:
    endpoint = bus.control_endpoint.replace(EVERYWHERE, LOOPBACK)
    job.folder.write_record(
        JobRecord(
            job=job.name,
            created=time.time(),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            start_time=start_time(os.getpid()) or 0,
            control_endpoint=endpoint,
            server_key=bus.keys.public,
            argv=tuple(sys.argv),
            cwd=os.getcwd(),
            settings=settings_document(job.settings),
            nodes=tuple(
                JobNode(s.name, s.index, s.host, s.python or sys.executable, str(job.logs / s.name)) for s in job.specs
            ),
        )
    )
