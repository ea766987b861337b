"""The end of a supervisor: what is left of every launch ends, by the bus where it can be heard."""

from __future__ import annotations

import select
from collections.abc import Mapping

from phoenix_launch.bus.supervisor import SupervisorBus
from phoenix_launch.clock import OwnClock
from phoenix_launch.messages import NodePlan, PlanPhase
from phoenix_launch.supervision.muster import Recruit
from phoenix_launch.timeouts import timeout
from phoenix_launch.wire import Generation


def part(recruits: Mapping[str, Recruit], bus: SupervisorBus, clock: OwnClock, generation: Generation) -> None:
    """`recruits`: by incarnation. After an orderly end nothing is left. Waits `reap` at most."""
    for recruit in recruits.values():
        if recruit.unheard and recruit.handle is not None:
            recruit.handle.terminate()  # nothing can be said to it; its agent sees the end of its stdin
    left = [r.handle for r in recruits.values() if r.handle is not None and r.handle.poll() is None]
    for incarnation in recruits:
        bus.send(incarnation, NodePlan(generation, PlanPhase.LEAVE), generation)
    poller = select.poll()
    for handle in left:
        poller.register(handle.fileno(), select.POLLIN | select.POLLHUP)
    end = clock.now + timeout("reap")
    while left and clock.now < end:
        poller.poll((end - clock.now) * 1000)
        clock.tick(timeout("reap"))
        for handle in [h for h in left if not h.read_lines() and h.at_end]:
            poller.unregister(handle.fileno())
            left.remove(handle)
    for recruit in recruits.values():
        if recruit.handle is not None:
            recruit.handle.close()
