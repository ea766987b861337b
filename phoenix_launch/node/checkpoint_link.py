"""The agent's end of its checkpoint server: starting it, telling it where the job stands, hearing what it keeps."""

from __future__ import annotations

import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from phoenix_launch.bootstrap import AgentBootstrap
from phoenix_launch.clock import OwnClock
from phoenix_launch.copies import SlotPeer
from phoenix_launch.local_messages import (
    CheckpointSettings,
    CheckpointUp,
    CutOff,
    NodeLocal,
    SaveSlots,
    SlotRules,
    SlotsKept,
    SlotsSaved,
)
from phoenix_launch.node.endings import Endings
from phoenix_launch.node.fresh_process import Started, start
from phoenix_launch.node.local_stream import LocalStream
from phoenix_launch.node.output import OutputPump, SpareLabel
from phoenix_launch.node.owned_processes import OwnedProcesses
from phoenix_launch.node.poll_loop import PollLoop
from phoenix_launch.node.process import NodeProcess
from phoenix_launch.wire import NO_GENERATION

RESTARTS: Final = 3  # within ...
WINDOW_SECONDS: Final = 60.0  # ... so many seconds; more, and there are no copies in memory on this node any more
UP_SECONDS: Final = 20.0  # from its start to its listening
LAST_WORDS_SECONDS: Final = 1.0  # from its closing the socket to its exit
_SOCKET: Final = "slots.sock"
_NOTHING: Final = SlotsKept(NO_GENERATION, ())


class CheckpointLink:
    """One checkpoint server at a time, from the moment that somebody wants it. What a dead one kept is lost."""

    def __init__(
        self,
        loop: PollLoop,
        bootstrap: AgentBootstrap,
        address: str,
        runtime: Path,
        owned: OwnedProcesses,
        endings: Endings,
        pump: OutputPump,
        clock: OwnClock,
        remark: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._bootstrap = bootstrap
        self._address = address or "127.0.0.1"
        self._path = str(runtime / _SOCKET)
        self._owned = owned
        self._endings = endings
        self._pump = pump
        self._clock = clock
        self._remark = remark
        self._environment: dict[str, str] = {}
        self._off = not bootstrap.slots_key
        self._stream: LocalStream | None = None
        self._key = 0
        self._starts: deque[float] = deque()
        self._reason = ""
        self._been_up = False
        self._rules: SlotRules | None = None  # what the server was told last
        self._kept = _NOTHING
        self.peer: SlotPeer | None = None  # where it is, when it is up
        self.saved: SlotsSaved | None = None  # what became of the wish to save it all

    # --- what it is asked --------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """Where workers find it; empty before it was up for the first time, and when there will be none any more."""
        return self._path if self._been_up and not self._off else ""

    @property
    def kept(self) -> SlotsKept | None:
        """What it keeps, and as of which generation; None: this node has no server, so nothing to offer."""
        return self._kept if self._key and not self._off else None

    def want(self, environment: Callable[[], dict[str, str]]) -> None:
        """There is one from now on; to be said again at will."""
        if not self._off and not self._key:
            self._environment = environment()
            self._start()

    def follow(self, rules: SlotRules) -> None:
        """Where the job stands; to be said again at will."""
        if self._stream is not None and self.peer is not None and rules != self._rules:
            self._rules = rules
            self._stream.say(rules)

    def save(self, message: SaveSlots) -> None:
        """What it keeps goes to disk; `saved` says when."""
        if self._stream is not None:
            self._stream.say(message)

    def kill(self) -> bool:
        """SIGKILL to the server, for a drill; False: there is none."""
        process = self._owned.get(self._key) if self._key else None
        if process is None or process.pidfd < 0:
            return False
        signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
        return True

    def cut_off(self, seconds: float) -> None:
        """For a drill; nothing happens where there is no server."""
        if self._stream is not None:
            self._stream.say(CutOff(seconds))

    def close(self) -> None:
        """The server ends at this."""
        if self._stream is not None:
            self._stream.close()
        self._stream = self.peer = self._rules = None
        self._kept = _NOTHING

    # --- its life ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        now = self._clock.now
        while self._starts and self._starts[0] < now - WINDOW_SECONDS:
            self._starts.popleft()
        if len(self._starts) > RESTARTS:
            self._give_up(f"its server ended {len(self._starts)} times within a minute: {self._reason}")
            return
        self._starts.append(now)
        self._key = self._owned.own_key()
        self._reason = ""
        try:
            started = self._begin()
        except OSError as error:
            self._give_up(f"its server cannot be started: {error}")
            return
        process = NodeProcess(self._key, self)
        process.popen = started.popen
        process.deadline = now + UP_SECONDS
        self._owned.register(process, started.popen.pid)
        self._pump.attach(process.key, started.stdout, started.stderr, SpareLabel(process.pid))

    def _begin(self) -> Started:
        Path(self._path).unlink(missing_ok=True)  # of one that was killed
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            descriptor = theirs.fileno()
            # -P: what lies in the script's folder must not be taken for a module of the standard library
            argv = [
                self._bootstrap.command.python,
                "-P",
                "-u",
                "-m",
                "phoenix_launch.checkpoint.server",
                str(descriptor),
            ]
            started = start(argv, self._environment, self._bootstrap.cwd, (descriptor,))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        bootstrap = self._bootstrap
        self._stream = LocalStream(self._loop, ours, self._hear, self._break)
        self._stream.say(
            CheckpointSettings(
                job=bootstrap.job,
                node=bootstrap.index,
                agent_pid=os.getpid(),
                key=bootstrap.slots_key,
                socket=self._path,
                address=self._address,
                port_low=bootstrap.port_low,
                port_high=bootstrap.port_high,
                memory=bootstrap.copy_memory,
                bandwidth=bootstrap.replica_bandwidth,
                encrypt=bootstrap.encrypt,
            )
        )
        return started

    def ended(self, process: NodeProcess, code: int) -> None:
        """Its exit code was collected."""
        self._endings.end(process.key, self._clock.now)
        if process.key != self._key:
            return
        self.close()
        words = self._pump.tail(process.key).strip().rpartition("\n")[2]
        self._reason = ", ".join(text for text in (f"exit code {code}", self._reason, words) if text)
        self._start()

    def overdue(self, process: NodeProcess) -> None:
        """It is not up in time, or closed its socket and lives on."""
        self._reason = self._reason or f"not up within {UP_SECONDS:g} s"
        self._endings.end(process.key, self._clock.now)

    def _hear(self, message: NodeLocal) -> None:
        match message:
            case CheckpointUp(error="", port=port):
                self.peer = SlotPeer(self._bootstrap.index, self._address, port)
                self._been_up = True
                self._owned[self._key].deadline = None
            case CheckpointUp(error=error):
                self._break(error)
            case SlotsKept():
                self._kept = message
            case SlotsSaved():
                self.saved = message
            case _:
                self._break(f"it sent a {type(message).__name__}")

    def _break(self, reason: str) -> None:
        self.close()
        self._reason = reason
        process = self._owned.get(self._key)
        if process is not None and process.code is None:
            process.deadline = self._clock.now + LAST_WORDS_SECONDS

    def _give_up(self, reason: str) -> None:
        self.close()
        self._off = True
        self._remark(f"copies in memory are off on {self._bootstrap.node}: {reason}")
