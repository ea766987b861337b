"""The same command on every host (Slurm, Kubernetes, by hand): one of them supervises, the others bring themselves in.

Who owns the endpoint's address supervises; of several on one machine, the first. What they all hold is PHOENIX_JOB_KEY.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from phoenix_launch.bootstrap import AgentBootstrap
from phoenix_launch.bus.client import ClientLink
from phoenix_launch.bus.keys import KeyPair, derived_key_pair
from phoenix_launch.bus.supervisor import bracketed
from phoenix_launch.errors import EXIT_SIGNAL_BASE, EXIT_WORKER_FAILED, PortInUseError, StartError, UsageError
from phoenix_launch.hosts import remote
from phoenix_launch.hosts.environment import job_environment
from phoenix_launch.hosts.facts import count_gpus, interface_addresses, visible_gpus
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.messages import ENVELOPES, Body, JobEnded, JoinReply, JoinRequest, Leaving
from phoenix_launch.node.cgroup import ControlGroup
from phoenix_launch.records.folders import JobFolder, jobs_root, new_job_id
from phoenix_launch.settings import RunSettings, timeout
from phoenix_launch.supervision.conduct import run_job
from phoenix_launch.supervision.doorstep import EVENTS, Doorstep, look
from phoenix_launch.supervision.muster import worker_count
from phoenix_launch.supervision.opening import Job, Joining
from phoenix_launch.supervision.signals import SignalPipe
from phoenix_launch.wire import JOINING

_KEY = "PHOENIX_JOB_KEY"
_TURN = 0.1  # seconds between looks at bus, signals and guardian
_LEAVE_AFTER = 1.0  # a signal to all hosts reaches the supervisor too, which then ends the job in order


def launch_joined(settings: RunSettings, environ: Mapping[str, str]) -> int:
    """Supervise or join, whichever this host is to do; returns the job's exit code."""
    host, port = settings.join_endpoint
    key = environ.get(_KEY, "")
    if not key:
        raise UsageError(
            f"a job on several hosts needs {_KEY}, so that nobody else can join it",
            hint=f"make one with `phoenix-run keygen` and set {_KEY} to it on every host",
        )
    supervisor, joiner = derived_key_pair(key, "supervisor"), derived_key_pair(key, "join")
    address = _resolved(host, port)
    gpus = visible_gpus(count_gpus(), environ.get("CUDA_VISIBLE_DEVICES"))
    slots = worker_count(settings.nproc_per_node, cores=ControlGroup().cores(), gpus=gpus)
    if address in _own_addresses() and settings.rdzv_conf.get("is_host", "1").lower() not in ("0", "false", "no"):
        if _is_free(address, port):
            try:
                return _supervise(settings, environ, address, port, supervisor, joiner)
            except PortInUseError:
                pass  # another one that was started at the same moment has it now
        print(f"phoenix-run: {host}:{port} is taken on this machine: joining", file=sys.stderr)
    return Joiner(settings, environ, f"tcp://{bracketed(address)}:{port}", supervisor.public, joiner, slots).run()


def _supervise(
    settings: RunSettings, environ: Mapping[str, str], address: str, port: int, keys: KeyPair, joiner: KeyPair
) -> int:
    root = jobs_root(environ)
    folder = JobFolder.create(root, new_job_id(settings.script, root, settings.job_name))
    index = max(0, settings.node_rank)
    own = NodeSpec(index=index, name=socket.gethostname(), group_rank=settings.node_rank)
    joining = Joining(settings.nnodes, joiner)
    return run_job(Job(settings, environ, folder, (own,), keys, address, port, joining))


def _resolved(host: str, port: int) -> str:
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UsageError(
            f"cannot resolve {host} of the rendezvous endpoint: {error.strerror}",
            hint="is it spelled right? `getent hosts NAME` shows what this machine knows",
        ) from None


def _own_addresses() -> set[str]:
    return {address for addresses in interface_addresses().values() for address in addresses}


def _is_free(address: str, port: int) -> bool:
    """Whether nobody on this machine holds the endpoint yet, so that no folder and no keys are made in vain."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
        except OSError:
            return False
    return True


@dataclass
class Joiner:
    """The other hosts' side: ask, start the agent, pass signals on, end as the job ends."""

    settings: RunSettings
    environ: Mapping[str, str]
    endpoint: str
    server_key: str
    keys: KeyPair
    slots: int
    patience: float = timeout("connect")  # seconds with somebody who does not know our key: an older job may still go

    def run(self) -> int:
        link = ClientLink(
            JOINING, self.endpoint, self.server_key, self.keys, timeout("command"), ENVELOPES, events=int(EVENTS)
        )
        handle: remote.NodeHandle | None = None
        try:
            with SignalPipe(self.settings.signals_to_handle) as signals:
                bootstrap = self._ask(link, signals)
                link.unwatch()
                if isinstance(bootstrap, int):
                    return bootstrap
                kept = f"; logs in {bootstrap.output.folder}" if bootstrap.output.files else ""
                print(f"phoenix-run: joined job {bootstrap.job} as {bootstrap.node}{kept}", file=sys.stderr)
                handle = remote.start_local(bootstrap, sys.executable, dies_with_us=True)
                return self._attend(link, signals, handle, bootstrap.incarnation)
        finally:
            link.close()
            if handle is not None:
                handle.close()

    def _ask(self, link: ClientLink[Body], signals: SignalPipe) -> AgentBootstrap | int:
        """Ask until the supervisor is there and answers; an exit code when a signal or the job's end came first."""
        request = JoinRequest(
            hostname=socket.gethostname(),
            node_rank=self.settings.node_rank,
            incarnation=uuid.uuid4().hex,
            slots=self.slots,
            python=self.environ.get("PYTHON_EXEC") or sys.executable,
            cwd=os.getcwd(),
            environment=job_environment(self.environ, self.settings.env, simulated=True),
            log_dir=os.path.abspath(self.settings.log_dir) if self.settings.log_dir else "",
        )
        end = time.monotonic() + self.settings.join_timeout
        asked = 0.0
        doorstep = Doorstep()
        while time.monotonic() < end:
            if time.monotonic() - asked > timeout("resend"):
                asked = time.monotonic()
                link.say(request)
            reply = link.listen(_TURN)
            look(link.monitor, doorstep, time.monotonic())
            if doorstep.shut_out(time.monotonic(), self.patience):
                break
            if isinstance(reply, JobEnded):
                print(reply.text or "phoenix-run: the job ended before it took this host", file=sys.stderr)
                return reply.exit_code
            if isinstance(reply, JoinReply):
                if reply.bootstrap is None:
                    raise _not_taken(reply.refusal, "see --node-rank")
                return reply.bootstrap
            if numbers := signals.take():
                return EXIT_SIGNAL_BASE + numbers[0]
        if doorstep.since is not None:
            raise StartError(
                f"somebody listens at {self.endpoint} but does not know this key",
                hint="is PHOENIX_JOB_KEY the same on every host? (or another job or program has this port)",
            )
        raise StartError(
            f"nobody answers at {self.endpoint} since {self.settings.join_timeout:g} s",
            hint="is phoenix-run started on the host of the endpoint, with the same PHOENIX_JOB_KEY?",
        )

    def _attend(self, link: ClientLink[Body], signals: SignalPipe, handle: remote.NodeHandle, incarnation: str) -> int:
        """Until the job ends, the agent ends, or a signal says to go."""
        stopped, leave_at = 0, 0.0
        ended_at = 0.0
        while True:
            said = link.listen(_TURN)
            if isinstance(said, JobEnded):
                _wait_for_end(handle, timeout("reap"))
                if said.text and not stopped:
                    print(said.text, file=sys.stderr)
                return said.exit_code if not stopped else EXIT_SIGNAL_BASE + stopped
            if isinstance(said, JoinReply) and said.refusal:
                raise _not_taken(said.refusal, "mend it and start the same command here again")
            now = time.monotonic()
            for number in signals.take():
                stopped = stopped or number
                leave_at = leave_at or now + _LEAVE_AFTER
            if leave_at and now >= leave_at:
                leave_at = now + timeout("resend")
                link.say(Leaving(incarnation, stopped))
            for line in handle.read_lines():
                print(line, file=sys.stderr)
            if handle.poll() is not None:
                ended_at = ended_at or now
                if now - ended_at > timeout("probe"):  # the supervisor's last word may still be on its way
                    if stopped:
                        return EXIT_SIGNAL_BASE + stopped
                    print("phoenix-run: this node was given up, or its supervisor is gone", file=sys.stderr)
                    return EXIT_WORKER_FAILED


def _not_taken(why: str, hint: str) -> StartError:
    return StartError(f"the job does not take this host: {why}", hint=hint)


def _wait_for_end(handle: remote.NodeHandle, seconds: float) -> None:
    """The agent was told to leave by its supervisor: give it the time to do so."""
    poller = select.poll()
    poller.register(handle.fileno(), select.POLLIN | select.POLLHUP)
    end = time.monotonic() + seconds
    while not handle.at_end and (left := end - time.monotonic()) > 0:
        poller.poll(left * 1000)
        handle.read_lines()
