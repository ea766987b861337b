"""How a job ends that is told to: what all have done is copied first, then the signal is passed on, then all leave. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from phoenix_launch.errors import EXIT_SIGNAL_BASE
from phoenix_launch.job import holding
from phoenix_launch.job.events import Finished
from phoenix_launch.job.state import Halt, Outcome, Phase
from phoenix_launch.job.transition import Transition

UNHEARD_SECONDS: Final = 1.0  # after a stop request: workers that were to be started may not have been heard of
HURRIED_GRACE: Final = 3.0  # seconds that are left to the workers after a second stop request; after a third none
HALT_SHARE: Final = 0.5  # of the time that workers have to end: for the step's copy, before they hear of the signal


class Stopping(Transition):
    """A request to stop, and all that follows from it."""

    def _stop(self, signal: int) -> None:
        """The first request passes its signal on and waits; each further one only shortens the wait."""
        state = self.state
        if state.phase is Phase.LEAVING:
            return
        if state.phase is Phase.STOPPING:
            left = max(0.0, state.since + state.grace - self.now)
            grace = min(left, HURRIED_GRACE) if state.grace > HURRIED_GRACE else 0.0
            self._enter(Phase.STOPPING, grace=grace)  # an agent counts a grace from when it hears of it: so do we
        elif state.halt is not None and state.halt.signal:
            self._pass_on(state.halt.signal, HURRIED_GRACE)
        elif state.rules.save_timeout > 0 and self._all_train():
            until = self.now + HALT_SHARE * state.rules.shutdown_timeout
            self.state = replace(state, halt=Halt(signal=signal, until=until))
        elif any(member.alive for member in state.members.values()) and state.phase is not Phase.STARTING:
            self._pass_on(signal, state.rules.shutdown_timeout)
        else:
            self._leave(_stopped_by(signal))

    def _all_train(self) -> bool:
        """Whether all ranks can come to one version: then no step that is done need be lost."""
        state = self.state
        runtimes = [holder.runtime for holder in state.holders.values()]
        return (
            state.phase is Phase.RUNNING
            and not state.ended
            and not self._seat_empty()
            and bool(runtimes)
            and all(r is not None and r.holds and not r.outside and not r.leaving for r in runtimes)
        )

    def _halts(self) -> bool:
        """Whether nothing else happens until all ranks have come to a version that is complete."""
        state, halt = self.state, self.state.halt
        if halt is None:
            return False
        runtimes = [holder.runtime for holder in state.holders.values()]
        halted = all(
            runtime is not None and runtime.halted is not None and runtime.halted.generation == state.generation
            for runtime in runtimes
        )
        if not halted and self.now < halt.until and self._all_train():
            return True
        self._after_halt(halt)
        return bool(halt.signal)

    def _after_halt(self, halt: Halt) -> None:
        spent = self.now - (halt.until - HALT_SHARE * self.state.rules.shutdown_timeout)
        self._pass_on(halt.signal, max(0.0, self.state.rules.shutdown_timeout - spent))

    def _pass_on(self, signal: int, grace: float) -> None:
        ran = self.state.phase is Phase.RUNNING
        outcome = _stopped_by(signal)
        self._enter(Phase.STOPPING, outcome=outcome, signal=signal, grace=grace, ran=ran, halt=None)

    def _settle_stopping(self) -> None:
        state = self.state
        assert state.outcome is not None
        self._earlier_cause()
        waited = self.now - state.since
        if state.ran and waited < UNHEARD_SECONDS and holding.unheard(state):
            return  # what a worker has written may be here before its node's word that there is such a worker
        over = waited > state.grace + state.rules.teardown_timeout
        if over or all(m.live == 0 for m in state.members.values() if m.alive):
            self._leave(self.state.outcome or state.outcome)

    def _earlier_cause(self) -> None:
        """The first report of a failure need not be that of the first failure: a later report with an older date wins."""
        outcome = self.state.outcome
        if outcome is None or outcome.cause is None:
            return
        cause = outcome.cause
        for ended in self.state.ended.values():
            if ended.report.code != 0 and ended.at < cause.at:
                cause = ended
        if cause is not outcome.cause:
            self.state = replace(self.state, outcome=self._failure(cause))

    def _settle_leaving(self) -> None:
        state = self.state
        assert state.outcome is not None
        over = self.now - state.since > state.rules.teardown_timeout + state.rules.save_timeout
        if over or not any(member.alive for member in state.members.values()):
            self._enter(Phase.FINISHED)
            self.actions.append(Finished(state.outcome))


def _stopped_by(signal: int) -> Outcome:
    return Outcome(exit_code=EXIT_SIGNAL_BASE + signal, text=f"stopped by signal {signal}")
