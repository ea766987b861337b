"""Runs an opened job to its end: bus, supervisor, records; then the last words and the cleaning up."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from phoenix_launch import __version__
from phoenix_launch.bootstrap import AgentBootstrap
from phoenix_launch.bus.keys import KeyPair, new_key_pair
from phoenix_launch.bus.supervisor import Peer, PeerKind, SupervisorBus
from phoenix_launch.errors import StartError, SupersededError
from phoenix_launch.hosts import preflight
from phoenix_launch.hosts.facts import package_version, script_digest
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.job import membership
from phoenix_launch.job.drills import parse_plan
from phoenix_launch.job.environment import JobIdentity
from phoenix_launch.job.last_words import write_error_file
from phoenix_launch.job.state import Rules
from phoenix_launch.node.arrival import EVERYWHERE
from phoenix_launch.node.runtime_folder import make_runtime_folder
from phoenix_launch.process_table import start_time
from phoenix_launch.records.folders import (
    ClientKeys,
    JobFolder,
    JobNode,
    JobRecord,
    settings_document,
)
from phoenix_launch.settings import RunSettings, timeout
from phoenix_launch.supervision.additions import Additions
from phoenix_launch.supervision.chronicle import Chronicle
from phoenix_launch.supervision.console import Console
from phoenix_launch.supervision.guests import Guests
from phoenix_launch.supervision.handover import Keeper, heritage_of
from phoenix_launch.supervision.muster import Muster
from phoenix_launch.supervision.opening import TERM, Job, bootstrap, command_of
from phoenix_launch.supervision.preparation import Preparation
from phoenix_launch.supervision.reception import Reception
from phoenix_launch.supervision.signals import SignalPipe
from phoenix_launch.supervision.supervisor import Supervisor

LOOPBACK = "127.0.0.1"


Made = Callable[[int], Supervisor]  # the supervisor of a term
Heir = Callable[[SupervisorBus, Made], Supervisor]


def run_job(job: Job, started: Callable[[], None] | None = None, heir: Heir | None = None) -> int:
    """Open the bus, run the supervisor, clean up. `started` is called when all nodes were found fit. `heir`: takes over a job
    that there is already, and makes its supervisor when it may."""
    with SignalPipe(job.settings.signals_to_handle) as signals, _unstarted_removed(job.folder):
        runtime = _runtime_folder(job.environ)
        try:
            expected = {job.joining.keys.public: Peer(PeerKind.JOINER)} if job.joining else {}
            bus = SupervisorBus(
                job.name, job.keys, job.address, port=job.port, ports=job.settings.port_range, allowed=expected
            )
            try:
                return _run_on(job, bus, runtime, signals, started, heir)
            finally:
                bus.close(timeout("probe") if job.joining else 0.0)  # hosts that joined are still to hear of the end
        finally:
            shutil.rmtree(runtime, ignore_errors=True)


@contextlib.contextmanager
def _unstarted_removed(folder: JobFolder) -> Iterator[None]:
    """A job that could not even begin leaves no folder behind."""
    try:
        yield
    finally:
        folder.remove_unstarted()


def _run_on(
    job: Job,
    bus: SupervisorBus,
    runtime: Path,
    signals: SignalPipe,
    started: Callable[[], None] | None,
    heir: Heir | None,
) -> int:
    settings = job.settings
    console = Console(bus.output, bus.decode_output, labels=_wants_labels(settings, len(job.specs)))
    chronicle = Chronicle.open(job.folder, console, [spec.host for spec in job.specs], settings)
    chronicle.counters = bus.counters

    def made(term: int) -> Supervisor:
        supervisor = _supervisor(job, bus, console, chronicle, runtime, term)
        _write_record(job, bus, term)
        return supervisor

    supervisor = made(TERM) if heir is None else heir(bus, made)
    if started is not None:
        supervisor.on_start = started
    console.start()
    try:
        if heir is None:
            job.folder.write_private("heritage", msgspec.json.encode(heritage_of(job)))
            chronicle.started(job.specs, settings, job.logs)
            supervisor.muster.begin(job.specs, supervisor.clock.now)
        for remark in settings.remarks:
            console.say(f"phoenix-run: {remark}")
        if settings.detach:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            outcome = supervisor.run(signals)
        except SupersededError:
            signals.close()  # nothing here is ours any more
            raise
        except BaseException:
            supervisor.close()
            signals.close()
            raise
        supervisor.close()  # while a signal ends nothing: whoever is left is still to be told
        signals.close()
        chronicle.finished(supervisor.state, outcome)
        job.folder.remove_client_keys()
        write_error_file(job.environ.get("TORCHELASTIC_ERROR_FILE", ""), outcome)
        return outcome.exit_code
    except StartError as error:
        chronicle.refused(supervisor.state, error)
        job.folder.remove_client_keys()
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
    term: int,
) -> Supervisor:
    settings = job.settings
    status, control = new_key_pair(), new_key_pair()
    bus.allow(status.public, Peer(PeerKind.STATUS))
    bus.allow(control.public, Peer(PeerKind.CONTROL))
    job.folder.write_client_keys("status", ClientKeys(status.public, status.secret))
    job.folder.write_client_keys("control", ClientKeys(control.public, control.secret))

    def made(spec: NodeSpec, incarnation: str, keys: KeyPair) -> AgentBootstrap:
        given = bootstrap(job, bus, term, spec, incarnation, keys)
        chronicle.outputs[spec.index] = given.output
        return given

    def named(spec: NodeSpec) -> None:
        chronicle.hosts[spec.index] = spec.host
        record = job.folder.read_record()
        if all(node.index != spec.index for node in record.nodes):
            job.folder.write_record(msgspec.structs.replace(record, nodes=(*record.nodes, _job_node(job, spec))))

    muster = Muster(
        bus=bus,
        expected=_expected(job),
        nproc=settings.nproc_per_node,
        python=sys.executable,
        ssh=settings.ssh,
        control_folder=str(runtime),
        bootstrap=made,
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
        state=membership.start(_rules(job), term, time.monotonic()),
        keeper=Keeper(job.folder, muster, wide, term),
        additions=Additions(muster, job.on_hosts, named),
        prepare=lambda recruit, state, now: wide.prepare(recruit, state, now, console.say),
        guests=Guests(bus, reception.answer if job.joining else None),
        drills=[parse_plan(text) for text in settings.drills],
        drills_allowed=settings.allow_drills or bool(settings.drills),
    )


def _rules(job: Job) -> Rules:
    settings = job.settings
    seats = job.joining.seats if job.joining else None
    training = sum(not spec.spare for spec in job.specs)
    return Rules(
        seats_min=seats[0] if seats else training,
        seats_max=seats[1] if seats else training,
        max_restarts=settings.max_restarts,
        max_failures_per_host=settings.max_failures_per_host,
        heartbeat_timeout=settings.heartbeat_timeout,
        probe_timeout=timeout("probe"),
        join_timeout=settings.join_timeout,
        hang_timeout=settings.hang_timeout,
        first_step_timeout=max(timeout("first_step"), settings.hang_timeout),
        stacks_timeout=timeout("stacks") + timeout("heartbeat_interval"),
        spare_timeout=settings.spare_timeout,
        start_timeout=timeout("fork_server") + timeout("park"),
        abort_timeout=timeout("abort"),
        leave_timeout=timeout("leave_step"),
        left_behind_timeout=timeout("left_behind"),
        shutdown_timeout=settings.shutdown_timeout,
        teardown_timeout=timeout("reap") + timeout("drain_output"),
        replicas=settings.replicas,
        replica_distance=settings.replica_distance,
        snapshot_interval=settings.snapshot_interval,
        save_timeout=timeout("emergency_save") if settings.checkpoint_dir else 0.0,
        verify_replicas=settings.verify_replicas,
        replace_stragglers=settings.replace_stragglers,
        worker_exit_code=settings.exit_code == "worker",
        master_port=settings.master_port or 0 if not settings.standalone and not seats else 0,
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


def _write_record(job: Job, bus: SupervisorBus, term: int) -> None:
    endpoint = bus.control_endpoint.replace(EVERYWHERE, LOOPBACK)
    if term > TERM:
        before = job.folder.read_record()
        job.folder.write_record(
            msgspec.structs.replace(
                before, term=term, hostname=socket.gethostname(), pid=os.getpid(),
                start_time=start_time(os.getpid()) or 0, control_endpoint=endpoint, server_key=bus.keys.public,
            )
        )  # fmt: skip
        return
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
            cwd=job.cwd,
            settings=settings_document(job.settings),
            nodes=tuple(_job_node(job, spec) for spec in job.specs),
        )
    )


def _job_node(job: Job, spec: NodeSpec) -> JobNode:
    return JobNode(spec.name, spec.index, spec.host, spec.python or sys.executable, str(job.logs_of(spec)))
