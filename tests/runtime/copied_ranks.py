"""Four ranks on two nodes train with copies in memory; a node dies; four new processes go on from what is left in the slots.

`python copied_ranks.py KIND...` (kinds of small_models.py, also with " early": lost in the first step): prints a JSON line a
kind. The first four also go on, without copies and without a fault: with their digests those of the others are compared.
As the kind "interrupted" nobody dies: all are interrupted while three of them are in the round of a version's copy.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Final

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import small_models
import torch
import torch._dynamo
import torch.distributed as dist
from checkpoint_nodes import G1, G2, JOB, CheckpointNode
from small_models import SIZE, Job

from phoenix_launch.checkpoint.client import SlotsLink
from phoenix_launch.copies import Source, Stamp
from phoenix_launch.job import commit, recovery
from phoenix_launch.messages import Ground
from phoenix_launch.wire import Generation
from phoenix_runtime import TrainState, communicators, run_step
from phoenix_runtime.checkpoint import bundles
from phoenix_runtime.checkpoint.copier import Copier
from phoenix_runtime.checkpoint.filling import Footing
from phoenix_runtime.checkpoint.private import Private
from phoenix_runtime.checkpoint.restore import restore
from phoenix_runtime.communicators import BACKEND
from phoenix_runtime.loop import LOOP, NoRepair
from phoenix_runtime.state import Captured

DEADLINE: Final = 40.0
STEPS: Final = 6
BEFORE: Final = 3  # completed steps at the loss; what is left then is the version before the last
EARLY: Final = " early"
INTERRUPTED: Final = "interrupted"
RECORD: Final = b"the startup record"


class Copying(NoRepair):
    """As the loop's repair: copies every version."""

    def __init__(self, rank: int, generation: Generation, footing: Footing) -> None:
        self.rank, self.generation = rank, generation
        self.copier = Copier(JOB, rank, BACKEND.gate, BACKEND.own_group("phoenix/agreement"))
        self.copier.resume(footing)
        self.resumed: Stamp | None = None
        self.held: dict[str, tuple[tuple[int, ...], str]] = {}

    def entered(self, state: TrainState, function: Callable[[], object], captured: Captured, *, again: bool) -> None:
        held = bundles.bundled(state, self.rank, SIZE)
        self.held = {bundle.key: (bundle.holders, bundle.layout.digest) for bundle in held}
        stamp = Stamp(self.generation, state.step)
        if self.resumed is not None and self.resumed.version == state.step:
            stamp = self.resumed
        self.copier.begin(stamp, held, Private(captured, state.step, RECORD, {"rank": self.rank}))

    def before_optimizer(self, state: TrainState) -> None:
        self.copier.wait(LOOP.check)


def enter(rank: int, port: int) -> None:
    faulthandler.dump_traceback_later(DEADLINE - 5, exit=True)
    communicators.register("gloo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE))
    dist.init_process_group("phoenix", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=DEADLINE))


def train(job: Job, steps: int) -> None:
    while job.state.step < steps:
        run_step(job.state, job.step)


def first_process(kind: str, rank: int, line: Connection, port: int, footing: Footing) -> None:
    enter(rank, port)
    copying = LOOP.repair = Copying(rank, G1, footing)
    job = Job(kind.removesuffix(EARLY), rank)
    train(job, 1 if kind.endswith(EARLY) else BEFORE)
    copying.copier.end()
    line.send((copying.held, copying.copier.complete))
    line.recv()
    LOOP.repair = NoRepair()
    train(job, STEPS)
    line.send(job.digest())


def second_process(
    kind: str, rank: int, line: Connection, port: int, footing: Footing, stamp: Stamp, sources: tuple[Source, ...]
) -> None:
    enter(rank, port)
    copying = LOOP.repair = Copying(rank, G2, footing)
    copying.resumed = stamp
    job = Job(kind.removesuffix(EARLY), rank)
    slots = SlotsLink(footing.slots, JOB, footing.ground.places[rank])
    slots.generation = G2
    private = restore(job.state, sources, stamp, slots, rank=rank, world=SIZE)
    slots.close()
    assert private is not None
    assert (private.step, private.startup, private.more) == (stamp.version, RECORD, {"rank": rank})
    job.state.restore(private.captured)
    assert job.state.step == stamp.version
    train(job, STEPS)
    copying.copier.end()
    line.send((job.digest(), copying.copier.complete, copying.copier.stalled))


class Interrupted(Copying):
    """One rank does not come to the round of version 2, so that the others wait in it; then all hear of it and abort."""

    repairs = True
    AT: Final = 2

    def __init__(self, rank: int, line: Connection, before: Footing, after: Footing) -> None:
        super().__init__(rank, G1, before)
        self.line, self.after = line, after
        self.heard = threading.Event()
        self.seconds = -1.0
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        self.line.recv()
        self.copier.stop()
        assert not BACKEND.abort(RuntimeError("a rank died, they say"), 10.0)
        self.heard.set()

    def entered(self, state: TrainState, function: Callable[[], object], captured: Captured, *, again: bool) -> None:
        here = state.step == self.AT and not again
        if not here or self.rank < SIZE - 1:
            super().entered(state, function, captured, again=again)
        if here:
            self.line.send("entered")
        if here and self.rank == SIZE - 1:
            assert self.heard.wait(DEADLINE)

    def repair(self, state: TrainState, reason: BaseException, *, dirty: bool) -> None:
        assert not dirty and self.heard.wait(DEADLINE)
        began = time.monotonic()
        self.copier.resume(self.after)
        self.seconds = time.monotonic() - began
        BACKEND.rebuild("g2")
        self.generation, self.resumed = G2, Stamp(G1, self.AT)


def interrupted_process(rank: int, line: Connection, port: int, before: Footing, after: Footing) -> None:
    enter(rank, port)
    LOOP.repair = NoRepair()
    job = Job("ddp", rank)
    train(job, STEPS)
    calm = job.digest()
    LOOP.repair = copying = Interrupted(rank, line, before, after)
    job = Job("ddp", rank)
    train(job, STEPS)
    copying.copier.end()
    line.send((calm, job.digest(), copying.copier.complete, copying.seconds))


class Processes:
    """What a run starts, and ends in any case."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def fork(self, run: Callable[[], Any]) -> None:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            try:
                run()
                signal.pause()
            finally:
                os._exit(1)
        self.pids.append(pid)

    def start(self, play: Callable[[Connection], None]) -> Connection:
        """A process that plays its part when it is told to go on: its pid has to be known before."""
        line, theirs = Pipe()

        def run() -> None:
            try:
                theirs.recv()
                play(theirs)
            except BaseException:
                theirs.send(traceback.format_exc()[-3000:])

        self.fork(run)
        theirs.close()
        return line

    def store(self) -> int:
        ours, theirs = Pipe()

        def host() -> None:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            theirs.send(store.port)
            signal.pause()

        self.fork(host)
        return int(ours.recv())

    def end(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def answers(lines: list[Connection]) -> list[Any]:
    found: dict[Connection, Any] = {}
    until = time.monotonic() + DEADLINE
    while len(found) < len(lines):
        ready = wait([line for line in lines if line not in found], until - time.monotonic())
        assert ready, f"nothing of {[number for number, line in enumerate(lines) if line not in found]}"
        for line in ready:
            assert isinstance(line, Connection)
            found[line] = line.recv()
            assert not isinstance(found[line], str) or len(found[line]) < 100, found[line]
    return [found[line] for line in lines]


def tell(lines: list[Connection]) -> None:
    for line in lines:
        line.send("go on")


def ground(nodes: list[CheckpointNode]) -> Ground:
    """Two ranks on each of the two nodes."""
    return Ground(
        places={rank: nodes[rank // 2].index for rank in range(SIZE)},
        domains=tuple((node.index, f"node{node.index}") for node in nodes),
        servers=tuple(node.peer for node in nodes),
    )


def run(kind: str, nodes: list[CheckpointNode]) -> dict[str, Any]:
    processes = Processes()
    try:
        before, after = ground(nodes[:2]), ground([nodes[0], nodes[2]])
        port = processes.store()
        lines = [
            processes.start(
                lambda line: first_process(kind, rank, line, port, Footing(G1, before, 0, nodes[rank // 2].path))  # noqa: B023
            )
            for rank in range(SIZE)
        ]
        for node in nodes[:2]:
            node.follow(G1, nodes[:2], workers=tuple(processes.pids[1:]))
        tell(lines)
        firsts = answers(lines)
        held: dict[str, tuple[tuple[int, ...], str]] = {}
        for rank, (of_rank, _) in enumerate(firsts):
            for key, described in of_rank.items():
                assert rank in described[0] and held.setdefault(key, described) == described, f"rank {rank}: {key}"
        table = [commit.Bundle(key, holders) for key, (holders, _) in held.items()]
        table += [bundles.private_bundle(rank) for rank in range(SIZE)]
        nodes[1].kill()
        nodes[0].follow(G2, [nodes[0], nodes[2]])
        nodes[0].until_generation(G2)
        plan = recovery.plan(table, (), {0: nodes[0].kept.kept}, after.places, commit.Lineage())
        assert plan is not None, nodes[0].kept
        port = processes.store()
        begun = len(processes.pids)
        homes = {0: nodes[0], 2: nodes[2]}
        again = [
            processes.start(
                lambda line: second_process(
                    kind,
                    rank,  # noqa: B023
                    line,
                    port,
                    Footing(G2, after, plan.stamp.version, homes[after.places[rank]].path),  # noqa: B023
                    plan.stamp,
                    plan.sources[rank],  # noqa: B023
                )
            )
            for rank in range(SIZE)
        ]
        lineage = commit.Lineage().resumed(G2, plan.stamp.version).resumes
        for node in homes.values():
            node.follow(
                G2,
                list(homes.values()),
                resume=plan.stamp.version,
                lineage=lineage,
                workers=tuple(processes.pids[begun:]),
            )
        tell([*lines, *again])
        calm, seconds = answers(lines), answers(again)
        return {
            "calm": calm,
            "resumed": [digest for digest, _, _ in seconds],
            "at": plan.stamp.version,
            "complete": [complete for _, complete in firsts],
            "complete after": [complete for _, complete, _ in seconds],
            "stalled": [round(stalled, 3) for _, _, stalled in seconds],
            "bundles": {bundle.key: list(bundle.holders) for bundle in table if not bundle.private},
        }
    finally:
        processes.end()


def interrupt(nodes: list[CheckpointNode]) -> dict[str, Any]:
    processes = Processes()
    try:
        on, port = ground(nodes), processes.store()

        def footing(rank: int, generation: Generation, resume: int) -> Footing:
            return Footing(generation, on, resume, nodes[rank // 2].path)

        lines = [
            processes.start(
                lambda line: interrupted_process(
                    rank,  # noqa: B023
                    line,
                    port,
                    footing(rank, G1, 0),  # noqa: B023
                    footing(rank, G2, Interrupted.AT),  # noqa: B023
                )
            )
            for rank in range(SIZE)
        ]
        pids = tuple(processes.pids[1:])
        for node in nodes:
            node.follow(G1, nodes, workers=pids)
        tell(lines)
        assert answers(lines) == ["entered"] * SIZE
        lineage = commit.Lineage().resumed(G2, Interrupted.AT).resumes
        for node in nodes:
            node.follow(G2, nodes, resume=Interrupted.AT, lineage=lineage, workers=pids)
        tell(lines)
        found = answers(lines)
        return {
            "calm": [calm for calm, _, _, _ in found],
            "resumed": [resumed for _, resumed, _, _ in found],
            "complete after": [complete for _, _, complete, _ in found],
            "left within": max(seconds for _, _, _, seconds in found),
        }
    finally:
        processes.end()


def main(kinds: list[str]) -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    for kind in kinds:
        begun, nodes = time.monotonic(), [CheckpointNode(index) for index in range(3)]
        try:
            found = interrupt(nodes[:2]) if kind == INTERRUPTED else run(kind, nodes)
        except (AssertionError, EOFError, OSError) as error:
            found = {"error": str(error) or repr(error)}
        finally:
            for node in nodes:
                node.end()
        found["words"] = [node.words for node in nodes if node.words]
        print(json.dumps({"kind": kind, "seconds": round(time.monotonic() - begun, 2), **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(small_models.KINDS))
