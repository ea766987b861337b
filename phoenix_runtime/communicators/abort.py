"""Takes every thread of this process out of every collective, whichever it is in, by breaking the communicators.

The thread that brings the notice calls this; one short-lived thread a group does the breaking (three groups one after the
other took ten times as long as three at once).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from phoenix_runtime.communicators.gate import Gate
from phoenix_runtime.communicators.group import PhoenixGroup
from phoenix_runtime.communicators.inner import Identity

_NO_ONES_TAG: Final = 0x50480001  # nobody sends under it
_DRAIN: Final = 0.01  # seconds that operations have to fail by themselves before it is asked whether they sleep
_AT_ONCE: Final = timedelta(milliseconds=1)


def abort(gate: Gate, groups: Sequence[PhoenixGroup], reason: BaseException, seconds: float) -> tuple[str, ...]:
    """Close the gate and break what is in flight.

    Args:
        gate: of all the groups.
        groups: all groups of this process.
        reason: why, for whoever asks the gate.
        seconds: how long this may take. Past it the process cannot be trusted to come back, and should be replaced.

    Returns:
        Names of what did not come to an end in time; empty when no thread is in a collective any more.
    """
    gate.close(reason)
    end = time.monotonic() + seconds
    breakers = [
        (str(group.identity.name), threading.Thread(target=_break, args=(group,), name="phoenix-abort", daemon=True))
        for group in groups
        if group.identity.size > 1
    ]
    for _, breaker in breakers:
        breaker.start()
    for _, breaker in breakers:
        breaker.join(max(0.0, end - time.monotonic()))
    stuck = tuple(name for name, breaker in breakers if breaker.is_alive())
    _drain(gate, end)
    gate.give_up()
    if not gate.wait_until_empty(max(0.0, end - time.monotonic())):
        stuck = (*stuck, "a thread that waits in a collective")
    return stuck


def _drain(gate: Gate, end: float) -> None:
    """Wait until nothing of the broken communicators can write into a tensor any more.

    Nearly all operations fail within milliseconds. One that does not is asleep: it waits for what never comes, and the pairs
    that could wake it are closed. (See SwappableWork.)
    """
    while not gate.wait_until_empty(_DRAIN) and time.monotonic() < end:
        if not any(_runs(task) for task in Path("/proc/self/task").iterdir()):
            return


def _runs(task: Path) -> bool:
    """Whether this thread is one of gloo's that carry collectives, and does something."""
    try:
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # it ended
        return False
    return name.startswith("pt_gloo") and rest.split()[0] != "S"


def _break(group: PhoenixGroup) -> None:
    for device, name in group.devices.backends.items():
        backend: Any = group.inner._get_backend(torch.device(device))
        if name == "gloo":
            _break_gloo(backend, group.identity)
        else:
            _break_nccl(backend)


def _break_gloo(backend: Any, identity: Identity) -> None:
    """gloo's abort, shutdown and set_timeout do nothing to operations in flight; a receive that times out closes all pairs.

    One from a peer that has closed its own end fails at once, and closes no others: so every peer is asked. (Asking one
    was enough nearly always. Two ranks whose neighbours were both quicker kept the pair between them, and waited.)
    """
    for step in range(1, identity.size):
        with contextlib.suppress(RuntimeError):  # as intended
            backend.recv([torch.empty(1)], (identity.rank + step) % identity.size, _NO_ONES_TAG).wait(_AT_ONCE)


def _break_nccl(backend: dist.ProcessGroupNCCL) -> None:
    """All communicators of a process have to be aborted between one group start and end (pytorch#119797). Not run yet."""
    backend._group_start()
    try:
        backend.abort()
    finally:
        backend._group_end()
