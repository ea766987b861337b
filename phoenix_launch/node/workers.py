"""Starts, parks, tells and ends the processes of a node as `node_state` decides, and tells it what became of them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from phoenix_launch import channel
from phoenix_launch.bootstrap import AgentBootstrap
from phoenix_launch.clock import OwnClock
from phoenix_launch.errors import ProtocolError
from phoenix_launch.local_messages import Become, BecomeStore, ForkServerReady, Parked, StoreUp
from phoenix_launch.messages import Drill, RankReport, StoreReport
from phoenix_launch.node.actions import (
    Action,
    EndTree,
    Forking,
    HostStore,
    ParkProcess,
    PassSignal,
    RunWorker,
    StartForkServer,
    StartStoreHost,
    Sweep,
)
from phoenix_launch.node.cgroup import ControlGroup, OomWatch
from phoenix_launch.node.checkpoint_link import CheckpointLink
from phoenix_launch.node.endings import Endings
from phoenix_launch.node.fork_link import LOCAL_SECONDS, ForkServer
from phoenix_launch.node.fresh_process import Started, start
from phoenix_launch.node.harm import harm
from phoenix_launch.node.numa import Machine, bind
from phoenix_launch.node.output import OutputPump, SpareLabel, WorkerLabel
from phoenix_launch.node.owned_processes import OwnedProcesses
from phoenix_launch.node.poll_loop import PollLoop
from phoenix_launch.node.process import NodeProcess, read_error_file
from phoenix_launch.node.report import rank_report
from phoenix_launch.node.runtime_support import RuntimeSupport
from phoenix_launch.node.stacks import StackCollector, asked
from phoenix_launch.node.state import NodeState
from phoenix_launch.node.worker_setup import (
    NodePlace,
    WorkerSetupError,
    arguments,
    command_line,
    error_file,
    near_cpus,
    node_environment,
    worker_environment,
)
from phoenix_launch.process_table import ProcessStat, look_up
from phoenix_launch.processes import kill_descendants
from phoenix_launch.timeouts import timeout

ABANDONED_SECONDS: Final = 1.0  # for what is left in a pipe that is read no longer
_CANNOT_EXECUTE: Final = 126  # as shells have it
_NOT_FOUND: Final = 127


class Workers:
    """All processes of this node. Everything happens in the agent's loop; nothing here waits."""

    def __init__(
        self,
        loop: PollLoop,
        bootstrap: AgentBootstrap,
        place: NodePlace,
        address: str,
        runtime: Path,
        state: NodeState,
        pump: OutputPump,
        clock: OwnClock,
        remark: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._bootstrap = bootstrap
        self._place = place
        self._address = address
        self._runtime = runtime
        self._state = state
        self._pump = pump
        self._clock = clock
        self._remark = remark
        self._endings = Endings(bootstrap.timeouts.reap, remark)
        self._owned = OwnedProcesses(loop, self._endings, lambda: state.parking, self._ended)
        self._fork = ForkServer(
            loop, bootstrap.command, bootstrap.timeouts.fork_server, self._owned, self._endings, pump, clock,
            self._fork_ready, lambda reason: state.on_fork_server_gone(reason, clock.now),
        )  # fmt: skip
        checkpoint = CheckpointLink(loop, bootstrap, address, runtime, self._owned, self._endings, pump, clock, remark)
        self.support = RuntimeSupport(loop, bootstrap, runtime, state, checkpoint, remark)
        self.stacks = StackCollector(place.socket_path)
        self._groups = ControlGroup()
        self._oom = OomWatch(self._groups.oom_kills())

    # --- what was decided --------------------------------------------------------------------------------------------

    def act(self, action: Action) -> None:
        match action:
            case StartForkServer():
                self._fork.start(self.environment, self._bootstrap.cwd)
            case ParkProcess(key=key):
                self._park(key)
            case StartStoreHost(key=key):
                self._start_store_host(key)
            case RunWorker():
                self._run(action)
            case HostStore():
                self._host_store(action)
            case PassSignal(key=key, signal=number):
                self._pass_signal(key, number)
            case EndTree(key=key):
                self._endings.end(key, self._clock.now)
            case Sweep():
                self._endings.sweep(self._clock.now)

    @property
    def environment(self) -> dict[str, str]:
        prepare = self._state.prepare
        return node_environment(self._bootstrap, prepare.environment if prepare else {}, self._place)

    def _park(self, key: int) -> None:
        process = NodeProcess(key)
        self._owned.add(process)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
        self._fork.park(key, theirs.fileno(), out_write, err_write)
        theirs.close()
        os.close(out_write)
        os.close(err_write)
        process.output = (out_read, err_read)
        process.deadline = self._clock.now + timeout("park")
        self._listen(process, ours)

    def _start_store_host(self, key: int) -> None:
        process = NodeProcess(key)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        descriptor = theirs.fileno()
        argv = [self._bootstrap.command.python, "-u", "-m", "phoenix_runtime.store_host", str(descriptor)]
        try:
            started = start(argv, self.environment, self._bootstrap.cwd, (descriptor,))
        except OSError as error:
            ours.close()
            self._owned.add(process)
            self._remark(f"a store host cannot be started: {error}")
            self._state.on_exit(key, _NOT_FOUND, self._clock.now)
            return
        finally:
            theirs.close()
        self._own(process, started)
        self._listen(process, ours)
        self._pump.attach(key, started.stdout, started.stderr, SpareLabel(process.pid))
        self._state.on_started(key, process.pid)

    def _run(self, action: RunWorker) -> None:
        process = self._owned.get(action.key) or NodeProcess(action.key)
        self._owned.add(process)
        order, command = action.order, self._bootstrap.command
        label = WorkerLabel(order.rank, order.local_rank, action.generation, action.attempt)
        try:
            environment = worker_environment(
                self.environment, order, command, self._error_file(process, action), process.make_page()
            )
            cpus = near_cpus(command, self.environment.get("CUDA_VISIBLE_DEVICES"), order.local_rank, Machine())
            if cpus and not action.afresh:
                bind(process.pid, cpus)
        except (WorkerSetupError, OSError) as error:
            self._fail(process, label, 1, str(error))
            return
        if not action.afresh:
            self._pump.relabel(action.key, label)
            self._owned.claim(process)
            self._tell(process, Become(environment, arguments(command, order.local_rank)))
            process.hang_up(self._loop)
            return
        argv = command_line(command, order.local_rank)
        try:
            started = start(argv, environment, self._bootstrap.cwd, cpus=cpus)
        except OSError as error:
            code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_EXECUTE
            reason = f"{error.filename or argv[0]} cannot be started: {error.strerror or error}"
            self._fail(process, label, code, reason)
            return
        self._own(process, started)
        self._pump.attach(action.key, started.stdout, started.stderr, label)
        self._state.on_started(action.key, process.pid)

    def _error_file(self, process: NodeProcess, action: RunWorker) -> Path:
        path = error_file(self._bootstrap.output, self._runtime, action.order, action.generation, action.attempt)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.unlink(missing_ok=True)
        except OSError:  # a full disk, a folder that cannot be written: the worker's words still have a place
            path = self._runtime / f"{action.order.rank}.{action.generation}.error.json"
        process.error_file = path
        return path

    def _fail(self, process: NodeProcess, label: WorkerLabel, code: int, words: str) -> None:
        """It cannot become what it should: reported as the end of a worker with these last words."""
        process.tail, process.verdict = f"phoenix-run: {words}", code
        if process.pid:
            self._pump.relabel(process.key, label)
            self._endings.end(process.key, self._clock.now)
        else:  # an output that ends at once: whoever waits for what it wrote shall not wait in vain
            (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
            os.close(out_write)
            os.close(err_write)
            self._pump.attach(process.key, out_read, err_read, label)
            self._never_lived(process, code)

    def _host_store(self, action: HostStore) -> None:
        process = self._owned[action.key]
        process.hosting = action.generation
        patience = self._bootstrap.timeouts.fork_server if self._state.forking is Forking.SPAWN else timeout("store")
        process.deadline = self._clock.now + patience
        low, high = self._bootstrap.port_low, self._bootstrap.port_high
        self._tell(process, BecomeStore(self._address, action.port, low, high))

    def _pass_signal(self, key: int, number: int) -> None:
        process = self._owned[key]
        if process.pid <= 0 or process.code is not None:
            return
        try:  # it leads its group, and its pid cannot be anybody else's while its exit code was not collected
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            return

    def _tell(self, process: NodeProcess, message: Become | BecomeStore) -> None:
        if process.control is None:
            return
        try:
            channel.send(process.control, message)
        except OSError:
            self._endings.end(process.key, self._clock.now)  # it hangs or is gone: its exit is reported either way

    # --- what happened -----------------------------------------------------------------------------------------------

    def _own(self, process: NodeProcess, started: Started) -> None:
        process.popen = started.popen
        self._owned.register(process, started.popen.pid)

    def _listen(self, process: NodeProcess, control: socket.socket) -> None:
        control.settimeout(LOCAL_SECONDS)
        process.control = control
        self._loop.watch(control.fileno(), partial(self._hear, process))

    def _hear(self, process: NodeProcess) -> None:
        if process.control is None:
            return
        received = None
        try:
            received = channel.receive(process.control)
        except (OSError, ProtocolError) as error:
            self._remark(f"a waiting process broke off: {error}")
        for descriptor in received[1] if received else ():
            os.close(descriptor)
        message = received[0] if received else None
        if isinstance(message, Parked) and not process.pid:
            self._parked(process, message.pid)
        elif isinstance(message, StoreUp) and process.hosting is not None:
            process.deadline = None
            report = StoreReport(process.hosting, self._address, message.port, message.error)
            self._state.on_store_up(process.key, report)
        else:
            process.hang_up(self._loop)
            if not process.pid:
                self._never_lived(process)

    def _parked(self, process: NodeProcess, pid: int) -> None:
        process.deadline = None
        entry, code = look_up(pid), self._owned.collected(pid)
        if code is not None or entry is None or entry.parent != os.getpid():
            process.hang_up(self._loop)
            self._never_lived(process, code if code is not None else 1)
            return
        self._owned.register(process, pid)
        self._pump.attach(process.key, process.output[0], process.output[1], SpareLabel(pid))
        process.output = ()
        self._state.on_parked(process.key, pid)

    def _never_lived(self, process: NodeProcess, code: int = 1) -> None:
        process.code = code
        self._state.on_exit(process.key, code, self._clock.now)

    def _ended(self, process: NodeProcess, code: int) -> None:
        if process.hosting is not None:
            self._hear(process)  # its end may be noticed before what it has said of it
        process.hang_up(self._loop)
        now = self._clock.now
        process.drain_until = now + self._bootstrap.timeouts.drain_output
        if process.service is not None:
            process.service.ended(process, code)
            return
        self.support.ended(process.key)
        process.oom_killed = self._oom.killed(code, self._groups.oom_kills())
        process.error = read_error_file(process.error_file)
        process.tail = self._pump.tail(process.key) or process.tail
        if process.verdict is not None:
            code = process.verdict
        self._state.on_exit(process.key, code, now)

    def _fork_ready(self, ready: ForkServerReady) -> None:
        for text in ready.remarks:
            self._remark(text)
        if ready.fork_unsafe:
            self._remark(f"processes cannot be forked here, each worker is started afresh: {ready.fork_unsafe}")
        self._state.on_fork_server_up(ready.fork_unsafe)

    # --- from time to time -------------------------------------------------------------------------------------------

    @property
    def urgent(self) -> bool:
        """Whether `advance` has something to do at once."""
        return self._endings.fresh

    @property
    def busy(self) -> bool:
        """Whether `advance` has something to do soon."""
        return self._endings.pending or any(p.drain_until is not None and not p.drained for p in self._owned)

    def next_deadline(self) -> float | None:
        return min((p.deadline for p in self._owned if p.deadline is not None), default=None)

    def advance(self) -> None:
        """What needs no event: exits of strangers, trees that end, output that is still read, deadlines."""
        self._owned.collect()
        now = self._clock.now
        if self._endings.pending:
            done = self._owned.round(now)
            for key in done.cleared:
                if key > 0:
                    self._state.on_cleared(key)
            if done.swept:
                self._state.on_swept()
        for process in self._owned:
            if process.deadline is not None and now >= process.deadline:
                self._overdue(process)
            if process.drain_until is not None and not process.drained:
                self._drain(process, process.drain_until, now)
            if process.key not in self._state.members:
                self._owned.drop(process)

    def _overdue(self, process: NodeProcess) -> None:
        process.deadline = None
        if process.service is not None:
            process.service.overdue(process)
        elif process.hosting is not None:
            report = StoreReport(process.hosting, self._address, 0, "the store did not start in time")
            self._state.on_store_up(process.key, report)
            self._endings.end(process.key, self._clock.now)
        elif not process.pid:
            process.hang_up(self._loop)
            self._never_lived(process)

    def _drain(self, process: NodeProcess, until: float, now: float) -> None:
        process.drained = self._pump.finished(process.key) or now >= until + ABANDONED_SECONDS
        if now >= until:
            self._pump.abandon(process.key)
        process.tail = self._pump.tail(process.key) or process.tail
        process.error = process.error or read_error_file(process.error_file)
        if process.drained:
            self._pump.forget(process.key)
            process.close(self._loop)

    def read_last_words(self) -> None:
        for member in self._state.workers():
            process = self._owned[member.key]
            process.tail = self._pump.tail(process.key) or process.tail

    def rank_reports(self) -> tuple[RankReport, ...]:
        now, said = self._clock.now, self.support.said
        return tuple(rank_report(m, self._owned[m.key], said(m.key), now) for m in self._state.workers())

    def save_stacks(self) -> None:
        able = asked(self._state.workers(), self._owned, self.support.said)
        self.stacks.begin(able, self._clock.now)

    def harm(self, drill: Drill) -> str:
        return harm(drill, self._state, self._owned, self.support, self._groups)

    def kill(self, rank: int | None = None) -> None:
        """SIGKILL to one worker, or to all, and to nothing of their trees."""
        for member in self._state.workers():
            if member.order is not None and rank in (None, member.order.rank) and member.alive and member.pid > 0:
                process = self._owned[member.key]
                if process.pidfd >= 0:
                    signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)

    def end_everything(self) -> list[ProcessStat]:
        """Nothing below this process lives any more; returns what would not die."""
        self._fork.close()
        self.support.close()
        for process in self._owned:
            process.hang_up(self._loop)
        return kill_descendants(self._bootstrap.timeouts.reap)
