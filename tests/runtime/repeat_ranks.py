"""Four ranks that train, and abort in the middle of steps, at this or that collective; nobody dies, all repeat the step.

`python repeat_ranks.py KIND...`: prints a JSON line a kind: each rank's digest of a calm run, of one that was aborted at the
points listed with it, and what went wrong.
"""

from __future__ import annotations

import ctypes
import faulthandler
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
from small_models import SIZE, Job

from phoenix_runtime import TrainState, communicators, run_step
from phoenix_runtime.communicators.group import PhoenixGroup
from phoenix_runtime.loop import LOOP, NoRepair
from phoenix_runtime.state import Captured

DEADLINE: Final = 30.0
STEPS: Final = 12
EVERY: Final = 3  # steps from one fault to the next


BEHIND_THE_LAST: Final = 1 << 30  # a fault between the last collective of the backward and the optimizer


class Interrupted(Exception):
    pass


class Faults(NoRepair):
    """A fault at the n-th collective of a step, on one rank; all ranks hear of it, abort, and repair together."""

    def __init__(self, rank: int, store: dist.Store, notices: Connection) -> None:
        self.rank, self.store, self.notices = rank, store, notices
        self.at = -1  # -1: never; counts the collectives of a step
        self.here = False  # it is this rank's
        self.begun = 0
        self.before_optimizers = 0  # of them, those before the first optimizer
        self.run = self.step = self.repaired = self.heard = 0
        self.aborted = threading.Event()
        self._carry = PhoenixGroup._carry

    def arm(self) -> None:
        faults = self

        def carry(group: PhoenixGroup, operation: str, outputs: Any, *arguments: Any) -> Any:
            if communicators.gate().keeps:
                if faults.begun == faults.at and faults.here:
                    faults.happen()
                faults.begun += 1
            return faults._carry(group, operation, outputs, *arguments)

        PhoenixGroup._carry = carry  # type: ignore[method-assign]
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        """The thread that brings notices, as it comes from the agent in a real job."""
        while True:
            self.heard = self.notices.recv()
            communicators.BACKEND.abort(Interrupted("a rank died, they say"), 10.0)
            self.aborted.set()

    def happen(self) -> None:
        self.notices.send("a rank died")
        assert self.aborted.wait(DEADLINE)

    def meet(self, where: str) -> None:
        """Wait for all ranks, or for a fault: then not all may come here in this step.

        Not by a collective: who breaks its communicators breaks what the others have not received yet.

        In a real job survivors may so come to stand a step apart, which needs more than a repetition.
        """
        name, gate = f"run {self.run} step {self.step} {where}", communicators.gate()
        if self.store.add(f"{name}/here", 1) == SIZE:
            self.store.set(name, "")
        until = time.monotonic() + DEADLINE
        while not self.store.check([name]) and not gate.closed:
            assert time.monotonic() < until
            self.aborted.wait(0.005)

    # --- as the loop's repair ---

    repairs = True

    def entered(self, state: TrainState, function: Callable[[], object], captured: Captured, *, again: bool) -> None:
        self.begun = 0
        self.at = -1 if again else self.at

    def before_optimizer(self, state: TrainState) -> None:
        """A later fault (in ZeRO's broadcasts) would leave a state that is of no version: that needs more than a repetition."""
        self.before_optimizers = self.begun
        if self.at < 0:
            return
        self.meet("before the optimizer")  # nobody steps before the fault has come
        if self.at == BEHIND_THE_LAST and not communicators.gate().closed:
            if self.here:
                self.happen()
            assert self.aborted.wait(DEADLINE)
        LOOP.check()

    def repair(self, state: TrainState, reason: BaseException, *, dirty: bool) -> None:
        assert not dirty, reason
        assert self.aborted.wait(DEADLINE)  # whoever came here by an error has still to hear of it
        self.aborted.clear()
        self.repaired += 1
        communicators.BACKEND.rebuild(f"repair{self.repaired}")


def train(kind: str, rank: int, faults: Faults, plan: list[int]) -> tuple[str, list[int]]:
    """The digest at the end, and how many collectives the steps had before their optimizer."""
    job = Job(kind, rank)
    counts = []
    faults.run += 1
    for step in range(STEPS):
        faults.step = step
        fault = plan[step // EVERY] if step % EVERY == 1 and step // EVERY < len(plan) else -1
        faults.at, faults.here = fault, rank == (step // EVERY + 1) % SIZE
        faults.meet("at the entry")
        run_step(job.state, job.step)
        counts.append(faults.before_optimizers)
    assert job.state.step == STEPS
    return job.digest(), counts


def perform(rank: int, port: int, line: Connection, notices: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE))
    communicators.register("gloo")
    faults = Faults(rank, store, notices)
    faults.arm()
    LOOP.repair = faults
    dist.init_process_group("phoenix", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=DEADLINE))
    while True:
        kind = line.recv()
        faulthandler.dump_traceback_later(DEADLINE - 5)  # where it stands when it hangs
        try:
            calm, counts = train(kind, rank, faults, [])
            smallest = torch.tensor(counts[1])
            dist.all_reduce(smallest, dist.ReduceOp.MIN)
            count = int(smallest)
            plan = [0, count // 2, count - 1, BEHIND_THE_LAST]
            before = faults.repaired
            aborted, _ = train(kind, rank, faults, plan)
            line.send({"calm": calm, "aborted": aborted, "repairs": faults.repaired - before, "plan": plan})
        except BaseException:
            line.send({"error": traceback.format_exc()[-3000:]})


def main(kinds: list[str]) -> None:
    torch.set_num_threads(1)
    pids: list[int] = []

    def fork(run: Callable[[], Any]) -> None:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            try:
                run()
            finally:
                os._exit(1)
        pids.append(pid)

    def host_store() -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        theirs.send(store.port)
        signal.pause()

    ours, theirs = Pipe()
    fork(host_store)
    port, lines, notices = ours.recv(), [], []
    for rank in range(SIZE):
        line, their_end = Pipe()
        notice, hearing = Pipe()
        fork(lambda: perform(rank, port, their_end, hearing))  # noqa: B023
        lines.append(line)
        notices.append(notice)
    faults = 0
    try:
        for kind in kinds:
            for line in lines:
                line.send(kind)
            answers: dict[Connection, dict[str, Any]] = {}
            while len(answers) < SIZE:
                ready = wait([*notices, *(line for line in lines if line not in answers)], DEADLINE)
                for connection in ready:
                    assert isinstance(connection, Connection)
                    if connection in lines:
                        answers[connection] = connection.recv()
                        continue
                    connection.recv()  # the supervisor's part: everybody hears of it
                    faults += 1
                    for notice in notices:
                        notice.send(faults)
                if not ready:
                    break
            found = [answers.get(line, {"error": "hung"}) for line in lines]
            print(json.dumps({"kind": kind, "ranks": found}), flush=True)
            if any("error" in answer for answer in found):
                sys.exit(1)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1:] or list(small_models.KINDS))
