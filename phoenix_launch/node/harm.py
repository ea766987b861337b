"""The harm of a drill that an agent does to its own node: power loss, after which nobody has said a word."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Final

from phoenix_launch.process_table import ProcessStat, living_descendants, send_signal

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
