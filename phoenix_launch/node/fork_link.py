"""The agent's end of its fork server: starting it, asking it for processes, noticing that it is gone and why."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Final

from phoenix_launch import channel
from phoenix_launch.bootstrap import Command
from phoenix_launch.clock import OwnClock
from phoenix_launch.errors import ProtocolError
from phoenix_launch.local_messages import ForkServerReady, ForkServerSettings, Park
from phoenix_launch.node.endings import Endings
from phoenix_launch.node.fresh_process import Started, start
from phoenix_launch.node.output import OutputPump, SpareLabel
from phoenix_launch.node.owned_processes import OwnedProcesses
from phoenix_launch.node.poll_loop import PollLoop
from phoenix_launch.node.process import NodeProcess

LOCAL_SECONDS: Final = 1.0  # a frame on a local socket arrives whole; longer means that its sender hangs
LAST_WORDS_SECONDS: Final = 1.0  # from its closing the socket to its exit


class ForkServer:
    """One fork server at a time; each has a negative key of its own. Callbacks run in the loop's thread."""

    def __init__(
        self,
        loop: PollLoop,
        command: Command,
        load_seconds: float,
        owned: OwnedProcesses,
        endings: Endings,
        pump: OutputPump,
        clock: OwnClock,
        on_ready: Callable[[ForkServerReady], None],
        on_gone: Callable[[str], None],
    ) -> None:
        """`on_gone` gets the reason, as far as it is known; what the fork server has forked goes on."""
        self._loop = loop
        self._command = command
        self._load_seconds = load_seconds
        self._owned = owned
        self._endings = endings
        self._pump = pump
        self._clock = clock
        self._on_ready = on_ready
        self._on_gone = on_gone
        self._socket: socket.socket | None = None
        self._key = 0
        self._reason = ""

    def start(self, environment: dict[str, str], cwd: str) -> None:
        self.close()
        self._key = self._owned.own_key()
        self._reason = ""
        process = NodeProcess(self._key, self)
        try:
            started = self._begin(environment, cwd)
        except OSError as error:
            self._on_gone(f"it cannot be started: {error}")
            return
        process.popen = started.popen
        process.deadline = self._clock.now + self._load_seconds
        self._owned.register(process, started.popen.pid)
        self._pump.attach(process.key, started.stdout, started.stderr, SpareLabel(process.pid))
        self._send(ForkServerSettings(self._command, os.getpid()))

    def _begin(self, environment: dict[str, str], cwd: str) -> Started:
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

    def ended(self, process: NodeProcess, code: int) -> None:
        """Its exit code was collected. What it had started besides parked processes goes with it."""
        self._endings.end(process.key, self._clock.now)
        if process.key == self._key:
            self.close()
            words = self._pump.tail(process.key).strip().rpartition("\n")[2]
            self._on_gone(", ".join(text for text in (f"exit code {code}", self._reason, words) if text))

    def overdue(self, process: NodeProcess) -> None:
        """It is not ready in time, or closed its socket and lives on."""
        self._reason = self._reason or f"not ready within {self._load_seconds:g} s"
        self._endings.end(process.key, self._clock.now)

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
        if not isinstance(message, ForkServerReady):
            self._break(f"it sent a {type(message).__name__}")
            return
        self._owned[self._key].deadline = None
        if message.fork_unsafe:
            self.close()
        self._on_ready(message)

    def _break(self, reason: str) -> None:
        self.close()
        self._reason = reason
        process = self._owned.get(self._key)
        if process is not None and process.code is None:
            process.deadline = self._clock.now + LAST_WORDS_SECONDS
