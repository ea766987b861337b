"""Makes checkpoints on disk visible as the supervisor wishes: in a thread of its own, since a disk may take its time."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from phoenix_launch.checkpoint import folders, saved
from phoenix_launch.copies import Stamp
from phoenix_launch.messages import NodePlan, Published
from phoenix_launch.node.poll_loop import PollLoop

_END: Final = 2.0  # seconds for what is under way when the agent leaves


class Publisher:
    """One an agent; costs nothing until the first plan that asks for it."""

    def __init__(self, loop: PollLoop, root: str, job: str, keep: int, remark: Callable[[str], None]) -> None:
        self._loop, self._root, self._job, self._keep, self._remark = loop, Path(root), job, keep, remark
        self._wanted: queue.SimpleQueue[Stamp | None] = queue.SimpleQueue()
        self._last: Stamp | None = None  # that was asked for
        self._thread: threading.Thread | None = None
        self._bell = -1  # rings in the agent's loop
        self._failing = False  # said
        self.done: Published | None = None  # the last one

    def follow(self, plan: NodePlan) -> None:
        """A plan may say the same many times."""
        stamp = plan.publish
        if stamp is None or not self._root.name or (self._last is not None and stamp <= self._last):
            return
        self._last = stamp
        if self._thread is None:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._loop.watch(self._bell, self._rung)
            self._thread = threading.Thread(target=self._run, name="phoenix-publisher", daemon=True)
            self._thread.start()
        self._wanted.put(stamp)

    def close(self) -> None:
        if self._thread is None:
            return
        self._wanted.put(None)
        self._thread.join(_END)
        self._loop.forget(self._bell)
        if not self._thread.is_alive():
            os.close(self._bell)

    def _rung(self) -> None:
        """The agent's loop has come round: it reports what is done."""
        os.eventfd_read(self._bell)

    def _run(self) -> None:
        while (stamp := self._wanted.get()) is not None:
            path = self._root / folders.visible_name(stamp.version)
            try:
                folders.publish(self._root, self._job, stamp, self._keep)
                saved.forget(self._root, stamp.version)
                error = ""
            except OSError as problem:
                error = str(problem)
            if bool(error) != self._failing:
                self._failing = bool(error)
                text = f"cannot be made visible: {error}" if error else "was made visible again"
                self._remark(f"the checkpoint of step {stamp.version} {text}")
            self.done = Published(stamp, str(path), error)
            os.eventfd_write(self._bell, 1)
