"""What nodes that were found fit are told to load: the environment that is fixed for the whole job, spares. Decides only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phoenix_launch.hosts.environment import job_environment
from phoenix_launch.job.environment import job_wide_environment
from phoenix_launch.messages import Prepare
from phoenix_launch.supervision.muster import Muster, Recruit, worker_slots
from phoenix_launch.supervision.opening import Job


@dataclass
class Preparation:
    """The environment that is fixed for the whole job, decided when the first node is prepared."""

    job: Job
    muster: Muster
    decided: dict[str, str] | None = None

    def prepare(self, recruit: Recruit, say: Callable[[str], None]) -> Prepare:
        settings = self.job.settings
        assert recruit.facts is not None
        slots = worker_slots(settings.nproc_per_node, recruit.spec, recruit.facts)
        if self.decided is None:
            self.decided, remark = self._decide()
            for text in filter(None, (remark, self._unbound())):
                say(f"phoenix-run: {text}")
        return Prepare(self.decided, slots if recruit.spec.spare else settings.local_spares)

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
        known = [
            (r.facts.cores, worker_slots(nproc, r.spec, r.facts), bool(r.spec.host))
            for r in self.muster.recruits.values()
            if r.facts is not None and not r.spec.spare
        ]
        machines = [(cores, slots) for cores, slots, real in known if real] or [
            (min(cores for cores, _, _ in known), sum(slots for _, slots, _ in known))
        ]
        cores, workers = min(machines, key=lambda machine: machine[0] / machine[1])
        inherited = job_environment(self.job.environ, self.job.settings.env, simulated=not self.job.on_hosts)
        return job_wide_environment(inherited, cores=cores, workers_on_machine=workers, workers_per_node=workers)
