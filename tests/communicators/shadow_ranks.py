"""Four ranks start, train and lose one; a fifth process, which was started alone from the lost one's record, takes its place.

`python shadow_ranks.py KIND...` (kinds of runtime/small_models.py, also with " early", or "the start": see startup_ranks.py):
prints a JSON line a kind: each rank's digest of a calm run and of one with the replacement, and what is in the record.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Final

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import small_models
import startup_ranks
import torch
import torch._dynamo
import torch.distributed as dist
from small_models import SIZE, Job

from phoenix_runtime import TrainState, communicators, run_step
from phoenix_runtime.buckets import fix_bucket_order
from phoenix_runtime.communicators import BACKEND, StepAborted
from phoenix_runtime.communicators.recording import Recorder
from phoenix_runtime.communicators.shadow import Shadow
from phoenix_runtime.loop import LOOP, NoRepair
from phoenix_runtime.startup import StartupRecord
from phoenix_runtime.state import Captured

DEADLINE: Final = 30.0
STEPS: Final = 6
BEFORE: Final = 3  # steps before the loss
EARLY: Final = (
    " early"  # of a kind: lost after its first step, when its record does not know yet what a second one is like
)
LOST: Final = {"tp": 3, "gpipe": 1, "1f1b": 2}  # of other kinds one rank after the other


class Promoted(Exception):
    """Why a step that a replacement ran alone is aborted."""


@dataclass
class Package:
    """What a replacement needs of its predecessor: the startup record and the state of its last completed step."""

    record: bytes
    private: bytes
    parameters: list[torch.Tensor]
    optimizer: list[dict[str, Any]]

    @classmethod
    def of(cls, job: Job, recorder: Recorder) -> Package:
        optimizer = stepping(job)
        return cls(
            record=recorder.record.to_bytes(),
            private=pickle.dumps(job.state.capture()),
            parameters=[local(parameter).clone() for _, parameter in job.state.parameters()],
            optimizer=[
                {key: local(value).clone() if torch.is_tensor(value) else value for key, value in each.items()}
                for each in (optimizer.state[parameter] for parameter in parameters_of(optimizer))
            ],
        )

    def put_into(self, job: Job) -> None:
        optimizer = stepping(job)
        with torch.no_grad():
            for (_, parameter), saved in zip(job.state.parameters(), self.parameters, strict=True):
                local(parameter).copy_(saved)
            for parameter, values in zip(parameters_of(optimizer), self.optimizer, strict=True):
                for key, value in values.items():
                    if hasattr(parameter, "to_local") and torch.is_tensor(value) and value.dim() > 0:
                        sharded = torch.zeros_like(parameter)
                        local(sharded).copy_(value)
                        value = sharded
                    optimizer.state[parameter][key] = value
        job.state.restore(pickle.loads(self.private))


def local(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def stepping(job: Job) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = job.optimizer.optim if job.kind == "zero" else job.optimizer
    return found


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Process(NoRepair):
    """What ranks and replacements have in common. As the loop's repair it does nothing until it is told."""

    repairs = True

    def __init__(self, kind: str, rank: int, line: Connection) -> None:
        self.kind, self.rank, self.line = kind.removesuffix(EARLY), rank, line
        communicators.register("gloo")
        LOOP.repair = self
        faulthandler.dump_traceback_later(DEADLINE - 5, exit=True)

    def rebuild(self) -> None:
        """A second thread waits for the table, as the one that speaks with the agent would."""
        construction = BACKEND.construct(lambda addresses: self.line.send(("addresses", dict(addresses))))
        threading.Thread(target=lambda: construction.deliver(self.line.recv()), daemon=True).start()
        BACKEND.adopt(construction, DEADLINE)

    def train(self, job: Job, steps: int) -> None:
        while job.state.step < steps:
            run_step(job.state, job.step)

    def entered(self, state: TrainState, function: Callable[[], object], captured: Captured, *, again: bool) -> None:
        return None

    def before_optimizer(self, state: TrainState) -> None:
        return None

    def repair(self, state: TrainState, reason: BaseException, *, dirty: bool) -> None:
        raise reason


class Rank(Process):
    """One of the four. `lost`: which one goes; -1: none."""

    def __init__(self, kind: str, rank: int, line: Connection, port: int, lost: int) -> None:
        super().__init__(kind, rank, line)
        self.lost, self.before = lost, 1 if kind.endswith(EARLY) else BEFORE
        self.recorder = BACKEND.record_startup() if lost >= 0 else None
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE))
        dist.init_process_group("phoenix", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=DEADLINE))

    def entered(self, state: TrainState, function: Callable[[], object], captured: Captured, *, again: bool) -> None:
        if self.recorder is not None:
            self.recorder.enter_step(state.step)

    def play(self) -> None:
        job = Job(self.kind, self.rank)
        if self.recorder is not None:
            self.train(job, self.before)
            package = Package.of(job, self.recorder) if self.rank == self.lost else None
            self.line.send(
                ("package", pickle.dumps(package))
            )  # as bytes: tensors would be shared, with a process that dies
            self.line.recv()
            self.rebuild()
        self.train(job, STEPS)
        self.line.send(("digest", job.digest()))


class Replacement(Process):
    def __init__(self, kind: str, rank: int, line: Connection) -> None:
        super().__init__(kind, rank, line)
        self.package: Package = pickle.loads(line.recv())
        self.record = StartupRecord.from_bytes(self.package.record)
        self.shadow: Shadow | None = BACKEND.shadow(self.record)
        store = dist.HashStore()  # nobody is there to be met
        dist.init_process_group("phoenix", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=DEADLINE))

    def play(self) -> None:
        job = Job(self.kind, self.rank)
        fix_bucket_order(job.state.modules())
        self.package.put_into(job)
        if not self.record.first_step_differs:
            assert self.shadow is not None
            self.shadow.enter_step()
            self.come_out()
        self.train(job, STEPS)
        self.line.send(("digest", job.digest()))

    def come_out(self) -> None:
        self.shadow = None
        self.line.send(("built", None))
        self.line.recv()
        self.rebuild()

    def entered(self, state: TrainState, function: Callable[[], object], captured: Captured, *, again: bool) -> None:
        if self.shadow is not None:
            self.shadow.enter_step()

    def before_optimizer(self, state: TrainState) -> None:
        if self.shadow is not None:
            communicators.gate().close(Promoted())
            raise StepAborted("the step was run alone")

    def repair(self, state: TrainState, reason: BaseException, *, dirty: bool) -> None:
        assert isinstance(reason, Promoted) and not dirty
        self.come_out()


class Processes:
    """The processes of one run, and the supervisor's part."""

    def __init__(self, kind: str, lost: int) -> None:
        self.kind, self.lost = kind, lost
        self.pids: list[int] = []
        self.lines: list[Connection] = []
        ours, theirs = Pipe()
        self._fork(lambda: host_store(theirs))
        port = ours.recv()
        for rank in range(SIZE):
            self.lines.append(self._fork_with_line(lambda line: Rank(kind, rank, line, port, lost).play()))  # noqa: B023

    def _fork(self, run: Callable[[], Any]) -> None:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            try:
                run()
                signal.pause()  # until all are done: who leaves early takes from others what they have not read yet
            finally:
                os._exit(1)
        self.pids.append(pid)

    def _fork_with_line(self, play: Callable[[Connection], None]) -> Connection:
        line, theirs = Pipe()

        def run() -> None:
            try:
                play(theirs)
            except BaseException:
                theirs.send(("error", traceback.format_exc()[-3000:]))

        self._fork(run)
        theirs.close()
        return line

    def end(self) -> None:
        for line in self.lines:
            line.close()
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def await_all(self, what: str, lines: list[Connection]) -> list[Any]:
        found: dict[Connection, Any] = {}
        until = time.monotonic() + DEADLINE
        while len(found) < len(lines):
            ready = wait([line for line in lines if line not in found], until - time.monotonic())
            assert ready, f"{self.kind}: no {what} of {[n for n, line in enumerate(lines) if line not in found]}"
            for line in ready:
                assert isinstance(line, Connection)
                kind, value = line.recv()
                assert kind == what, value
                found[line] = value
        return [found[line] for line in lines]

    def digests(self) -> list[str]:
        return self.await_all("digest", self.lines)

    def replace(self) -> Package:
        package: bytes = self.await_all("package", self.lines)[self.lost]
        os.kill(self.pids[1 + self.lost], signal.SIGKILL)
        self.lines[self.lost].close()
        line = self._fork_with_line(lambda line: Replacement(self.kind, self.lost, line).play())
        self.lines[self.lost] = line
        line.send(package)
        self.await_all("built", [line])
        self.tell("rebuild")
        table: dict[str, bytes] = {}
        for addresses in self.await_all("addresses", self.lines):
            table.update(addresses)
        self.tell(table)
        found: Package = pickle.loads(package)
        return found

    def tell(self, message: str | Mapping[str, bytes]) -> None:
        for line in self.lines:
            line.send(message)


def host_store(answer_to: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answer_to.send(store.port)
    signal.pause()


def run(kind: str, lost: int) -> dict[str, Any]:
    calm, swapped = Processes(kind, -1), None
    try:
        expected = calm.digests()
        swapped = Processes(kind, lost)
        package = swapped.replace()
        record = StartupRecord.from_bytes(package.record)
        return {
            "calm": expected,
            "replaced": swapped.digests(),
            "lost": lost,
            "calls": sum(len(calls) for calls in record.calls.values()),
            "first step differs": record.first_step_differs,
            "unreplayable": record.unreplayable,
            "bytes": len(package.record),
        }
    finally:
        calm.end()
        if swapped is not None:
            swapped.end()


def main(kinds: list[str]) -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the ranks' own collections need not look at all of torch
    for kind in kinds:
        if kind == "the start":
            for line in startup_ranks.run():
                print(json.dumps({"kind": kind, **line}), flush=True)
            continue
        begun = time.monotonic()
        try:
            found = run(kind, LOST.get(kind, small_models.KINDS.index(kind.removesuffix(EARLY)) % SIZE))
        except (AssertionError, EOFError, OSError) as error:
            found = {"error": repr(error)}
        print(json.dumps({"kind": kind, "seconds": time.monotonic() - begun, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["the start", *small_models.KINDS])
