"""Lets the agent see where this process is, also while it hangs: faulthandler writes the stacks without python's lock."""

from __future__ import annotations

import contextlib
import faulthandler
import os

from phoenix_launch import stack_files


def prepare(socket_path: str) -> None:
    """From now on the signal makes this process write all its threads' stacks. Before the agent first hears of it."""
    with contextlib.suppress(OSError, RuntimeError):  # a full disk: it trains without
        path = stack_files.path_of(socket_path, os.getpid())
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(stack_files.SIGNAL, file=descriptor, all_threads=True)
