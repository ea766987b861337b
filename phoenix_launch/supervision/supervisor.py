"""The supervisor's loop: it carries what peers, processes, signals and the clock say into the state machine, and its
decisions out again. It decides nothing itself.

Threads: this loop; the console (`console.py`); the bus's authenticator (`bus/supervisor.py`).
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from phoenix_launch.bus.supervisor import PeerKind, Received, SupervisorBus
from phoenix_launch.clock import OwnClock
from phoenix_launch.command_messages import (
    AddHostRequest,
    Answer,
    DrainRequest,
    DrillKind,
    FaultRequest,
    StatusReply,
    StatusRequest,
    StopRequest,
)
from phoenix_launch.errors import EXIT_SIGNAL_BASE, PhoenixError, StartError, SupersededError
from phoenix_launch.job import draining, drills, membership, wishes
from phoenix_launch.job import events as job_events
from phoenix_launch.job.drills import DrillPlan
from phoenix_launch.job.environment import JobIdentity
from phoenix_launch.job.events import Action, Event, Resumed
from phoenix_launch.job.last_output import LastOutput
from phoenix_launch.job.last_words import verdict
from phoenix_launch.job.plans import node_plan
from phoenix_launch.job.state import NodeState, Outcome, Phase, State
from phoenix_launch.job.wishes import Wish
from phoenix_launch.messages import (
    Body,
    Deposed,
    Farewell,
    Hello,
    JobEnded,
    JoinRequest,
    Leaving,
    NodePlan,
    NodeReport,
    PlanPhase,
    Prepare,
    ProbeReport,
    Remark,
    ReportAck,
    SaveStacks,
    StackTrace,
)
from phoenix_launch.settings import timeout
from phoenix_launch.status import encode_status
from phoenix_launch.supervision import start_words as words
from phoenix_launch.supervision.additions import Additions
from phoenix_launch.supervision.chronicle import Chronicle
from phoenix_launch.supervision.console import Console
from phoenix_launch.supervision.guests import Guests
from phoenix_launch.supervision.handover import Keeper
from phoenix_launch.supervision.injection import inject
from phoenix_launch.supervision.muster import Muster, Recruit
from phoenix_launch.supervision.parting import part
from phoenix_launch.supervision.signals import SignalPipe

TICK = 0.25  # seconds between looks at the deadlines when nothing happens
AT_ONCE = (
    job_events.GenerationBegun,
    job_events.RecoveryFound,
    job_events.CommunicatorsKnown,
    job_events.GenerationRuns,
    job_events.WaitingForNode,
)


@dataclass(slots=True)
class _Sent:
    wish: Wish
    at: float


@dataclass
class Supervisor:
    """One job from its muster to its outcome. `run` returns when nothing of the job lives any more."""

    bus: SupervisorBus
    console: Console
    chronicle: Chronicle
    muster: Muster
    identity: JobIdentity
    state: State
    prepare: Callable[[Recruit, State, float], Prepare | None]  # what a node that was found fit is to load; None: later
    guests: Guests  # hosts that started the same command
    keeper: Keeper
    additions: Additions
    inherited: Resumed | None = None  # from another supervisor
    drills: list[DrillPlan] = field(default_factory=list)
    drills_allowed: bool = False
    clock: OwnClock = field(default_factory=OwnClock)
    on_start: Callable[[], None] = lambda: None  # all nodes were found fit

    _sent: dict[int, _Sent] = field(default_factory=dict)
    _prepared: dict[str, float] = field(default_factory=dict)  # incarnation -> when it was told
    _powered_off: set[int] = field(default_factory=set)
    _output: LastOutput = field(default_factory=lambda: LastOutput(timeout("exit_output"), timeout("reader")))
    _holding: bool = False  # nobody is told to leave yet: output is still shown
    _drills_from: float = 0.0
    _dies_at: float = math.inf  # by a drill
    _strangers_since: float = 0.0  # 0: there is none
    _said_harm: bool = False
    _stops: int = 0  # requests to stop so far
    _words: words.StartWords = field(default_factory=words.StartWords)
    _outcome: Outcome | None = None

    def run(self, signals: SignalPipe) -> Outcome:
        """Raises StartError when the nodes cannot take part; the caller cleans up either way (`close`)."""
        try:
            outcome = self._run(signals)
        except StartError as error:
            self._refuse(JobEnded(error.exit_code, error.show()), signals)
            raise
        self.guests.say_goodbye(outcome.exit_code, verdict(outcome))
        return outcome

    def _run(self, signals: SignalPipe) -> Outcome:
        poller = zmq.Poller()
        for source in (self.bus.control, self.bus.monitor, signals):
            poller.register(source, zmq.POLLIN)
        handles: dict[int, Recruit] = {}
        self._take_over()
        while self._outcome is None:
            ready = {source for source, _ in poller.poll(int(TICK * 1000))}
            self.clock.tick(TICK)
            for number in signals.take():
                self._stop(number)
            self.bus.drain_monitor()
            while (received := self.bus.receive()) is not None:
                self._hear(received)
            self._watch_for_harm()
            for descriptor in [d for d in handles if d in ready]:
                if self._channel(handles[descriptor]):
                    poller.unregister(descriptor)
                    del handles[descriptor]
            for recruit in self._advance(self.clock.now):
                if recruit.handle is not None:
                    handles[recruit.handle.fileno()] = recruit
                    poller.register(recruit.handle.fileno(), zmq.POLLIN)
        return self._outcome

    def _take_over(self) -> None:
        if self.inherited is None:
            return
        before, self._drills_from = self.state.generation, self.clock.now
        self.chronicle.inherit(self.state, self.inherited)
        self._apply(self.inherited)
        self.chronicle.resumed(self.state, adopted=self.state.generation == before)
        self.drills = drills.to_come(self.drills, self.state)
        self.on_start()

    def _watch_for_harm(self) -> None:
        """Strangers are said when they last: an honest client in the middle of its handshake looks like one for a moment."""
        counters, now = self.bus.counters, self.clock.now
        self._strangers_since = (self._strangers_since or now) if counters.strangers else 0.0
        harm = counters.harm
        if not harm and self._strangers_since and now - self._strangers_since >= timeout("probe"):
            harm = "a connection came and went without showing a key that it knows"
        if harm and not self._said_harm:
            self._said_harm = True
            self.console.say(f"phoenix-run: on the control bus {harm} (said once, `status --json` counts)")

    # --- what comes in -----------------------------------------------------------------------------------------------

    def _hear(self, received: Received) -> None:
        peer, body = received.peer, received.envelope.body
        if peer.kind is PeerKind.AGENT:
            self._hear_agent(peer.name, body)
        elif isinstance(body, StatusRequest):
            self._answer(received, StatusReply(encode_status(self.chronicle.status(self.state)).decode()))
        elif peer.kind is PeerKind.JOINER:
            self._hear_joiner(received.route, body)
        elif peer.kind is PeerKind.CONTROL and isinstance(body, StopRequest):
            self._answer(received, Answer(True, "stopping"))
            self._stop(body.signal)
        elif peer.kind is PeerKind.CONTROL and isinstance(body, FaultRequest):
            self._answer(received, self._inject(body))
        elif peer.kind is PeerKind.CONTROL and isinstance(body, DrainRequest):
            self._answer(received, self._drain(body.node))
        elif peer.kind is PeerKind.CONTROL and isinstance(body, AddHostRequest):
            self._answer(received, self._add_host(body.host))
        else:
            self._answer(received, Answer(False, f"a {peer.kind.value} key does not allow this"))

    def _hear_joiner(self, route: bytes, body: Body) -> None:
        if isinstance(body, JoinRequest):
            self.guests.ask(route, body, self.clock.now)
        elif isinstance(body, Leaving) and (recruit := self.muster.recruits.get(body.incarnation)) is not None:
            detail = f"it was told to go by {signal.Signals(body.signal).name}"
            self._apply(job_events.AgentEnded(recruit.spec.index, body.incarnation, detail))

    def _answer(self, received: Received, body: Body) -> None:
        self.bus.answer(received.route, body, self.state.generation)

    def _hear_agent(self, incarnation: str, body: Body) -> None:
        recruit = self.muster.recruits.get(incarnation)
        if recruit is None or recruit.dismissed:
            if isinstance(body, (NodeReport, Hello)):
                self.bus.send(incarnation, NodePlan(self.state.generation, PlanPhase.LEAVE), self.state.generation)
            return
        index = recruit.spec.index
        match body:
            case Hello(facts=facts):
                self.muster.heard(incarnation, facts)
                self.bus.send(incarnation, ReportAck(0), self.state.generation)
            case ProbeReport(peers=peers):
                self.muster.probed(incarnation, peers)
            case StackTrace():
                self.chronicle.stacks(recruit.spec.name, body)
                self._apply(job_events.StacksTaken(index, body.rank, body.generation, body.where, body.last))
            case Remark(node=node, text=text):
                self.console.say(f"phoenix-run: {node}: {text}")
            case NodeReport():
                self.bus.send(incarnation, ReportAck(body.seq), self.state.generation)
                self.chronicle.observe(index, recruit.spec.name, body)
                self._output.note(index, body)
                self._apply(job_events.Reported(index, body))
            case Deposed(term=term):
                raise SupersededError(self.identity.job, term)
            case Farewell():
                self._apply(job_events.AgentEnded(index, incarnation, "it said farewell"))
            case _:
                self.bus.counters.malformed += 1

    def _channel(self, recruit: Recruit) -> bool:
        """Something happened on the channel that started an agent; True when it has closed."""
        if not self.muster.listen(recruit):
            return False
        if recruit.out_of_touch and recruit.facts is not None and not recruit.dismissed:
            if self.muster.watch_again(recruit, self.clock.now) and recruit.admitted:
                self._apply(job_events.ChannelClosed(recruit.spec.index))
        elif recruit.admitted and not (recruit.dismissed or recruit.blind):
            detail = recruit.lines[-1] if recruit.lines and not recruit.watches else ""
            self._apply(job_events.AgentEnded(recruit.spec.index, recruit.incarnation, detail))
        return True

    def _stop(self, number: int) -> None:
        if self.state.phase not in (Phase.STOPPING, Phase.LEAVING, Phase.FINISHED):
            grace = self.state.rules.shutdown_timeout
            if self.state.halt is None:
                self.console.say(
                    f"phoenix-run: {signal.Signals(number).name}: stopping, workers have up to {grace:g} s (again: sooner)"
                )
        elif self.state.phase is Phase.LEAVING:
            self._output.hurried = True
        before = self.state
        self._apply(job_events.StopAsked(number))
        if hurried := words.hurried(number, before, self.state, again=self._stops > 0, held=self._holding):
            self.console.say(f"phoenix-run: {hurried}")
        self._stops += 1

    def _advance(self, now: float) -> list[Recruit]:
        """Deadlines, musters, drills, wishes. Returns nodes that were launched just now."""
        if now >= self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        launched = []
        if self.state.phase not in (Phase.LEAVING, Phase.FINISHED, Phase.STOPPING):
            launched = self.muster.launch_more(now)
            complete = self.muster.complete
            for admitted in self.muster.settle(now):
                self._apply(admitted)
            while self.muster.turned_away:
                self.guests.turn_away(*self.muster.turned_away.pop())
            while self.muster.remarks:
                self.console.say(f"phoenix-run: {self.muster.remarks.pop(0)}")
            if self.muster.complete and not complete:
                self.on_start()
            progress = words.progress(self.state, self.muster, self._prepared, now, joins=self.guests.expected)
            if progress is not None and (line := self._words.due(progress, now)):
                self.console.say(f"phoenix-run: {line}")
            since = now - self._drills_from if self._drills_from else -1.0
            for plan in [p for p in self.drills if drills.is_due(p, self.state, since)]:
                self.drills.remove(plan)
                answer = self._inject(plan.request)
                if not answer.ok:
                    self.console.say(f"phoenix-run: drill: {answer.text}")
        self._apply(job_events.Ticked())
        self._hold_for_output(now)
        self._spread(now)
        if remark := self.keeper.keep(self.state, now):
            self.console.say(f"phoenix-run: {remark}")
        self.chronicle.keep(self.state, now)
        return launched

    def _hold_for_output(self, now: float) -> None:
        """A job that is over keeps its nodes as long as what their workers wrote is on its way to a reader."""
        if self.state.phase is not Phase.LEAVING or self.state.outcome is None:
            return
        console = self.console
        pending = self._output.pending(console.ended, lambda node: self.state.members[node].alive)
        stopped = self.state.outcome.exit_code >= EXIT_SIGNAL_BASE
        self._holding = not self._output.complete(
            now, pending=bool(pending), written=console.written, stuck=console.stuck, stopped=stopped
        )
        if self._holding:
            self._apply(job_events.OutputHeld())
            if remark := self._output.remark(now, console.stuck):
                console.say(f"phoenix-run: {remark}")

    def _apply(self, event: Event) -> None:
        self.state, actions = membership.step(self.state, event, self.clock.now)
        if any(isinstance(action, AT_ONCE) for action in actions):
            self._spread(self.clock.now)  # survivors wait for it: before anything is written down
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        self.chronicle.act(action, self.state)
        match action:
            case job_events.Fence(index, incarnation):
                self.bus.send(incarnation, NodePlan(self.state.generation, PlanPhase.LEAVE), self.state.generation)
                self.muster.dismiss(incarnation)
                self._output.forget(index)
            case job_events.Relaunch(index):
                if index not in self._powered_off:
                    self.muster.relaunch(index, self.clock.now)
            case job_events.StacksWanted():
                for member in self.state.members.values():
                    if member.alive:
                        self.bus.send(member.incarnation, SaveStacks(), self.state.generation)
            case job_events.GenerationRuns():
                self._drills_from = self._drills_from or self.clock.now
            case job_events.Finished(outcome):
                self._outcome = outcome

    def _spread(self, now: float) -> None:
        """Tell each node its wish when it is new, and again when it did not come true in time."""
        for index, member in self.state.members.items():
            if member.state in (NodeState.LOST, NodeState.DRAINED) or member.left:
                continue
            told = self._prepared.get(member.incarnation)
            if told is None or (member.state is NodeState.STARTING and now - told > timeout("resend")):
                prepare = self.prepare(self.muster.recruits[member.incarnation], self.state, now)
                if prepare is not None:
                    self._prepared[member.incarnation] = now
                    self.bus.send(member.incarnation, prepare, self.state.generation)
            wish, sent = wishes.wish_for(self.state, index), self._sent.get(index)
            if wish.phase is PlanPhase.LEAVE and self._holding:
                continue
            if sent is None or sent.wish != wish or self._due(sent, index, now):
                self._sent[index] = _Sent(wish, now)
                self.bus.send(member.incarnation, node_plan(self.state, wish, self.identity), self.state.generation)

    def _due(self, sent: _Sent, index: int, now: float) -> bool:
        """Whether the wish is told again. Of who keeps copies no report says that it was heard, so that is told for ever."""
        if sent.wish.ground is not None and now - sent.at > timeout("heartbeat"):
            return True
        return now - sent.at > timeout("resend") and not wishes.fulfilled(self.state, index)

    def _drain(self, node: str) -> Answer:
        try:
            index, text = draining.to_drain(self.state, node)
        except PhoenixError as error:
            return Answer(False, error.message)
        self.console.say(f"phoenix-run: {text}")
        self._apply(job_events.DrainAsked(index))
        return Answer(True, text)

    def _inject(self, request: FaultRequest) -> Answer:
        answer, target = inject(request, self.state, self.chronicle, self.bus, allowed=self.drills_allowed)
        if target is not None and request.kind is DrillKind.KILL_NODE:
            self._powered_off.add(target.node)  # a host that lost power does not come back by itself
        if target is not None and request.kind is DrillKind.KILL_SUPERVISOR:
            self._dies_at = self.clock.now + TICK  # when whoever asked for it has its answer
        return answer

    def _add_host(self, word: str) -> Body:
        try:
            reply, wanted = self.additions.ask(word, self.state)
        except PhoenixError as error:
            return Answer(False, f"{error.message} ({error.hint})" if error.hint else error.message)
        if wanted is not None:
            self.console.say(f"phoenix-run: {reply.text}")
            self._powered_off.discard(wanted)
            self._apply(job_events.HostAdded(wanted))
        return reply

    def _refuse(self, last: JobEnded, signals: SignalPipe) -> None:
        self.guests.say_goodbye(last.exit_code, last.text)
        if self.guests.expected:
            seconds = timeout("command")
            self.console.say(f"phoenix-run: the start is refused; hosts that come within {seconds:g} s are told so")
            self.guests.tell_late(last, self.state.rules.seats_max - 1, seconds, lambda: bool(signals.take()))

    def close(self) -> None:
        part(self.muster.recruits, self.bus, self.clock, self.state.generation)
