"""Carries out a drill that somebody asked for, or says what it would hit."""

from __future__ import annotations

from phoenix_launch.bus.supervisor import SupervisorBus
from phoenix_launch.command_messages import Answer, DrillKind, FaultRequest
from phoenix_launch.errors import PhoenixError
from phoenix_launch.job import drills
from phoenix_launch.job.drills import Target
from phoenix_launch.job.state import State
from phoenix_launch.messages import Drill
from phoenix_launch.supervision.chronicle import Chronicle


def inject(
    request: FaultRequest, state: State, chronicle: Chronicle, bus: SupervisorBus, *, allowed: bool
) -> tuple[Answer, Target | None]:
    """The answer, and whom it has hit. What happens to the supervisor itself is left to it."""
    if not (allowed or request.dry_run):
        return Answer(False, "this job was not started with --allow-drills (only --dry-run is possible)"), None
    try:
        target = drills.find_target(state, request.kind, request.rank, request.node, request.value)
    except PhoenixError as error:
        return Answer(False, error.message), None
    text = f"{request.kind.value} {target.text}"
    if request.dry_run:
        return Answer(True, f"would {text}"), None
    duration = drills.lasting(request.kind, request.duration)
    chronicle.drill(request.kind.value, target, state, duration)
    if request.kind is not DrillKind.KILL_SUPERVISOR:
        incarnation = state.members[target.node].incarnation
        bus.send(incarnation, Drill(request.kind, target.rank, request.value, duration), state.generation)
    return Answer(True, text), target
