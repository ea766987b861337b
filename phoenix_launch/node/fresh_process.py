"""Starts a process afresh: in a session of its own, owned by this thread, its output on two pipes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from phoenix_launch.processes import child_setup


@dataclass(frozen=True, slots=True)
class Started:
    """A process that was started afresh, and the read ends of what it writes."""

    popen: subprocess.Popen[bytes]
    stdout: int
    stderr: int


def start(
    argv: list[str],
    environment: dict[str, str],
    cwd: str,
    descriptors: tuple[int, ...] = (),
    cpus: frozenset[int] = frozenset(),
) -> Started:
    """It reads from /dev/null and inherits `descriptors` besides its output. Raises OSError.

    `cpus`: all that it may run on, empty: as we do.
    """
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    try:
        popen = subprocess.Popen(
            argv,
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out_write,
            stderr=err_write,
            pass_fds=descriptors,
            start_new_session=True,
            preexec_fn=_bound(child_setup(os.getpid()), cpus),
        )
    except BaseException:
        os.close(out_read)
        os.close(err_read)
        raise
    finally:
        os.close(out_write)
        os.close(err_write)
    return Started(popen, out_read, err_read)


def _bound(setup: Callable[[], None], cpus: frozenset[int]) -> Callable[[], None]:
    if not cpus:
        return setup

    def bound() -> None:
        setup()
        try:
            os.sched_setaffinity(0, cpus)
        except OSError:  # an exception here would be no OSError for who starts it
            os.write(2, b"phoenix-run: the CPUs that this process is to be bound to may not be used\n")

    return bound
