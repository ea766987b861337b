"""Where a worker's stacks are written when its agent asks for them by a signal: what both ends have to agree upon."""

from __future__ import annotations

import signal
from typing import Final

SIGNAL: Final = signal.SIGRTMAX - 3  # of the real-time signals, none that libc, torch or a debugger takes


def path_of(socket_path: str, pid: int) -> str:
    """Beside the agent's socket, so that it goes with the job."""
    return f"{socket_path}.{pid}.stacks"
