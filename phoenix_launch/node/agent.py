"""The agent of a node: one loop that hears the supervisor, starts, watches and ends the node's processes, and reports.

Threads: this one, which does all that; the output pump's (output.py); callers' (callers.py). The guardian forks it.
"""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections import deque
from pathlib import Path
from typing import Final

import msgspec

from phoenix_launch.bootstrap import AgentBootstrap
from phoenix_launch.bus.agent import AgentLink
from phoenix_launch.bus.rough_link import RoughLink
from phoenix_launch.clock import OwnClock
from phoenix_launch.command_messages import DrillKind
from phoenix_launch.hosts.facts import endpoint_address, find_place, gather
from phoenix_launch.messages import (
    Deposed,
    Drill,
    Farewell,
    Hello,
    HostFacts,
    NodePlan,
    NodeReport,
    PeerProbe,
    Prepare,
    Probe,
    ProbeReport,
    Remark,
    ReportAck,
    SaveStacks,
    ToAgent,
)
from phoenix_launch.node.actions import Leave
from phoenix_launch.node.arrival import arrived, led_to
from phoenix_launch.node.callers import Callers
from phoenix_launch.node.diagnostics import say
from phoenix_launch.node.fencing import Allegiance, must_end, patience
from phoenix_launch.node.harm import freeze_node, power_loss
from phoenix_launch.node.output import OutputPump
from phoenix_launch.node.output_way import OutputWay
from phoenix_launch.node.poll_loop import PollLoop
from phoenix_launch.node.probes import Dialer, ProbeListener
from phoenix_launch.node.report import is_news, node_report
from phoenix_launch.node.runtime_folder import LONGEST_NAME
from phoenix_launch.node.state import NodeState
from phoenix_launch.node.worker_setup import NodePlace
from phoenix_launch.node.workers import Workers
from phoenix_launch.processes import become_subreaper, described
from phoenix_launch.takeover_messages import Claim, Granted, takeover_key
from phoenix_launch.wire import Generation

BUSY_SECONDS: Final = 0.02  # between two looks at what sends no event: trees being killed, output being read
FAREWELL_SECONDS: Final = 1.0  # for the last word to leave
EXIT_IN_ORDER: Final = 0
EXIT_ALONE: Final = 1  # no supervisor, or no guardian


def run(line: bytes, guardian: int, runtime: Path) -> int:
    """The agent's whole life; returns its exit code. `line` is the bootstrap, `runtime` the folder of the sockets."""
    # Between fork and exec we run nothing that could need another thread's lock.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    channel = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    try:
        bootstrap = arrived(msgspec.json.decode(line, type=AgentBootstrap), os.environ)
    except msgspec.MsgspecError as error:
        say(f"phoenix agent: a malformed bootstrap line: {error}")
        return EXIT_ALONE
    become_subreaper()
    agent = Agent(bootstrap, guardian, runtime, channel)
    return agent.serve()


class Agent:
    """One node of one job."""

    def __init__(self, bootstrap: AgentBootstrap, guardian: int, runtime: Path, channel: int) -> None:
        self._bootstrap = bootstrap
        self._guardian = guardian
        self._runtime = runtime
        self._channel = channel  # what brought the bootstrap
        self._clock = OwnClock()
        self._loop = PollLoop()
        self._remarks: deque[str] = deque()  # the output pump's thread appends, this one takes
        self._link = RoughLink(AgentLink(bootstrap), self._clock)
        address, interface = find_place(bootstrap)
        if bootstrap.interface and not address:
            say(f"phoenix agent: {bootstrap.node} has no interface {bootstrap.interface}")
        ports = (bootstrap.port_low, bootstrap.port_high)
        self._allegiance = Allegiance(bootstrap.term)
        key = takeover_key(bootstrap.slots_key) if bootstrap.slots_key else b""
        self._callers = Callers(self._loop, bootstrap.job, key, self._judge)
        self._listener = _probe_listener(self._loop, address, ports, bootstrap, self._callers)
        port = self._listener.port if self._listener else 0
        self._facts: HostFacts = gather(bootstrap, (address, interface), port, guardian)
        self._way = OutputWay(bootstrap)
        self._pump = OutputPump(
            bootstrap.output, bootstrap.node, bootstrap.job, self._way.connect, self._remarks.append
        )
        self._state = NodeState(bootstrap.command)
        place = NodePlace(bootstrap.node, interface, f"{runtime}{LONGEST_NAME}")
        self._workers = Workers(
            self._loop, bootstrap, place, address, runtime, self._state, self._pump, self._clock, self._remarks.append
        )
        self._started = self._heard_at = self._clock.now
        self._heard = False  # anything, ever
        self._dialled = False  # the supervisor, by a plain connection
        self._unreachable = False
        self._dialers: list[Dialer] = []
        self._sequence = 0
        self._said_at = float("-inf")
        self._said: NodeReport | None = None
        self._leaving = False  # the supervisor has told us to
        self._fenced = False  # our workers were ended for want of a supervisor, and of any progress
        self._left_links: list[tuple[float, RoughLink]] = []  # to those that are obeyed no longer, and when they close
        self._exit: int | None = None

    # --- the loop ----------------------------------------------------------------------------------------------------

    def serve(self) -> int:
        self._loop.watch(self._link.socket, self._hear)
        self._watch_guardian()
        self._loop.watch(self._channel, self._channel_closed)
        while self._exit is None:
            self._advance()
            wait = self._patience()
            ready = self._loop.wait(wait)
            self._clock.tick(wait)
            self._loop.dispatch(ready)
        return self._exit

    def _patience(self) -> float:
        """How long to wait for an event at most."""
        if self._exit is not None or self._workers.urgent:
            return 0.0
        now = self._clock.now
        times = [self._said_at + self._bootstrap.timeouts.heartbeat_interval]
        if self._workers.busy or self._workers.stacks.under_way:
            times.append(now + BUSY_SECONDS)
        deadlines = (self._state.next_deadline(), self._workers.next_deadline(), self._link.due())
        times += [t for t in deadlines if t is not None]
        return max(0.0, min(times) - now)

    def _advance(self) -> None:
        if self._link.due() is not None:
            self._hear()
        self._workers.advance()
        while actions := self._state.decide(self._clock.now):
            for action in actions:
                if isinstance(action, Leave):
                    self._leaving = True
                else:
                    self._workers.act(action)
        if self._leaving and self._saved():
            self._leave()
            return
        self._workers.support.advance(lambda: self._workers.environment)
        for dialer in self._dialers:
            dialer.advance(self._clock.now)
        self._dialers = [dialer for dialer in self._dialers if not dialer.over]
        for trace in self._workers.stacks.advance(self._clock.now):
            self._link.send(trace, self._generation)
        self._say_remarks()
        self._report()
        for _, link in [left for left in self._left_links if left[0] <= self._clock.now]:
            link.close()
        self._left_links = [left for left in self._left_links if left[0] > self._clock.now]
        self._check_supervisor()

    def _saved(self) -> bool:
        """Whether nothing is left to be saved before everything here ends."""
        plan = self._state.plan
        return plan is None or not plan.save or self._workers.support.saved(self._clock.now)

    def _watch_guardian(self) -> None:
        try:
            pidfd = os.pidfd_open(self._guardian)
        except ProcessLookupError:
            self._guardian_gone()
            return
        self._loop.watch(pidfd, self._guardian_gone)
        if os.getppid() != self._guardian:  # it went before it was watched, and the number is somebody else's
            self._guardian_gone()

    def _guardian_gone(self) -> None:
        say(f"phoenix agent: the guardian of {self._bootstrap.node} is gone, everything here ends")
        self._end_alone()
        shutil.rmtree(self._runtime, ignore_errors=True)

    def _channel_closed(self) -> None:
        """Later it matters to nobody; but a start that was broken off before we were heard of leaves nothing behind."""
        self._loop.forget(self._channel)
        os.close(self._channel)
        if not self._heard:
            say(f"phoenix agent: the channel closed before the supervisor answered, {self._bootstrap.node} ends")
            self._end_alone()

    def _check_supervisor(self) -> None:
        timeouts = self._bootstrap.timeouts
        silent = self._clock.now - self._heard_at
        self._way.orphaned = silent >= timeouts.heartbeat
        if self._way.orphaned and not self._fenced:
            self._fence(silent)
        if not self._heard and not self._dialled and silent >= timeouts.connect / 2:
            self._dialled = True
            self._dial_supervisor(timeouts.connect / 2)
        if self._unreachable and not self._heard:
            self._end_alone()
        elif silent >= patience(self._state.plan, timeouts.heartbeat, timeouts.orphan) and self._exit is None:
            support = self._workers.support
            if support.can_save:
                if not support.halted(self._clock.now):
                    return
                self._workers.kill()  # a version that all nodes have is only left when nobody goes on
                if not support.saved(self._clock.now):
                    return
            say(f"phoenix agent: no word from the supervisor for {silent:.0f} s, {self._bootstrap.node} ends")
            self._end_alone()

    def _fence(self, silent: float) -> None:
        timeouts = self._bootstrap.timeouts
        if must_end(silent, self._said.ranks if self._said else (), timeouts.heartbeat, timeouts.first_step):
            self._fenced = True
            self._remarks.append(
                f"no supervisor for {silent:.0f} s and no progress: its workers were ended, their copies kept"
            )
            self._workers.kill()

    # --- another supervisor ------------------------------------------------------------------------------------------

    def _judge(self, claim: Claim, caller: str) -> Granted:
        """Whether a supervisor that wants to take over is granted its term; and if it does, we follow it."""
        supervised = self._clock.now - self._heard_at < self._bootstrap.timeouts.heartbeat
        grants = self._allegiance.follow if claim.take else self._allegiance.promise
        granted = self._exit is None and not self._leaving and grants(claim.term, claim.server_key)
        report = None
        if granted and claim.take:
            self._follow(claim, caller)
            report = self._whole_report()
        plan = self._state.plan if report is not None else None
        highest, obeyed = self._allegiance.highest, self._allegiance.term
        return Granted(granted, highest, obeyed, self._bootstrap.incarnation, supervised, plan, report)

    def _follow(self, claim: Claim, caller: str) -> None:
        """From here on nothing that the old supervisor says is heard; that it is one no longer is the last that it is told."""
        self._link.send(Deposed(self._bootstrap.incarnation, claim.term), self._generation)
        self._loop.forget(self._link.socket)
        self._left_links.append((self._clock.now + FAREWELL_SECONDS, self._link))
        self._bootstrap = led_to(self._bootstrap, claim, caller)
        self._link = RoughLink(AgentLink(self._bootstrap), self._clock)
        self._loop.watch(self._link.socket, self._hear)
        self._way.lead_to(self._bootstrap)
        self._heard, self._heard_at, self._said = True, self._clock.now, None
        self._fenced = False

    def _dial_supervisor(self, seconds: float) -> None:
        """Why nothing was heard, as far as a plain connection tells."""
        endpoint = self._bootstrap.control_endpoint
        host, port = endpoint_address(endpoint)

        def done(peers: tuple[PeerProbe, ...]) -> None:
            reason = peers[0].error or "connected, but it does not answer (another key, or another job?)"
            say(f"cannot reach the supervisor at {endpoint}: {reason}")
            self._unreachable = bool(peers[0].error)

        deadline = self._clock.now + seconds
        peer = PeerProbe("", host, port)
        self._dialers.append(Dialer(self._loop, (peer,), self._bootstrap.job, deadline, done, greeted=False))

    # --- what the supervisor says ------------------------------------------------------------------------------------

    def _hear(self) -> None:
        while (envelope := self._link.receive()) is not None:
            self._heard, self._heard_at = True, self._clock.now
            if isinstance(envelope.body, ToAgent):
                self._obey(envelope.body)

    def _obey(self, body: ToAgent) -> None:
        match body:
            case ReportAck():
                return
            case Prepare():
                self._state.on_prepare(body)
            case NodePlan():
                if self._state.on_plan(body, self._clock.now):
                    self._workers.support.follow(body)
            case Probe(peers=peers):
                deadline = self._clock.now + self._bootstrap.timeouts.connect
                self._dialers.append(Dialer(self._loop, peers, self._bootstrap.job, deadline, self._say_probes))
            case SaveStacks():
                self._workers.save_stacks()
            case Drill():
                self._harm(body)

    def _harm(self, drill: Drill) -> None:
        match drill.kind:
            case DrillKind.KILL_WORKER:
                self._workers.kill(drill.rank)
            case DrillKind.KILL_AGENT:
                os.kill(os.getpid(), signal.SIGKILL)
            case DrillKind.KILL_NODE:
                power_loss(self._guardian, self._runtime)
            case DrillKind.DROP_BUS:
                self._link.drop(drill.duration)
            case DrillKind.DELAY_BUS:
                self._link.delay(drill.value, drill.duration)
            case DrillKind.PARTITION:
                self._workers.harm(drill)
                self._link.drop(drill.duration)
            case DrillKind.FREEZE if drill.rank < 0:
                freeze_node(self._guardian, drill.duration)
            case _:
                if why := self._workers.harm(drill):
                    self._remarks.append(f"drill: {why}")

    # --- what it says ------------------------------------------------------------------------------------------------

    @property
    def _generation(self) -> Generation:
        plan = self._state.plan
        return plan.generation if plan is not None else Generation(self._bootstrap.term, 0)

    def _report(self) -> None:
        """The whole state, when it has changed or a heartbeat is due; before anything was heard, who we are."""
        now = self._clock.now
        due = now - self._said_at >= self._bootstrap.timeouts.heartbeat_interval
        if not self._heard:
            if due:
                self._said_at = now
                self._link.send(Hello(self._bootstrap.incarnation, self._bootstrap.node, self._facts), self._generation)
            return
        report = self._whole_report()
        if due or is_news(report, self._said):
            self._said, self._said_at, self._sequence = report, now, report.seq
            self._link.send(report, self._generation)

    def _whole_report(self) -> NodeReport:
        ranks, support = self._workers.rank_reports(), self._workers.support
        return node_report(
            self._bootstrap.incarnation, self._sequence + 1, self._state, ranks, support.kept, support.peer,
            support.published,
        )  # fmt: skip

    def _say_remarks(self) -> None:
        while self._heard and self._remarks and not self._way.orphaned:
            self._link.send(Remark(self._bootstrap.node, self._remarks.popleft()), self._generation)

    def _say_probes(self, peers: tuple[PeerProbe, ...]) -> None:
        self._link.send(ProbeReport(self._bootstrap.incarnation, peers), self._generation)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """As the supervisor wishes: first everything ends, then what was written is handed on, then the last word."""
        stuck = self._workers.end_everything()
        self._pump.close(self._bootstrap.timeouts.drain_output)
        self._workers.read_last_words()
        self._report()  # what a worker wrote right before its end may have been read only now
        if stuck:
            self._remarks.append(f"these processes do not die: {described(stuck)}")
        self._say_remarks()
        self._link.send(Farewell(self._bootstrap.incarnation), self._generation)
        self._close(FAREWELL_SECONDS)
        self._exit = EXIT_IN_ORDER

    def _end_alone(self) -> None:
        stuck = self._workers.end_everything()
        if stuck:
            say(f"phoenix agent: these processes do not die: {described(stuck)}")
        self._pump.close(self._bootstrap.timeouts.drain_output)
        self._close(0.0)
        self._exit = EXIT_ALONE

    def _close(self, linger: float) -> None:
        if self._listener is not None:
            self._listener.close()
        self._callers.close()
        self._loop.forget(self._link.socket)
        self._link.close(linger)


def _probe_listener(
    loop: PollLoop, address: str, ports: tuple[int, int], bootstrap: AgentBootstrap, callers: Callers
) -> ProbeListener | None:
    try:
        return ProbeListener(loop, address or "127.0.0.1", ports, bootstrap.job, bootstrap.node, callers.receive)
    except OSError as error:
        say(f"phoenix agent: {bootstrap.node} cannot listen on {address}: {error}")
        return None
