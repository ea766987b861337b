"""The harm of a drill that an agent does to its own node, or to a process of it, as if nobody had meant it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from phoenix_launch.command_messages import DrillKind
from phoenix_launch.local_messages import WorkerDrill
from phoenix_launch.messages import Drill
from phoenix_launch.node.cgroup import ControlGroup
from phoenix_launch.node.memory_cage import CAGE_BYTES, CageError
from phoenix_launch.node.owned_processes import OwnedProcesses
from phoenix_launch.node.runtime_support import RuntimeSupport
from phoenix_launch.node.state import NodeState
from phoenix_launch.process_table import ProcessStat, living_descendants, send_signal

FROZEN_SECONDS: Final = 20.0  # of a node, when nothing was said: who is frozen for ever could not be ended with its job
_FREEZE_ROUNDS: Final = 20


def power_loss(guardian: int, runtime: Path) -> None:
    """SIGKILL to the guardian, to everything below this process, and to itself. Does not return."""
    shutil.rmtree(runtime, ignore_errors=True)  # a reboot would have emptied it, and nobody is left to do it
    frozen = _freeze()
    sys.setswitchinterval(60.0)  # from here to the end no other thread runs: the output pump must not notice anything
    _kill(guardian)
    for process in frozen:
        _kill(process.pid)  # stopped, so its number cannot have passed to anybody
    os.kill(os.getpid(), signal.SIGKILL)


def freeze_node(guardian: int, seconds: float) -> None:
    """SIGSTOP to the guardian, to everything below this process, and to itself; after `seconds` all go on."""
    frozen = [process.pid for process in _freeze()]
    _thaw_after([*frozen, guardian, os.getpid()], seconds or FROZEN_SECONDS)
    os.kill(guardian, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)


def harm(drill: Drill, state: NodeState, owned: OwnedProcesses, support: RuntimeSupport, groups: ControlGroup) -> str:
    """To workers, a spare process or the checkpoint server. Why that cannot be, empty: it is done."""
    nobody = f"there is nothing for {drill.kind.value} to harm"
    try:
        return "" if _harmed(drill, state, owned, support, groups) else nobody
    except CageError as error:
        return f"oom needs a memory control group for the worker alone, and none can be made here: {error}"


def _harmed(
    drill: Drill, state: NodeState, owned: OwnedProcesses, support: RuntimeSupport, groups: ControlGroup
) -> bool:
    if drill.kind is DrillKind.KILL_SERVER:
        return support.kill_server()
    if drill.kind is DrillKind.PARTITION:
        return support.cut_off(drill.duration)
    if drill.kind is DrillKind.FAIL_SPARE:
        for pid in state.parked_pids()[:1]:
            _kill(pid)
        return bool(state.parked_pids())
    alive = [member for member in state.workers() if member.order is not None and member.alive and member.pid > 0]
    if drill.rank < 0:
        order = WorkerDrill(drill.kind, drill.value, drill.duration)
        told = [support.drill(member.key, order) for member in alive]  # all of them
        return any(told)
    for member in alive:
        if member.order is None or member.order.rank != drill.rank:
            continue
        if drill.kind is DrillKind.OOM:
            groups.cage(member.pid)
            return support.drill(member.key, WorkerDrill(drill.kind, CAGE_BYTES))
        if drill.kind is not DrillKind.FREEZE:
            return support.drill(member.key, WorkerDrill(drill.kind, drill.value, drill.duration))
        signal.pidfd_send_signal(owned[member.key].pidfd, signal.SIGSTOP)
        if drill.duration:
            _thaw_after([member.pid], drill.duration)
        return True
    return False


def _thaw_after(pids: Iterable[int], seconds: float) -> None:
    """By a process that nobody here waits for: we may be frozen ourselves."""
    names = " ".join(map(str, pids))
    command = ["/bin/sh", "-c", f"sleep {seconds:.3f}; kill -CONT {names}"]
    subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _freeze() -> list[ProcessStat]:
    """Stop everything below this process, so that nobody forks while the list is made."""
    frozen: dict[tuple[int, int], ProcessStat] = {}
    for _ in range(_FREEZE_ROUNDS):
        found = living_descendants(os.getpid())
        fresh = [process for process in found if (process.pid, process.start_time) not in frozen]
        if not fresh:
            break
        for process in fresh:
            send_signal(process, signal.SIGSTOP)
            frozen[process.pid, process.start_time] = process
    return list(frozen.values())


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return
