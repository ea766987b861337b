"""Checkpoints on disk in a job: the writer with its line to the agent, and which one a generation of new processes loads."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from phoenix_launch.checkpoint import folders, saved
from phoenix_launch.copies import Stamp
from phoenix_launch.local_messages import WorkerPlan
from phoenix_runtime import link
from phoenix_runtime.communicators.backend import PhoenixBackend
from phoenix_runtime.control import AgentGoneError, Control
from phoenix_runtime.errors import ScriptError
from phoenix_runtime.resuming import can_restore, put_back
from phoenix_runtime.state import TrainState

if TYPE_CHECKING:
    from phoenix_runtime.checkpoint.durable import Durable

DIRECTORY: Final = "PHOENIX_CHECKPOINT_DIR"  # these are set by phoenix-run for each worker
INTERVAL: Final = "PHOENIX_CHECKPOINT_INTERVAL"
RESUME: Final = "PHOENIX_RESUME"
_GROUP: Final = "phoenix/durable"
_PATIENCE: Final = timedelta(days=1)  # of a group in which a slow disk keeps others waiting


class Disk:
    """One a process, of a job with --checkpoint-dir."""

    def __init__(self, durable: Durable, *, resume: bool) -> None:
        self.durable = durable
        self._resume = resume
        self._folder: Path | None = None  # what this process begins with
        self._control: Control | None = None

    @classmethod
    def opened(
        cls, environ: Mapping[str, str], backend: PhoenixBackend, control: Control, rank: int, world: int
    ) -> Disk:
        """All ranks make it."""
        from phoenix_runtime.checkpoint.durable import Durable, Place  # half a second, which only such a job needs

        place = Place(
            Path(environ[DIRECTORY]), int(environ.get(INTERVAL) or 0), environ["PHOENIX_JOB"], rank, world
        )  # fmt: skip
        group = backend.own_group(_GROUP, _PATIENCE) if world > 1 else None

        def published(stamp: Stamp) -> bool:
            plan = control.plan
            known = plan.published
            return plan.generation > stamp.generation or (known is not None and known >= stamp)

        durable = Durable(place, backend.gate, group, lambda stamp: control.report(written=stamp), published)
        disk = cls(durable, resume=environ.get(RESUME, "") not in ("", "0"))
        disk._control = control
        return disk

    # --- the script's start ------------------------------------------------------------------------------------------

    def choose(self, plan: WorkerPlan) -> None:
        """All ranks agree upon what they load, where that is not in memory: with --resume the newest that there is; after
        the copies in memory were lost the newest of this job.

        Raises ScriptError when nobody knows what there is: a job that was to go on must not begin anew.
        """
        place = self.durable.place
        again = plan.generation.n > 1
        if plan.alone or can_restore(plan) or not (self._resume or again):
            return
        talk = self.durable.talk()
        name, error = "", ""
        if place.rank == 0:
            try:
                name = self._newest()
            except OSError as problem:
                error = problem.strerror or str(problem)
        error, _, name = talk.scatter([f"{error}\0{name}".encode()] * place.world).decode().partition("\0")
        if error:
            raise ScriptError(f"{place.root} cannot be read: {error}", hint="mend it, or start without --resume")
        self._folder = place.root / name if name else None
        if place.rank == 0:
            link.remark(self._start())

    def _newest(self) -> str:
        """What was saved when a job had to stop is mostly newer than what it had written before."""
        place = self.durable.place
        found = folders.newest(place.root, "" if self._resume else place.job)
        manifest = folders.read_manifest(found) if found is not None else None
        memory = saved.newest(place.root) if self._resume else None
        if memory is not None and (manifest is None or memory.version > manifest.step):
            fitting = saved.newest(place.root, place.world)
            if fitting is not None and (manifest is None or fitting.version > manifest.step):
                return fitting.folder.name
            link.remark(f"{memory.folder} is newer, but only of use to {memory.world} ranks")
        return found.name if found is not None else ""

    def _start(self) -> str:
        if self._folder is not None:
            return f"going on from {self._folder}"
        return f"{self.durable.place.root} has no checkpoint: starting at step 0"

    def load_into(self, state: TrainState) -> bool:
        """Bring the state to what was chosen; False: nothing was. Raises ScriptError."""
        if self._folder is None:
            return False
        from phoenix_runtime.checkpoint import loading

        place = self.durable.place
        load = loading.load_saved if self._folder.name.startswith(saved.PREFIX) else loading.load
        put_back(state, load(self._folder, state, place.rank, place.world))
        self.durable.begin_at(state.step)
        return True

    # --- the script's end --------------------------------------------------------------------------------------------

    def finish(self, seconds: float) -> None:
        """Wait for what is being written, until it is visible."""
        written = self.durable.finish(seconds)
        if written is not None and self._control is not None:
            with contextlib.suppress(TimeoutError, AgentGoneError):
                self._control.wait_for(lambda _: self.durable.settled(), seconds)
