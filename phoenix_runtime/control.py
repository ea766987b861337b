"""A worker's line to its agent: what this process says of itself, and what the job wants of it.

Threads: `phoenix-control` hears the agent and breaks the communicators when a notice comes; whoever has something new to say
sends it; the script's main thread waits here for what it needs to know.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import msgspec

from phoenix_launch import channel
from phoenix_launch.errors import ProtocolError
from phoenix_launch.local_messages import WorkerDrill, WorkerPlan, WorkerReport
from phoenix_launch.messages import PlanPhase, RuntimeReport
from phoenix_launch.timeouts import timeout
from phoenix_launch.wire import NO_GENERATION, Generation
from phoenix_runtime import link, stacks
from phoenix_runtime.drills import DRILLS

AGENT: Final = "PHOENIX_AGENT"  # the path of the agent's socket
_SEND_LIMIT: Final = struct.Struct("@ll")


class SupersededError(Exception):
    """Another failure came: what was agreed upon for this generation is of no use any more."""


class AgentGoneError(RuntimeError):
    """The agent ended. So will this process, before it can do any harm."""


class JobFault(Exception):
    """Why a step is aborted: a process of the job failed."""


class Control:
    """One a process.

    Args:
        sock: connected to the agent.
        abort: takes every thread of this process out of every collective; returns what is stuck. Called by our thread.
        starts_alone: whether, with this plan, the process has no communicators yet, so that there is nothing to abort.
        halt: whether all ranks are to come to one version and stay. Called by our thread with each plan.
    """

    def __init__(
        self,
        sock: socket.socket,
        abort: Callable[[BaseException], tuple[str, ...]],
        starts_alone: Callable[[WorkerPlan], bool],
        halt: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._sock, self._abort, self._starts_alone, self._halt = sock, abort, starts_alone, halt
        self._sending = threading.Lock()
        self._said = RuntimeReport()
        self._changed = threading.Condition()
        self._plan: WorkerPlan | None = None
        self._noticed = NO_GENERATION
        self._gone = False
        self._exchange = threading.Lock()  # held by whoever breaks communicators, or puts new ones in their place
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_LIMIT.pack(round(timeout("command")), 0))
        self._thread = threading.Thread(target=self._listen, name="phoenix-control", daemon=True)

    @classmethod
    def connect(
        cls,
        environ: Mapping[str, str],
        abort: Callable[[BaseException], tuple[str, ...]],
        starts_alone: Callable[[WorkerPlan], bool],
        halt: Callable[[bool], None] = lambda _: None,
    ) -> Control | None:
        """Say hello to the agent and hear its first answer; None where there is no agent that answers."""
        path = environ.get(AGENT, "")
        if not path:
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(path)
        except OSError as error:
            sock.close()
            link.remark(f"no agent at {path} ({error.strerror or error}): a failure will restart all workers")
            return None
        stacks.prepare(path)
        control = cls(sock, abort, starts_alone, halt)
        control._thread.start()
        control.report()
        try:
            control.wait_for(lambda plan: True, timeout("command"))
        except (TimeoutError, AgentGoneError) as error:
            link.remark(f"the agent does not answer ({error}): a failure will restart all workers")
            return None
        return control

    # --- what this process says --------------------------------------------------------------------------------------

    @property
    def said(self) -> RuntimeReport:
        return self._said

    def report(self, **changes: Any) -> None:
        """Say it all again, with these changes. Nothing happens when the agent is gone."""
        with self._sending:
            self._said = msgspec.structs.replace(self._said, **changes)
            self._send()
        with self._changed:
            self._changed.notify_all()

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            channel.send(self._sock, WorkerReport(self._said))

    def report_in(self, generation: Generation, **changes: Any) -> None:
        """As `report`, if what this process has joined is still this generation: it would be taken for the next one's else."""
        with self._sending:
            if self._said.joined != generation:
                return
            self._said = msgspec.structs.replace(self._said, **changes)
            self._send()

    # --- what the job wants ------------------------------------------------------------------------------------------

    @property
    def plan(self) -> WorkerPlan:
        """The newest. There is one as soon as `connect` has returned."""
        assert self._plan is not None
        return self._plan

    def wait_for(self, fits: Callable[[WorkerPlan], bool], seconds: float | None = None) -> WorkerPlan:
        """The newest plan, as soon as it fits.

        Without `seconds` it is the supervisor that keeps the time: it replaces or ends whoever waits in vain.

        Raises TimeoutError, AgentGoneError.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._gone or (self._plan is not None and fits(self._plan)), seconds)
            plan = self._plan
            if plan is not None and fits(plan):
                return plan
            if self._gone:
                raise AgentGoneError("the agent is gone")
            raise TimeoutError(f"nothing within {seconds:g} s")

    def wait_in(self, generation: Generation, fits: Callable[[WorkerPlan], bool]) -> WorkerPlan:
        """As `wait_for`, in this generation. Raises SupersededError when a later one begins."""
        plan = self.wait_for(lambda plan: plan.generation > generation or fits(plan))
        if plan.generation > generation:
            raise SupersededError(str(plan.generation))
        return plan

    def superseded(self, generation: Generation) -> bool:
        """Whether word of a later generation comes in time to explain what has just failed in this one."""
        try:
            self.wait_for(lambda plan: plan.generation > generation, timeout("notice"))
        except TimeoutError:
            return False
        return True

    def end_outside(self, why: str) -> NoReturn:
        """Nobody would run again what this thread does: all processes are replaced, this one too."""
        self.report(outside=why)
        while True:
            threading.Event().wait()

    def exchange(self, generation: Generation, adopt: Callable[[], None]) -> None:
        """Put new communicators in place, unless a notice has come that would have had to break them."""
        with self._exchange:
            if self.plan.generation > generation:
                raise SupersededError(str(self.plan.generation))
            adopt()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._sock.setblocking(True)
        try:
            while (received := channel.receive(self._sock)) is not None:
                message, descriptors = received
                for descriptor in descriptors:
                    os.close(descriptor)
                if isinstance(message, WorkerPlan):
                    self._take(message)
                elif isinstance(message, WorkerDrill):
                    DRILLS.order(message)
        except (OSError, ProtocolError):
            pass
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _take(self, plan: WorkerPlan) -> None:
        with self._changed:
            first = self._plan is None
            self._plan = plan
            if (first and plan.alone) or (first and plan.phase is not PlanPhase.SWAP):
                self._noticed = plan.generation
            notice = plan.phase is PlanPhase.SWAP and plan.generation > self._noticed
            if notice:
                self._noticed = plan.generation
            self._changed.notify_all()
        self._halt(plan.halt)
        if notice:
            self._notice(plan)

    def _notice(self, plan: WorkerPlan) -> None:
        generation = plan.generation
        with self._exchange:
            alone = self._starts_alone(plan)
            stuck = () if alone else self._abort(JobFault(f"a process of the job failed, {generation} begins"))
        if stuck:
            link.remark(f"not out of its collectives in time ({', '.join(stuck)}): this process is replaced too")
            os.kill(os.getpid(), signal.SIGKILL)
        if alone:  # it has no step to leave, and nothing to offer
            self.report(aborted=generation, joined=generation, live=None, address="")
        else:
            self.report(aborted=generation)
