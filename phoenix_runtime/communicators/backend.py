"""The backend "phoenix" of torch.distributed: makes the groups of this process and knows them all."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import GroupName

from phoenix_runtime.communicators import batched, compiled, objects
from phoenix_runtime.communicators.abort import abort
from phoenix_runtime.communicators.gate import Gate
from phoenix_runtime.communicators.group import NAME, PhoenixGroup
from phoenix_runtime.communicators.inner import Devices, Identity, connect, unconnected
from phoenix_runtime.communicators.recording import Recorder
from phoenix_runtime.communicators.shadow import Shadow
from phoenix_runtime.communicators.store import Construction
from phoenix_runtime.startup import StartupRecord


class PhoenixBackend:
    """All swappable groups of a process, behind one gate."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.devices = Devices()
        self._groups: weakref.WeakSet[PhoenixGroup] = weakref.WeakSet()
        self._registered = False
        self.late: Callable[[str], None] | None = None  # is told the name of each group that is made from now on
        self.startup: Recorder | Shadow | None = None  # what stands before the groups until the first step

    def register(self, devices: Devices) -> None:
        """Make `backend="phoenix"` known; groups made from now on are served by `devices`. May be called again."""
        self.devices = devices
        if self._registered:
            return
        self._registered = True
        types = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        dist.Backend.register_backend(NAME, self._create, extended_api=True, devices=types)
        compiled.hide()
        objects.guard(self.gate)
        batched.coalesce_swappable()

    @property
    def groups(self) -> list[PhoenixGroup]:
        """Those that were not destroyed, in an order that is the same on all ranks of a group."""
        living = (group for group in self._groups if group.living)
        return sorted(living, key=lambda group: group.identity.name)

    def abort(self, reason: BaseException, seconds: float) -> tuple[str, ...]:
        """Take every thread out of every collective; see `abort.abort`."""
        return abort(self.gate, self.groups, reason, seconds)

    def rebuild(self, generation: str) -> None:
        """Give every group new communicators and open the gate. All ranks call it, with the same word for `generation`.

        Old communicators end in a thread of their own: that takes up to a third of a second each.
        """
        groups = self.groups
        self._adopt(
            groups,
            [
                connect(group.identity, group.devices, PrefixStore(f"{generation}/", group.get_group_store()))
                for group in groups
            ],
        )

    def construct(self, publish: Callable[[Mapping[str, bytes]], None]) -> Construction:
        """Begin to build new communicators for every group; `publish` takes this rank's addresses, for all others."""
        construction = Construction(self.groups, publish)
        construction.start()
        return construction

    def adopt(self, construction: Construction, seconds: float) -> None:
        """Give every group what was built for it, open the gate, and leave shadow mode; raises as `Construction.wait`."""
        inners = construction.wait(seconds)
        if isinstance(self.startup, Shadow):
            self.startup.detach()
            self.startup = None
        self._adopt(construction.groups, inners)

    def _adopt(self, groups: Sequence[PhoenixGroup], inners: Sequence[dist.ProcessGroup]) -> None:
        old = [group.replace(inner) for group, inner in zip(groups, inners, strict=True)]
        self.gate.reopen()
        threading.Thread(target=old.clear, name="phoenix-dispose", daemon=True).start()

    # --- the script's start ------------------------------------------------------------------------------------------

    def record_startup(self) -> Recorder:
        """From now on what groups receive is recorded, until the third step. Before any group is made."""
        self.startup = Recorder()
        return self.startup

    def shadow(self, record: StartupRecord) -> Shadow:
        """From now on groups have no communicators; the record's rank starts here, alone. Until `adopt`."""
        self.startup = Shadow(record)
        return self.startup

    @property
    def alone(self) -> bool:
        """Its groups have no communicators yet."""
        return isinstance(self.startup, Shadow)

    def own_group(self, name: str, timeout: timedelta = dist.distributed_c10d.default_pg_timeout) -> PhoenixGroup:
        """A group of all ranks for ourselves, on the CPU: torch does not know it, and no record has it. All ranks make it."""
        world = dist.get_world_size()
        identity = Identity(
            name=GroupName(name),
            rank=dist.get_rank(),
            size=world,
            timeout=timeout,
            global_ranks=tuple(range(world)),
        )
        store = PrefixStore(f"{name}/", dist.distributed_c10d._get_default_store())
        devices = Devices()
        inner = unconnected(identity) if self.alone else connect(identity, devices, store)
        group = PhoenixGroup(identity, devices, store, inner, self.gate, self._split)
        group.scripts = False
        self._groups.add(group)
        return group

    def _create(self, options: Any, _: object) -> PhoenixGroup:
        """What torch calls for each new group (`options`: torch's _DistributedBackendOptions)."""
        identity = Identity(
            name=GroupName(str(options.group_id)),
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout,
            global_ranks=tuple(options.global_ranks_in_group) or tuple(range(options.group_size)),
        )
        return self._group(identity, self.devices, options.store)

    def _group(self, identity: Identity, devices: Devices, store: Store) -> PhoenixGroup:
        inner = unconnected(identity) if self.alone else connect(identity, devices, store)
        group = PhoenixGroup(identity, devices, store, inner, self.gate, self._split)
        self._groups.add(group)
        if self.startup is not None:
            self.startup.attach(group)
        if self.late is not None:
            self.late(str(identity.name))
        return group

    def _split(
        self, parent: PhoenixGroup, ranks: list[int], timeout: timedelta | None, name: str
    ) -> PhoenixGroup | None:
        """Without NCCL's own split: a communicator that was made from another could not be replaced by itself."""
        if parent.identity.rank not in ranks:
            return None
        world = parent.identity.global_ranks
        members = tuple(world[rank] for rank in ranks)
        identity = Identity(
            name=GroupName(name or f"{parent.identity.name}:split:{'-'.join(map(str, ranks))}"),
            rank=ranks.index(parent.identity.rank),
            size=len(ranks),
            timeout=timeout or parent.identity.timeout,
            global_ranks=members,
        )
        group = self._group(identity, parent.devices, PrefixStore(f"{identity.name}/", parent.get_group_store()))
        group._set_group_name(identity.name)
        return group


BACKEND: Final = PhoenixBackend()  # torch knows one backend of a name a process
