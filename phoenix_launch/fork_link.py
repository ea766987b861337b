"""The agent's end of its fork server: starting it, asking it for processes, noticing that it is gone."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from phoenix_launch import channel
from phoenix_launch.errors import ProtocolError
from phoenix_launch.messages import Command, ForkServerReady, ForkServerSettings, Park
from phoenix_launch.poll_loop import PollLoop
from phoenix_launch.processes import child_setup

LOCAL_SECONDS: Final = 1.0  # a frame on a local socket arrives whole; longer means that its sender hangs


@dataclass(frozen=True, slots=True)
class Started:
    """A process that was started afresh, and the read ends of what it writes."""

    popen: subprocess.Popen[bytes]
    stdout: int
    stderr: int


def start(argv: list[str], environment: dict[str, str], cwd: str, descriptors: tuple[int, ...] = ()) -> Started:
    """In a session of its own, killed with this thread, reading from /dev/null. Raises OSError."""
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


class ForkServer:
    """One fork server process at a time. Callbacks run in the loop's thread."""

    def __init__(
        self,
        loop: PollLoop,
        command: Command,
        on_ready: Callable[[ForkServerReady], None],
        on_broken: Callable[[str], None],
    ) -> None:
        """`on_broken`: the connection is of no use any more (the process may have ended or not)."""
        self._loop = loop
        self._command = command
        self._on_ready = on_ready
        self._on_broken = on_broken
        self._socket: socket.socket | None = None

    def start(self, environment: dict[str, str], cwd: str) -> Started:
        """Raises OSError when the interpreter cannot be started."""
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            descriptor = theirs.fileno()
            argv = [self._command.python, "-u", "-m", "phoenix_runtime.fork_server", str(descriptor)]
            started = start(argv, environment, cwd, (descriptor,))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.settimeout(LOCAL_SECONDS)
        self._socket = ours
        self._loop.watch(ours.fileno(), self._hear)
        self._send(ForkServerSettings(self._command, os.getpid()))
        return started

    def park(self, slot: int, control: int, stdout: int, stderr: int) -> None:
        """Ask for a process; the caller closes its own copies of the descriptors."""
        self._send(Park(slot), (control, stdout, stderr))

    def close(self) -> None:
        """The fork server ends at this; what it has forked goes on."""
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _send(self, message: ForkServerSettings | Park, descriptors: tuple[int, ...] = ()) -> None:
        if self._socket is None:
            return
        try:
            channel.send(self._socket, message, descriptors)
        except OSError as error:
            self._break(f"it does not take orders: {error}")

    def _hear(self) -> None:
        if self._socket is None:
            return
        try:
            received = channel.receive(self._socket)
        except (OSError, ProtocolError) as error:
            self._break(str(error))
            return
        if received is None:
            self._break("")
            return
        message, descriptors = received
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(message, ForkServerReady):
            self._on_ready(message)
        else:
            self._break(f"it sent a {type(message).__name__}")

    def _break(self, reason: str) -> None:
        self.close()
        self._on_broken(reason)
