"""What nodes that were found fit are told to load: the environment that is fixed for the whole job, spares. Decides only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from phoenix_launch.hosts.environment import job_environment
from phoenix_launch.job.environment import job_wide_environment
from phoenix_launch.job.state import Phase, State
from phoenix_launch.messages import Prepare
from phoenix_launch.options.checkpoints import of_workers
from phoenix_launch.supervision.muster import Muster, Recruit, worker_slots
from phoenix_launch.supervision.opening import Job

REHEARSE: Final = "PHOENIX_REHEARSE"  # read by phoenix_runtime in the workers


def gathered(state: State, now: float) -> bool:
    """Whether no more nodes are waited for before the first generation."""
    if state.phase is not Phase.STARTING:
        return True
    here = sum(member.alive and not member.spare for member in state.members.values())
    return here >= state.rules.seats_max or now - state.since > state.rules.join_timeout


@dataclass
class Preparation:
    """The environment that is fixed for the whole job, decided when the nodes of its first generation are known.

    Threads are counted when torch is loaded, so nobody loads it before that. When hosts join by themselves this costs
    no time: the last one has to load it too. Only an elastic job that starts with fewer has waited without loading.
    """

    job: Job
    muster: Muster
    decided: dict[str, str] | None = None

    def prepare(self, recruit: Recruit, state: State, now: float, say: Callable[[str], None]) -> Prepare | None:
        """None: not yet."""
        settings = self.job.settings
        assert recruit.facts is not None
        slots = worker_slots(settings.nproc_per_node, recruit.spec, recruit.facts)
        if self.decided is None:
            if self.job.joining is not None and not gathered(state, now):
                return None
            self.decided, remark = self._decide()
            for text in filter(None, (remark, self._unbound())):
                say(f"phoenix-run: {text}")
        asked = {REHEARSE: str(settings.rehearse)} if settings.rehearse else {}
        asked |= of_workers(settings)
        return Prepare({**self.decided, **asked}, slots if recruit.spec.spare else settings.local_spares)

    def _unbound(self) -> str:
        """What --numa-binding cannot do here."""
        without = [r.spec.name for r in self.muster.recruits.values() if r.facts is not None and not r.facts.gpus]
        mode = self.job.settings.numa_binding
        if not mode or not without:
            return ""
        return f"--numa-binding {mode} has no effect on {', '.join(without)}: no GPU there for workers to be near to"

    def _decide(self) -> tuple[dict[str, str], str]:
        """The smallest node decides: the one with the fewest cores for each of its workers."""
        nproc = self.job.settings.nproc_per_node
        machines: dict[str, tuple[int, int]] = {}
        crew = [recruit for recruit in self.muster.recruits.values() if recruit.facts and not recruit.dismissed]
        for recruit in [recruit for recruit in crew if not recruit.spec.spare] or crew:
            assert recruit.facts is not None
            machine = recruit.spec.host or recruit.facts.hostname  # several nodes may share one
            cores, workers = machines.get(machine, (recruit.facts.cores, 0))
            slots = worker_slots(nproc, recruit.spec, recruit.facts)
            machines[machine] = (min(cores, recruit.facts.cores), workers + slots)
        cores, workers = min(machines.values(), key=lambda machine: machine[0] / machine[1])
        inherited = job_environment(self.job.environ, self.job.settings.env, simulated=not self.job.on_hosts)
        return job_wide_environment(inherited, cores=cores, workers_on_machine=workers, workers_per_node=workers)
