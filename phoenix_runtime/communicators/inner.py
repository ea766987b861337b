"""The real communicators inside a swappable group: gloo on the CPU, NCCL on GPUs.

NCCL paths have not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, FakeProcessGroup, HashStore, PrefixStore, ProcessGroup, Store
from torch.distributed.distributed_c10d import GroupName

CARRIED: Final = ("gloo", "nccl")  # which backends we can abort and replace
_TYPES: Final = {"gloo": ProcessGroup.BackendType.GLOO, "nccl": ProcessGroup.BackendType.NCCL}


@dataclass(frozen=True, slots=True)
class Identity:
    """Which group this is: the same in all generations, whatever process holds a rank."""

    name: GroupName
    rank: int  # in the group
    size: int
    timeout: timedelta
    global_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Devices:
    """Which backend serves which device type, in the order in which the default is chosen last to first."""

    backends: Mapping[str, str] = field(default_factory=lambda: {"cpu": "gloo"})

    @classmethod
    def parse(cls, backend: str | None) -> Devices:
        """As init_process_group's `backend`: None, "gloo", "nccl" or "cpu:gloo,cuda:nccl".

        Raises ValueError for a backend that cannot be swapped.
        """
        cuda = torch.cuda.is_available()
        if backend is None:
            found = {"cpu": "gloo", "cuda": "nccl"} if cuda and dist.is_nccl_available() else {"cpu": "gloo"}
        elif ":" in backend:
            pairs = (entry.split(":", 1) for entry in backend.lower().split(","))
            found = {device.strip(): name.strip() for device, name in pairs}
        elif backend.lower() == "gloo":
            found = {"cpu": "gloo", "cuda": "gloo"} if cuda else {"cpu": "gloo"}
        else:
            found = {"cuda": backend.lower()}
        for device, name in found.items():
            if name not in CARRIED:
                raise ValueError(
                    f"phoenix cannot swap {name} communicators ({device}): it carries {' and '.join(CARRIED)}"
                )
        return cls(found)

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(self.backends)

    def __str__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.backends.items())


def connect(identity: Identity, devices: Devices, store: Store) -> ProcessGroup:
    """A new group of real communicators. Waits for the other ranks, at most `identity.timeout`."""
    group = ProcessGroup(store, identity.rank, identity.size)
    made: dict[str, Backend] = {}  # one communicator a backend, also when it serves two device types
    for device, name in devices.backends.items():
        if name not in made:
            made[name] = _connect_one(name, identity, PrefixStore(f"{name}/", store))
        group._register_backend(torch.device(device), _TYPES[name], made[name])
    group._set_default_backend(_TYPES["nccl" if "nccl" in made else "gloo"])
    return group


def unconnected(identity: Identity) -> ProcessGroup:
    """What stands in a group until it gets communicators: it refuses every collective."""
    group = ProcessGroup(HashStore(), identity.rank, identity.size)
    options: Any = FakeProcessGroup.Options()  # type: ignore[call-arg]
    options.error_on_collective = True
    refusing = FakeProcessGroup._create_internal(identity.rank, identity.size, options)  # type: ignore[call-arg]
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, refusing)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    return group


def _connect_one(name: str, identity: Identity, store: Store) -> Backend:
    if name == "gloo":
        gloo = dist.ProcessGroupGloo(store, identity.rank, identity.size, timeout=identity.timeout)
        gloo.options.global_ranks_in_group = list(identity.global_ranks)
        gloo.options.group_name = identity.name
        gloo._set_sequence_number_for_group()
        return gloo
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = identity.timeout
    options.global_ranks_in_group = list(identity.global_ranks)
    options.group_name = identity.name
    nccl = dist.ProcessGroupNCCL(store, identity.rank, identity.size, options)
    nccl._set_sequence_number_for_group()
    return nccl
