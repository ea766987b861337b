"""The agent's end of the workers that know the runtime: who they are, what they say, and what they are told."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import Final

from phoenix_launch.local_messages import NodeLocal, WorkerDrill, WorkerPlan, WorkerReport
from phoenix_launch.messages import RuntimeReport
from phoenix_launch.node.actions import Member
from phoenix_launch.node.local_stream import LocalStream
from phoenix_launch.node.poll_loop import PollLoop

_BACKLOG: Final = 256
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


class _Link:
    """One worker's connection; what it said last stays known when it has closed."""

    def __init__(self) -> None:
        self.stream: LocalStream | None = None
        self.said: RuntimeReport | None = None
        self.told: WorkerPlan | None = None  # on this connection


class WorkerLinks:
    """Workers are known by the pid that the kernel vouches for; whoever else connects is sent away."""

    def __init__(
        self, loop: PollLoop, path: str, workers: Callable[[], list[Member]], remark: Callable[[str], None]
    ) -> None:
        """Listens on `path`. Raises OSError. `workers`: those of this node, dead ones too as long as they are reported."""
        self._loop = loop
        self._path = path
        self._workers = workers
        self._remark = remark
        self._links: dict[int, _Link] = {}
        self._refused = 0
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._door.bind(path)
            os.chmod(path, 0o600)
            self._door.listen(_BACKLOG)
        except OSError:
            self._door.close()
            raise
        self._door.setblocking(False)
        loop.watch(self._door.fileno(), self._accept)

    @property
    def used(self) -> bool:
        """Whether any of the workers has said hello."""
        return any(link.said is not None for link in self._links.values())

    def said(self, key: int) -> RuntimeReport | None:
        """The newest word of this worker; None: it does not know the runtime."""
        link = self._links.get(key)
        return link.said if link is not None else None

    def tell(self, plans: Callable[[Member], WorkerPlan | None]) -> None:
        """Every worker that has said hello is told its plan, unless it knows it; None: nothing new."""
        for member in self._workers():
            link = self._links.get(member.key)
            if link is None or link.stream is None or link.said is None:
                continue
            plan = plans(member)
            if plan is not None and plan != link.told:
                link.told = plan
                link.stream.say(plan)

    def drill(self, key: int, drill: WorkerDrill) -> bool:
        """Whether this worker could be told; what it makes of it is not known."""
        link = self._links.get(key)
        if link is None or link.stream is None or link.said is None:
            return False
        link.stream.say(drill)
        return True

    def ended(self, key: int) -> None:
        """This worker's process has ended: take in what it still had to say."""
        self._accept()
        link = self._links.get(key)
        if link is not None and link.stream is not None:
            link.stream.read()
            if link.stream is not None:  # not closed by what it read
                link.stream.close()
                link.stream = None

    def forget_gone(self) -> None:
        """Nobody reports them any more."""
        for key in self._links.keys() - {member.key for member in self._workers()}:
            link = self._links.pop(key)
            if link.stream is not None:
                link.stream.close()

    def close(self) -> None:
        self._loop.forget(self._door.fileno())
        self._door.close()
        for link in self._links.values():
            if link.stream is not None:
                link.stream.close()
        try:
            os.unlink(self._path)
        except OSError:
            return

    # --- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._door.accept()
            except OSError:  # nobody is left, or it went away at once
                return
            pid, uid, _ = _CREDENTIALS.unpack(
                caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            member = self._named(pid) if uid == os.getuid() else None
            if member is None:
                caller.close()
                self._refuse(f"process {pid}, which is none of its workers")
            else:
                self._take_in(member.key, caller)

    def _named(self, pid: int) -> Member | None:
        """One that has ended meanwhile may have left a last word. A number is only used again after the exit was seen."""
        found = [member for member in self._workers() if member.pid == pid and not member.cleared]
        return min(found, key=lambda member: not member.alive, default=None)

    def _take_in(self, key: int, caller: socket.socket) -> None:
        """A worker has one connection, the newest: it may have lost the one before."""
        link = self._links.setdefault(key, _Link())
        if link.stream is not None:
            link.stream.close()
        link.told = None
        link.stream = LocalStream(self._loop, caller, partial(self._hear, key), partial(self._gone, key))

    def _hear(self, key: int, message: NodeLocal) -> None:
        link = self._links[key]
        if isinstance(message, WorkerReport):
            link.said = message.runtime
        elif link.stream is not None:
            link.stream.close()
            self._gone(key, f"it sent a {type(message).__name__}")

    def _gone(self, key: int, reason: str) -> None:
        self._links[key].stream = None
        if reason:
            self._refuse(f"worker {key}, but not as agreed: {reason}")

    def _refuse(self, who: str) -> None:
        self._refused += 1
        if self._refused == 1:
            self._remark(f"the agent's socket was used by {who} (said once)")
