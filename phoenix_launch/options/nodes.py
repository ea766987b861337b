"""From the options to the nodes that a job is started on; a host file is read for it."""

from __future__ import annotations

from phoenix_launch.hosts.specs import NodeSpec, read_hostfile, resolve
from phoenix_launch.settings import RunSettings


def nodes_of(settings: RunSettings) -> tuple[NodeSpec, ...]:
    """All nodes that are started from here. Raises UsageError for what cannot be meant, or a file that cannot be read."""
    hostfile = read_hostfile(settings.hostfile) if settings.hostfile else None
    return resolve(
        nodes=settings.nodes or ("" if settings.hostfile else str(settings.nnodes[1])),
        spares=settings.spares,
        hostfile_text=hostfile,
        hostfile=settings.hostfile,
        nproc=settings.nproc_per_node,
    )


def check_nodes(settings: RunSettings) -> None:
    """The same, before anything is loaded or started. Hosts that join by themselves are known when they come."""
    if not settings.joins:
        nodes_of(settings)
