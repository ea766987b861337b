"""From settings to a running job: its folder, keys, bus and nodes; then the supervisor's loop; then the last words."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from phoenix_launch import __version__, hosts, membership, preflight
from phoenix_launch.arrival import EVERYWHERE
from phoenix_launch.bus import Peer, PeerKind, SupervisorBus, new_key_pair
from phoenix_launch.chronicle import Chronicle
from phoenix_launch.console import Console
from phoenix_launch.detach import detached
from phoenix_launch.drills import check_targets, parse_plan
from phoenix_launch.environment import JobIdentity
from phoenix_launch.errors import StartError, UsageError
from phoenix_launch.facts import interface_addresses, package_version, script_digest
from phoenix_launch.job import TERM, Job, bootstrap, command_of
from phoenix_launch.job_state import Rules
from phoenix_launch.jobs import ClientKeys, JobFolder, JobNode, JobRecord, jobs_root, new_job_id, settings_document
from phoenix_launch.last_words import write_error_file
from phoenix_launch.muster import Muster
from phoenix_launch.preparation import Preparation
from phoenix_launch.processes import start_time
from phoenix_launch.reception import Reception
from phoenix_launch.runtime_folder import make_runtime_folder
from phoenix_launch.settings import RunSettings, check_timeouts, timeout
from phoenix_launch.signals import SignalPipe
from phoenix_launch.supervisor import Supervisor, allow_commands

LOOPBACK = "127.0.0.1"


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
    check_targets(map(parse_plan, settings.drills), [spec.name for spec in specs], _known_ranks(settings, specs))
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


def _known_ranks(settings: RunSettings, specs: tuple[hosts.NodeSpec, ...]) -> int:
    """How many there will be; 0 when only the hosts themselves can tell."""
    each = int(settings.nproc_per_node) if settings.nproc_per_node.isdecimal() else 0
    counts = [spec.slots or each for spec in specs if not spec.spare]
    return sum(counts) if all(counts) else 0


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
    try:
        runtime = _runtime_folder(job.environ)
        try:
            expected = {job.joining.keys.public: Peer(PeerKind.JOINER)} if job.joining else {}
            bus = SupervisorBus(
                job.name, job.keys, job.address, port=job.port, ports=job.settings.port_range, allowed=expected
            )
            try:
                return _run_on(job, bus, runtime, started)
            finally:
                bus.close(timeout("probe") if job.joining else 0.0)  # hosts that joined are still to hear of the end
        finally:
            shutil.rmtree(runtime, ignore_errors=True)
    finally:
        job.folder.remove_unstarted()


def _run_on(job: Job, bus: SupervisorBus, runtime: Path, started: Callable[[], None] | None) -> int:
    settings = job.settings
    console = Console(bus.output, bus.decode_output, labels=_wants_labels(settings, len(job.specs)))
    chronicle = Chronicle.open(job.folder, console, [spec.host for spec in job.specs], settings)
    chronicle.counters = bus.counters
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
            try:
                supervisor.muster.begin(job.specs, supervisor.clock.now)
                outcome = supervisor.run(signals)
            finally:
                supervisor.close()  # while a signal ends nothing: whoever is left is still to be told
        chronicle.finished(supervisor.state, outcome, job.logs)
        write_error_file(job.environ.get("TORCHELASTIC_ERROR_FILE", ""), outcome)
        return outcome.exit_code
    except StartError as error:
        chronicle.refused(supervisor.state, error)
        raise
    finally:
        console.finish(timeout("exit_output"))


def _runtime_folder(environ: Mapping[str, str]) -> Path:
    try:
        return make_runtime_folder(environ)
    except OSError as error:
        raise StartError(
            f"there is no place for sockets: {error}", hint="set TMPDIR to a folder that can be written"
        ) from None


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
        start_timeout=timeout("fork_server") + timeout("park"),
        shutdown_timeout=settings.shutdown_timeout,
        teardown_timeout=timeout("reap") + timeout("drain_output"),
        worker_exit_code=settings.exit_code == "worker",
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
    wide = Preparation(job, muster)
    reception = Reception(
        muster,
        muster.bootstrap,
        list(job.specs),
        patience=settings.heartbeat_timeout + timeout("resend"),
        is_gone=muster.is_gone,
    )
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
        prepare=lambda recruit: wide.prepare(recruit, console.say),
        join=reception.answer if job.joining else None,
        drills=[parse_plan(text) for text in settings.drills],
        drills_allowed=settings.allow_drills or bool(settings.drills),
    )


def _expected(job: Job) -> preflight.Expected:
    return preflight.Expected(
        phoenix=__version__,
        python=platform.python_version(),
        torch=package_version("torch"),
        script_digest=script_digest(command_of(job.settings, sys.executable), os.getcwd())[0],
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
                JobNode(s.name, s.index, s.host, s.python or sys.executable, str(job.logs_of(s))) for s in job.specs
            ),
        )
    )
