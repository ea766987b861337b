"""What the state of a job, and its end, are called in the status. Pure."""

from __future__ import annotations

import signal

from phoenix_launch.errors import EXIT_OK, EXIT_SIGNAL_BASE
from phoenix_launch.job.state import Outcome, Phase, State
from phoenix_launch.status import JobState


def stopped_by(outcome: Outcome | None) -> str:
    """The name of the signal that stopped the job; empty when it ended by itself."""
    if outcome is None or outcome.cause is not None or outcome.exit_code <= EXIT_SIGNAL_BASE:
        return ""
    number = outcome.exit_code - EXIT_SIGNAL_BASE
    return signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"


def job_state(state: State) -> JobState:
    if state.phase is Phase.FINISHED and state.outcome is not None:
        return JobState.FINISHED if state.outcome.exit_code == EXIT_OK else JobState.FAILED
    match state.phase:
        case Phase.STARTING:
            return JobState.STARTING
        case Phase.QUIESCING:
            return JobState.SWAPPING if state.attempt else JobState.STARTING
        case Phase.SWAPPING:
            return JobState.SWAPPING
        case Phase.WAITING:
            return JobState.PARKED
        case _:
            return JobState.RUNNING
