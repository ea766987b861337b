"""Whether the next failure of a node could be repaired from copies in memory, as people are told. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from phoenix_launch.job.commit import NO_VERSION
from phoenix_launch.job.state import Phase, State
from phoenix_launch.wording import counted

FULL = "full"
RESTORING = "restoring"  # copies of this generation are not complete yet: after the start, and after each swap
DEGRADED = "degraded"  # training goes on, but the loss of some node could not be repaired
NONE = "none"


@dataclass(frozen=True, slots=True)
class Redundancy:
    """`why` it is not full; empty when it is, or is about to be."""

    word: str = ""
    why: str = ""


def redundancy(state: State) -> Redundancy:
    """Without a word for scripts that do not know the runtime, and before their first step."""
    said = [holder.runtime for holder in state.holders.values() if holder.runtime is not None]
    if not any(runtime.holds for runtime in said):
        return Redundancy()
    rules = state.rules
    if rules.snapshot_interval == 0:
        return Redundancy(NONE, "--snapshot-interval 0")
    outside = next((f"rank {h.rank}: {h.runtime.outside}" for h in state.holders.values()
                    if h.runtime is not None and h.runtime.outside), "")  # fmt: skip
    complete = min((runtime.complete for runtime in said), default=NO_VERSION)
    swapping = state.phase is not Phase.RUNNING or len(said) < len(state.places)
    if swapping or complete < max(state.resume, 0):
        return Redundancy(NONE, outside) if outside else Redundancy(RESTORING)
    domains = len({state.members[seat.node].domain for seat in state.lineup})
    if rules.replicas == 0:
        return Redundancy(DEGRADED, "--replicas 0: a lost node's state is lost")
    if domains <= rules.replicas:
        return Redundancy(DEGRADED, f"{counted(domains, 'failure domain')} for {counted(rules.replicas, 'replica')}")
    unwilling = next((runtime.degraded for runtime in said if runtime.degraded), "")
    return Redundancy(DEGRADED, unwilling) if unwilling else Redundancy(FULL)
