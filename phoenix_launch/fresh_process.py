"""Starts a process afresh: in a session of its own, owned by this thread, its output on two pipes."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from phoenix_launch.processes import child_setup


@dataclass(frozen=True, slots=True)
class Started:
    """A process that was started afresh, and the read ends of what it writes."""

    popen: subprocess.Popen[bytes]
    stdout: int
    stderr: int


def start(argv: list[str], environment: dict[str, str], cwd: str, descriptors: tuple[int, ...] = ()) -> Started:
    """It reads from /dev/null and inherits `descriptors` besides its output. Raises OSError."""
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
            preexec_fn=child_setup(os.getpid()),
        )
    except BaseException:
        os.close(out_read)
        os.close(err_read)
        raise
    finally:
        os.close(out_write)
        os.close(err_write)
    return Started(popen, out_read, err_read)
