"""Writes a version of the job's state to disk now and then, in the background, as a torch.distributed.checkpoint.

Threads: the copier's asks whether a version is due (all ranks agree on that in its round), and copies what this rank will
write while nothing of it may change; `phoenix-durable` talks with the other ranks and writes. Nothing here fails a step: a
checkpoint that cannot be written is given up by all ranks, and tried again when the next version is due.

What is written is hidden. Rank 0 tells its agent when all of it is there; the supervisor, if that generation is still the
job's, has it made visible (`phoenix_launch/checkpoint/folders.py`).
"""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from phoenix_launch.checkpoint import folders
from phoenix_launch.checkpoint.folders import Manifest
from phoenix_launch.copies import Stamp
from phoenix_runtime import link
from phoenix_runtime.checkpoint import pieces, private_files
from phoenix_runtime.checkpoint.bundles import Bundle
from phoenix_runtime.checkpoint.pieces import Decided, Piece, Said
from phoenix_runtime.checkpoint.private import Private
from phoenix_runtime.checkpoint.talk import LeftError, Talk
from phoenix_runtime.communicators.gate import Gate
from phoenix_runtime.drills import DRILLS
from phoenix_runtime.errors import ScriptError
from phoenix_runtime.fault_points import FAULT_POINTS

_END: Final = 5.0  # seconds for the thread to end


class GivenUpError(Exception):
    """All ranks have heard that this checkpoint is not written, and why."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where checkpoints go, whose they are, and which of them: of each `interval`-th version, 0: none."""

    root: Path
    interval: int
    job: str
    rank: int
    world: int


@dataclass(eq=False)
class _Order:
    """One checkpoint."""

    stamp: Stamp  # the generation that writes it, and the version
    talk: Talk
    bundles: Sequence[Bundle]
    private: Private
    copies: list[Piece] = field(default_factory=list)
    error: str = ""  # why this rank cannot take part


class Durable:
    """One a process. `group`: of all ranks, for this alone, None in a world of one; `report`: tells what has been written;
    `published`: whether the supervisor has done with it."""

    def __init__(
        self,
        place: Place,
        gate: Gate,
        group: dist.ProcessGroup | None,
        report: Callable[[Stamp], None],
        published: Callable[[Stamp], bool],
        remark: Callable[[str], None] = link.remark,
    ) -> None:
        self.place = place
        self._gate, self._group = gate, group
        self._report, self._published, self._remark = report, published, remark
        self._changed = threading.Condition()
        self._order: _Order | None = None  # the one under way
        self._memory: dict[str, Tensor] = {}  # the copies of the last one, for the next
        self._written: Stamp | None = None  # by rank 0, and not published yet
        self._last = -1  # the newest version that needs no checkpoint
        self._stopped = self._ended = False
        self._failing = False  # said
        self._slow = False  # said
        self._thread = threading.Thread(target=self._run, name="phoenix-durable", daemon=True)
        self._thread.start()

    # --- the copier's thread -----------------------------------------------------------------------------------------

    def due(self, version: int) -> bool:
        """The same on all ranks, but for one that has joined at this version."""
        return self.place.interval > 0 and version > self._last and version > 0 and version % self.place.interval == 0

    def idle(self) -> bool:
        """Whether a checkpoint can begin."""
        return self.settled() and not self._stopped

    def settled(self) -> bool:
        """Nothing is being written, and what was written is published. Any thread."""
        with self._changed:
            if self._written is not None and self._published(self._written):
                self._written = None
            return self._order is None and self._written is None

    def missed(self, version: int) -> None:
        """A version was due, and not all ranks were idle."""
        with self._changed:
            busy = self._order or self._written
        if self.place.rank == 0 and busy is not None and not self._slow:
            self._slow = True
            self._remark(
                f"no checkpoint of step {version}: an older one is still being written; a longer --checkpoint-interval"
                " would fit this disk (said once)"
            )

    def take(
        self,
        stamp: Stamp,
        bundles: Sequence[Bundle],
        private: Private,
        ready: Sequence[torch.Event] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """All ranks have agreed upon it. Returns when it has copies of all that it needs. `check` may raise, no Exception:
        then it is void, as for all others."""
        names = [name for bundle in bundles for name, _ in bundle.tensors]
        order = _Order(
            stamp,
            self._talk(),
            bundles,
            Private(private.captured, private.step, more={private_files.NAMES: names}, withdrawn=private.withdrawn),
        )
        try:
            for event in ready:
                event.synchronize()
            order.copies = pieces.copies(bundles, self.place.rank, self.place.world, check, self._memory)
            self._memory = {piece.name: piece.copy for piece in order.copies}
        except Exception as error:  # out of memory, mostly: the others have to hear of it
            order.error, order.copies, self._memory = f"its state could not be copied: {_said(error)}", [], {}
        with self._changed:
            if self._stopped:
                order.talk.leave()
            self._order, self._last = order, stamp.version
            self._changed.notify_all()

    # --- the main thread ---------------------------------------------------------------------------------------------

    def talk(self) -> Talk:
        """With all ranks, at the script's start."""
        return self._talk()

    def resume(self, version: int) -> None:
        """A generation begins, at a version that is on disk or may be written again."""
        with self._changed:
            self._stopped = False
            self._last = min(self._last, version)

    def begin_at(self, version: int) -> None:
        """The state was loaded from this checkpoint."""
        self._last = version

    def finish(self, seconds: float) -> Stamp | None:
        """The script is over: wait for what is being written. Returns what then is to be published."""
        with self._changed:
            self._changed.wait_for(lambda: self._order is None or self._ended, seconds)
            return self._written

    def end(self) -> None:
        self.stop()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(_END)

    # --- the thread that brings notices ------------------------------------------------------------------------------

    def stop(self) -> None:
        """Communicators are about to break: what is being written is void. Returns at once. Any thread."""
        with self._changed:
            self._stopped = True
            order = self._order
        if order is not None:
            order.talk.leave()

    # --- our own thread ----------------------------------------------------------------------------------------------

    def _talk(self) -> Talk:
        return Talk(self._gate, self._group, self.place.rank, self.place.world)

    def _run(self) -> None:
        self._gate.ours.add(threading.get_ident())
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._order is not None)
                order = self._order
            if self._ended or order is None:
                return
            try:
                self._write(order)
            except LeftError:
                pass
            except GivenUpError as error:
                self._given_up(order, str(error))
            except Exception as error:
                if not order.talk.over:
                    self._given_up(order, _said(error))
            with self._changed:
                self._order = order = None
                self._changed.notify_all()

    def _write(self, order: _Order) -> None:
        place, talk = self.place, order.talk
        decided, owners, words = self._agree(order)
        folder = place.root / folders.pending_name(place.job, order.stamp)
        writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

        def local_plan() -> SavePlan:
            tensors = pieces.written(order.copies, decided, order.private.captured)
            return _local_plan(planner, writer, tensors, coordinator=place.rank == 0)

        plan, metadata = self._plan(talk, planner, writer, local_plan)

        def write() -> Any:
            FAULT_POINTS.reached("writing", order.stamp.version)
            DRILLS.check_disk()
            results = writer.write_data(planner.finish_plan(plan), planner).wait()
            path = folders.private_path(folder, place.rank)
            private_files.write(path, place.job, place.rank, order.stamp, order.private)
            FAULT_POINTS.reached("written", order.stamp.version)
            return results

        results = _together(talk, write)
        if place.rank == 0:
            _find_all(folder, results, place.world)
            writer.finish(metadata, results)
            manifest = Manifest(
                job=place.job, generation=order.stamp.generation, step=order.stamp.version, world=place.world,
                owners=owners, words=words,
            )  # fmt: skip
            _write_manifest(folder, manifest)
            self._whole(order.stamp)

    def _agree(self, order: _Order) -> tuple[Decided, dict[str, tuple[int, ...]], dict[str, str]]:
        place, said = self.place, Said(order.error)
        try:
            if not order.error:
                said = pieces.said_of(order.copies, order.bundles, order.private.captured, place.rank, place.world)
        except Exception as problem:
            said = Said(_said(problem))
        order.bundles = ()
        answers: list[Decided] = []
        owners: dict[str, tuple[int, ...]] = {}
        words: dict[str, str] = {}
        heard = [msgspec.msgpack.decode(each, type=Said) for each in order.talk.gather(msgspec.msgpack.encode(said))]
        if place.rank == 0:
            error = _first_error([each.error for each in heard])
            try:
                if not error:
                    self._open(order.stamp)
                    answers, owners, words = pieces.decide(heard)
            except Exception as problem:
                error = _said(problem)
            if error:
                answers = [Decided(error)] * place.world
        decided = msgspec.msgpack.decode(
            order.talk.scatter([msgspec.msgpack.encode(each) for each in answers]), type=Decided
        )
        if decided.error:
            raise GivenUpError(decided.error)
        return decided, owners, words

    def _plan(
        self,
        talk: Talk,
        planner: DefaultSavePlanner,
        writer: FileSystemWriter,
        local_plan: Callable[[], SavePlan],
    ) -> tuple[SavePlan, Any]:
        """Which of what all ranks have this one writes; at rank 0 also what all of it is."""
        found = _together(talk, local_plan)
        metadata: Any = None
        answers: list[bytes] = []
        if self.place.rank == 0:
            try:
                plans, metadata = planner.create_global_plan(found)
                answers = [pickle.dumps((plan, "")) for plan in writer.prepare_global_plan(plans)]
            except Exception as error:
                answers = [pickle.dumps((None, _said(error)))] * self.place.world
        plan, why = pickle.loads(talk.scatter(answers))
        if why:
            raise GivenUpError(why)
        return plan, metadata

    def _open(self, stamp: Stamp) -> None:
        """Rank 0 makes the folder, and removes those that nobody will finish."""
        place = self.place
        place.root.mkdir(parents=True, exist_ok=True)
        folders.sweep(place.root, place.job, Stamp(stamp.generation, 0))
        folder = place.root / folders.pending_name(place.job, stamp)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / folders.PRIVATE).mkdir(parents=True)

    def _whole(self, stamp: Stamp) -> None:
        with self._changed:
            self._written = stamp
        self._report(stamp)
        if self._failing:
            self._failing = False
            self._remark(f"checkpoints can be written again: step {stamp.version}")

    def _given_up(self, order: _Order, why: str) -> None:
        """Rank 0 speaks, and removes what there is of it: nobody writes there any more."""
        if self.place.rank:
            return
        folder = self.place.root / folders.pending_name(self.place.job, order.stamp)
        shutil.rmtree(folder, ignore_errors=True)
        if not self._failing:
            self._failing = True
            self._remark(
                f"no checkpoint of step {order.stamp.version} in {self.place.root}: {why}; training goes on, it is tried"
                " again when the next one is due (said once)"
            )


def _local_plan(
    planner: DefaultSavePlanner, writer: FileSystemWriter, tensors: Mapping[str, Tensor], *, coordinator: bool
) -> SavePlan:
    planner.set_up_planner(dict(tensors), storage_meta=writer.storage_meta(), is_coordinator=coordinator)
    writer.set_up_storage_writer(coordinator)
    return writer.prepare_local_plan(planner.create_local_plan())


def _together(talk: Talk, do: Callable[[], Any]) -> list[Any]:
    """What `do` gave on each rank, at rank 0. Raises GivenUpError everywhere when it failed on one of them."""
    try:
        mine, error = do(), ""
    except Exception as problem:
        mine, error = None, _said(problem)
    heard = [pickle.loads(each) for each in talk.gather(pickle.dumps((mine, error)))]
    errors = [error for _, error in heard]
    why = talk.scatter([_first_error(errors).encode()] * len(errors)).decode()
    if why:
        raise GivenUpError(why)
    return [result for result, _ in heard]


def _find_all(folder: Path, results: Sequence[Sequence[WriteResult]], world: int) -> None:
    """Raises FileNotFoundError, GivenUpError: what a rank has written on its host is not there, or not whole."""
    ends: dict[str, int] = {}
    for result in (result for each in results for result in each):
        stored = result.storage_data
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    for rank in range(world):
        ends[str(folders.private_path(folder, rank).relative_to(folder))] = 1
    for name, end in ends.items():
        if not (folder / name).exists() or (folder / name).stat().st_size < end:
            raise GivenUpError(f"{name} was written, but not here: all hosts have to share this folder")


def _first_error(errors: Sequence[str]) -> str:
    return next((f"rank {rank}: {error}" for rank, error in enumerate(errors) if error), "")


def _said(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    if isinstance(error, ScriptError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    with open(folder / folders.MANIFEST, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        file.flush()
        os.fsync(file.fileno())
    folders.sync_folder(folder / folders.PRIVATE)
    folders.sync_folder(folder)
