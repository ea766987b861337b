"""When the job must stop: this node's copies in memory are written to disk before its checkpoint server ends.

Of a node that has to stop by itself the workers come to a version that is complete first, as in a job that is told to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from phoenix_launch.local_messages import SaveSlots
from phoenix_launch.messages import RuntimeReport
from phoenix_launch.node.checkpoint_link import CheckpointLink
from phoenix_launch.timeouts import timeout


class EmergencySave:
    """One an agent; it happens once. `root`: --checkpoint-dir, empty: nothing is saved."""

    def __init__(self, root: str, checkpoint: CheckpointLink, remark: Callable[[str], None]) -> None:
        self._root, self._checkpoint, self._remark = root, checkpoint, remark
        self._until: float | None = None
        self._over = False
        self._halt_until: float | None = None

    @property
    def possible(self) -> bool:
        kept = self._checkpoint.kept
        return bool(self._root) and not self._over and kept is not None and bool(kept.kept)

    @property
    def halting(self) -> bool:
        return self._halt_until is not None

    def halted(self, said: Iterable[RuntimeReport | None], now: float) -> bool:
        """Begins at the first call; to be asked until it is True. `said`: by each worker that lives here."""
        if self._halt_until is None:
            self._halt_until = now + timeout("halt")
        return now >= self._halt_until or all(runtime is None or _halted(runtime) for runtime in said)

    def over(self, world: int, now: float) -> bool:
        """Begins at the first call; to be asked until it is True. `world`: ranks of the job."""
        if not self.possible or not world:
            return True
        if self._until is None:
            self._until = now + timeout("emergency_save")
            self._checkpoint.save(SaveSlots(self._root, world))
        saved = self._checkpoint.saved
        if saved is None and now < self._until:
            return False
        self._over = True
        if saved is None:
            self._remark(f"the copies in memory could not be saved within {timeout('emergency_save'):g} s")
        elif saved.error:
            self._remark(f"the copies in memory could not be saved: {saved.error}")
        else:
            self._remark(f"its copies in memory are saved in {saved.folder}: --resume goes on from them")
        return True


def _halted(runtime: RuntimeReport) -> bool:
    return runtime.halted is not None and runtime.halted.generation == runtime.joined
