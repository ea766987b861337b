"""The processes of a node by key and by pid: which there are, whose exit code is known, whose tree is being ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from phoenix_launch.node.endings import Endings, Round
from phoenix_launch.node.poll_loop import PollLoop
from phoenix_launch.node.process import NodeProcess
from phoenix_launch.node.trees import Claim
from phoenix_launch.processes import reap


class OwnedProcesses:
    """Every process that the agent started or had forked, until nothing of it is left."""

    def __init__(
        self,
        loop: PollLoop,
        endings: Endings,
        parking: Callable[[], bool],
        on_exit: Callable[[NodeProcess, int], None],
    ) -> None:
        """`parking`: whether a process may exist that belongs to us and has not said so yet."""
        self._loop = loop
        self._endings = endings
        self._parking = parking
        self._on_exit = on_exit
        self._processes: dict[int, NodeProcess] = {}
        self._claims: dict[int, Claim] = {}
        self._keys: dict[int, int] = {}  # pid -> key, as long as the exit code was not collected
        self._own_key = 0
        self._strangers: dict[int, int] = {}  # exit codes of processes that had not said yet which they are

    def __getitem__(self, key: int) -> NodeProcess:
        return self._processes[key]

    def __iter__(self) -> Iterator[NodeProcess]:
        return iter(list(self._processes.values()))

    def get(self, key: int) -> NodeProcess | None:
        return self._processes.get(key)

    def own_key(self) -> int:
        """A fresh key for a process of the agent's own; keys of the node's state are positive."""
        self._own_key -= 1
        return self._own_key

    def add(self, process: NodeProcess) -> None:
        """One whose pid is not known yet."""
        self._processes[process.key] = process

    def register(self, process: NodeProcess, pid: int) -> None:
        """Its pid is known: from now on its exit is noticed, and what comes of it belongs to it."""
        process.pid = pid
        self.add(process)
        self.claim(process)
        self._keys[pid] = process.key
        process.watch_exit(self._loop, self.collect)

    def claim(self, process: NodeProcess) -> None:
        """To be said again when its marker has changed."""
        self._claims[process.key] = process.claim

    def collected(self, pid: int) -> int | None:
        """The exit code of a process that ended before it was registered."""
        return self._strangers.pop(pid, None)

    def collect(self) -> None:
        """Take the exit codes of whatever has ended."""
        parking = self._parking()
        for pid, code in reap().items():
            key = self._keys.pop(pid, None)
            if key is not None:
                process = self._processes[key]
                process.ended(self._loop, code)
                self._on_exit(process, code)
            elif parking:
                self._strangers[pid] = code
        if not parking:
            self._strangers.clear()

    def round(self, now: float) -> Round:
        """One round of ending trees; those that are cleared have no claim on anything any more."""
        done = self._endings.round(self._claims.values(), now, not self._parking(), self._exited)
        for key in done.cleared:
            self._claims.pop(key, None)
        return done

    def _exited(self, key: int) -> bool:
        process = self._processes.get(key)
        return process is None or process.code is not None or not process.pid

    def drop(self, process: NodeProcess) -> None:
        """Nobody reports it any more: forget it, unless something of it is still there."""
        over = process.drained or (process.code is not None and not process.pid)
        if over and process.key not in self._claims:
            process.close(self._loop)
            del self._processes[process.key]
