"""From settings to an opened job: which nodes, which folder, which keys, and who runs it."""

from __future__ import annotations

from collections.abc import Mapping

from phoenix_launch.bus.keys import new_key_pair
from phoenix_launch.errors import UsageError
from phoenix_launch.hosts.facts import interface_addresses
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.job.drills import check_targets, parse_plan
from phoenix_launch.node.arrival import EVERYWHERE
from phoenix_launch.options.checkpoints import check_checkpoints
from phoenix_launch.options.nodes import nodes_of
from phoenix_launch.records.folders import JobFolder, jobs_root, new_job_id
from phoenix_launch.settings import RunSettings, check_timeouts
from phoenix_launch.supervision.conduct import LOOPBACK, run_job
from phoenix_launch.supervision.detach import detached
from phoenix_launch.supervision.joining import launch_joined
from phoenix_launch.supervision.opening import Job


def launch(settings: RunSettings, environ: Mapping[str, str]) -> int:
    """Run a job to its end; returns the exit code. Raises PhoenixError for what the user can mend."""
    check_timeouts(settings.timeouts())
    check_checkpoints(settings)
    for text in settings.drills:
        parse_plan(text)
    if settings.joins:
        return launch_joined(settings, environ)
    specs = nodes_of(settings)
    check_targets(map(parse_plan, settings.drills), [spec.name for spec in specs], _known_ranks(settings, specs))
    address = bus_address(settings, specs)
    root = jobs_root(environ)
    job = new_job_id(settings.script, root, settings.job_name)
    folder = JobFolder.create(root, job)
    plan = Job(settings, environ, folder, specs, new_key_pair(), address, 0)
    if settings.detach:
        return detached(lambda started: run_job(plan, started), job, folder.logs_path)
    return run_job(plan)


def bus_address(settings: RunSettings, specs: tuple[NodeSpec, ...]) -> str:
    """Where the supervisor listens. Raises UsageError."""
    if settings.interface:
        return address_of(settings.interface)
    return settings.local_addr or (EVERYWHERE if any(spec.host for spec in specs) else LOOPBACK)


def _known_ranks(settings: RunSettings, specs: tuple[NodeSpec, ...]) -> int:
    """How many there will be; 0 when only the hosts themselves can tell."""
    each = int(settings.nproc_per_node) if settings.nproc_per_node.isdecimal() else 0
    counts = [spec.slots or each for spec in specs if not spec.spare]
    return sum(counts) if all(counts) else 0


def address_of(interface: str) -> str:
    """The address of a named interface of this machine, or the address itself. Raises UsageError."""
    known = interface_addresses()
    if known.get(interface):
        return known[interface][0]
    if any(interface in addresses for addresses in known.values()):
        return interface
    raise UsageError(f"this machine has no interface {interface}", hint=f"there are: {', '.join(sorted(known))}")
