"""Process groups that nobody could make again for a replacement: those made late, and those that are not ours."""

from __future__ import annotations

import torch.distributed as dist

from phoenix_runtime import link
from phoenix_runtime.communicators.group import NAME
from phoenix_runtime.control import Control


class LateGroups:
    """Says once what it finds, and that failures start all processes again from then on."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._known = 0  # how many torch had when this was last asked

    def made(self, name: str) -> None:
        """A replacement, which runs the script's start only, would not have this group."""
        if not self._control.said.outside:
            link.remark(
                f"the process group {name} was made after the first step: from now on a failure starts all processes again"
            )
            self._control.report(outside="it made a process group after its first step")

    def look(self) -> None:
        """Groups that torch has made without us have communicators that nobody could replace."""
        groups = dist.distributed_c10d._world.pg_map
        if len(groups) == self._known or self._control.said.outside:
            return
        self._known = len(groups)
        foreign = sorted({backend for backend, _ in groups.values()} - {NAME})
        if foreign:
            link.remark(f"a process group has the backend {foreign[0]}: a failure starts all processes again")
            self._control.report(outside=f"it has a process group of the backend {foreign[0]}")
