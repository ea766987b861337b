"""`init_process_group`: as torch's own, on communicators that can be replaced where phoenix-run is there to replace them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from phoenix_launch.checkpoint.pairs import SlotRefusedError
from phoenix_launch.copies import Source, Stamp
from phoenix_launch.local_messages import WorkerPlan
from phoenix_launch.messages import NoRoom, OddBits, PlanPhase
from phoenix_launch.timeouts import timeout as row
from phoenix_runtime import communicators, leaving, link, rehearsal
from phoenix_runtime.checkpoint import private
from phoenix_runtime.checkpoint.copier import Copier
from phoenix_runtime.checkpoint.disk import DIRECTORY, Disk
from phoenix_runtime.checkpoint.halting import Halt
from phoenix_runtime.checkpoint.talk import LeftError
from phoenix_runtime.checkpoint.verification import Finding
from phoenix_runtime.communicators import BACKEND
from phoenix_runtime.control import Control
from phoenix_runtime.errors import ScriptError
from phoenix_runtime.fault_points import FAULT_POINTS
from phoenix_runtime.fault_points import VARIABLE as FAULTS
from phoenix_runtime.loop import LOOP
from phoenix_runtime.repair import IN_SECTION, Swaps
from phoenix_runtime.resuming import can_restore, open_slots, private_source
from phoenix_runtime.startup import StartupRecord

JOB: Final = "PHOENIX_JOB"  # set by phoenix-run for each worker
_AGREEMENT: Final = "phoenix/agreement"


def is_resilient() -> bool:
    """Whether a failure of another process is repaired here, while this one lives on."""
    return isinstance(LOOP.repair, Swaps) and dist.is_initialized()


def generation() -> int:
    """How often the map from ranks to processes has changed, counted from 1; 0 without phoenix-run."""
    return LOOP.repair.generation.n if isinstance(LOOP.repair, Swaps) else 0


def on_swap(callback: Callable[[], None]) -> None:
    """Call this in every process that survives a failure, before the interrupted step is run again.

    It must not communicate. Does nothing where failures are not repaired.
    """
    if isinstance(LOOP.repair, Swaps):
        LOOP.repair.callbacks.append(callback)


def init_process_group(backend: str | None = None, timeout: timedelta | None = None, **options: Any) -> None:
    """Start torch.distributed. The same script runs under phoenix-run, torchrun and plain python.

    Args:
        backend: what carries the groups, as torch's own: None, "gloo", "nccl", "cpu:gloo,cuda:nccl".
        timeout: of each collective, as torch's own.
        options: anything else that torch.distributed.init_process_group takes.

    Raises:
        ValueError: for a backend whose communicators cannot be replaced (under phoenix-run only).
        ScriptError: it was called before in this process (there too).
    """
    if JOB in os.environ:
        _refuse_another_start()
        communicators.register(backend)
        patience = timeout or _torchs_own(backend)
        if rehearsal.asked(os.environ):
            dist.init_process_group(communicators.NAME, timeout=patience, **options)
        else:
            _enter(patience, options)
        if options.get("device_id") is not None:
            dist.group.WORLD.bound_device_id = options["device_id"]  # type: ignore[union-attr]  # it was just made
    elif "RANK" in os.environ or {"init_method", "store"} & options.keys():
        dist.init_process_group(backend, timeout=timeout, **options)
    else:  # plain python: a world of one
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1, **options)


def _refuse_another_start() -> None:
    """A process has one line to its agent, and a replacement could not tell which start it has to repeat."""
    if dist.is_initialized():
        raise ScriptError(
            "init_process_group was called, but there is a default group already",
            hint="call phoenix_runtime.init_process_group once, in place of torch's own",
        )
    if isinstance(LOOP.repair, Swaps):
        raise ScriptError(
            "init_process_group was called again after destroy_process_group",
            hint="keep the default group for as long as the script runs",
        )


def _enter(patience: timedelta | None, options: dict[str, Any]) -> None:
    """Take part in the job as a process that can be repaired, or, without an agent, as one that cannot."""
    FAULT_POINTS.arm(os.environ.get(FAULTS, ""), os.environ.get("RANK", "0"))
    FAULT_POINTS.reached("start")
    copier: list[Copier] = []
    disk: Disk | None = None

    def abort(reason: BaseException) -> tuple[str, ...]:
        for each in copier:
            each.stop()
        if disk is not None:
            disk.durable.stop()
        stuck = BACKEND.abort(reason, row("abort"))
        if LOOP.in_section and control is not None:  # however long it may take to come to its end
            control.report(outside=IN_SECTION)
        return stuck

    def starts_alone(plan: WorkerPlan) -> bool:
        return BACKEND.alone or (plan.alone and not copier)  # from the first word on, before its groups are there

    halt = Halt(lambda stamp: control.report(halted=stamp) if control is not None else None)
    control = Control.connect(os.environ, abort, starts_alone, halt.ask)
    if control is None:
        dist.init_process_group(communicators.NAME, timeout=patience, **options)
        return
    if control.plan.alone:
        FAULT_POINTS.reached("alone")
        BACKEND.shadow(_predecessors_record(control))
        options = {key: value for key, value in options.items() if key not in ("init_method", "store")}
        options |= {"store": HashStore(), "rank": _number("RANK"), "world_size": _number("WORLD_SIZE")}
    else:
        BACKEND.record_startup().ignores = lambda: LOOP.in_section
    if control.plan.alone or control.plan.phase is PlanPhase.RUN:
        control.report(joined=control.plan.generation, aborted=control.plan.generation)
    dist.init_process_group(communicators.NAME, timeout=patience, **options)
    rank, world = dist.get_rank(), dist.get_world_size()
    group = BACKEND.own_group(_AGREEMENT) if world > 1 else None
    if os.environ.get(DIRECTORY):
        disk = Disk.opened(os.environ, BACKEND, control, rank, world)
    copier.append(
        Copier(
            os.environ[JOB],
            rank,
            BACKEND.gate,
            group,
            no_room=partial(_no_room, control),
            degraded=partial(_degraded, control),
            to_disk=disk.durable if disk is not None else None,
            halt=halt,
            found=partial(_odd_bits, control),
        )
    )
    swaps = Swaps(BACKEND, control, copier[0], rank=rank, world=world, check=LOOP.check, disk=disk)
    LOOP.repair = swaps
    BACKEND.gate.outside = swaps.outside
    leaving.at_the_end(swaps.leave, swaps.stop)
    if disk is not None:
        try:
            disk.choose(control.plan)
        except LeftError as error:  # a process of the job failed meanwhile
            BACKEND.gate.refuse(error)


def _no_room(control: Control, found: NoRoom) -> None:
    control.report(no_room=found)


def _odd_bits(control: Control, found: Sequence[Finding], stamp: Stamp) -> None:
    odd = [OddBits(stamp, each.bundle, each.tensors[0], each.holders, each.odd) for each in found]
    control.report(odd=tuple(odd))


def _degraded(control: Control, why: str) -> None:
    if why:
        link.remark(f"{why}; another node is asked, and this one again later")
    control.report(degraded=why)


def _predecessors_record(control: Control) -> StartupRecord:
    """What the process that this one replaces received until its first step: as soon as survivors cannot change it, which
    is before it is known where all resume; unless it was not final yet."""
    early = control.wait_for(lambda plan: can_restore(plan) or (plan.startup is not None and bool(plan.slots)))
    if early.startup is not None:
        with contextlib.suppress(OSError, SlotRefusedError):
            record = _record_in(early, early.startup.source, early.startup.stamp)
            if record.final:
                return record
    while True:
        plan = control.wait_for(can_restore)
        assert plan.resumption is not None and plan.resumption.stamp is not None
        try:
            return _record_in(plan, private_source(plan, _number("RANK")), plan.resumption.stamp)
        except (OSError, SlotRefusedError) as error:
            if not control.superseded(plan.generation):
                control.end_outside(f"its state could not be loaded: {error}")


def _record_in(plan: WorkerPlan, source: Source, stamp: Stamp) -> StartupRecord:
    """Raises OSError, SlotRefusedError."""
    with contextlib.ExitStack() as open_:
        slots = open_.enter_context(contextlib.closing(open_slots(plan)))
        reader = open_.enter_context(contextlib.closing(slots.read(source.bundle, stamp, source.node)))
        return StartupRecord.from_bytes(private.startup_of(reader))


def _number(name: str) -> int:
    return int(os.environ[name])


def _torchs_own(backend: str | None) -> timedelta | None:
    """NCCL's default is shorter than that of all others."""
    if backend == "nccl":
        own: timedelta | None = dist.distributed_c10d._get_default_timeout(dist.Backend("nccl"))
        return own
    return None
