"""Scripts that break a rule, or do what users do: `bad_script.py CASE STEPS`. Each case is a function here.

Fault points as in faulty_script.py, whose training this is.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from faulty_script import Training
from torch import Tensor

import phoenix_runtime as phoenix
from phoenix_runtime.fault_points import FAULT_POINTS

WRONG_FROM = 3  # steps are well until so many are done
LONG = 20.0  # seconds; no step takes so long


class Script:
    """A loop with places in it for what is wrong."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.start()
        self.rank = dist.get_rank()
        self.training = Training(self.rank)
        self.state = self.training.state

    def start(self) -> None:
        phoenix.init_process_group("gloo")

    @property
    def wrong(self) -> bool:
        return self.state.step >= WRONG_FROM

    def step(self) -> Tensor:
        return self.training.step()

    def between(self) -> None:
        """Before each step."""

    def after(self) -> None:
        """The loop."""

    def run(self) -> None:
        while self.state.step < self.steps:
            FAULT_POINTS.reached("between")
            self.between()
            phoenix.run_step(self.state, self.step)
        self.after()
        digest = {"rank": self.rank, "digest": self.training.digest(), "generation": phoenix.generation()}
        print(json.dumps({**digest, "pid": os.getpid()}), flush=True)


class LateGroup(Script):
    """Makes a group when training is under way."""

    def between(self) -> None:
        if self.state.step == WRONG_FROM:
            dist.new_group()


class Refused(Script):
    """Does one thing after the other that is refused, and goes on; each word that it hears is printed."""

    def start(self) -> None:
        self.tried(lambda: phoenix.init_process_group("mpi"))
        super().start()
        self.tried(super().start)

    def tried(self, wrong: Callable[[], object]) -> None:
        try:
            wrong()
        except Exception as error:
            print(str(error).partition("\n")[0], flush=True)

    def step(self) -> Tensor:
        if self.state.step == WRONG_FROM:
            self.tried(lambda: phoenix.run_step(self.state, self.training.step))
        return super().step()

    def between(self) -> None:
        if self.state.step == WRONG_FROM + 1:
            self.tried(lambda: phoenix.run_step(self.state, self.leave_gradients))
            self.training.model.zero_grad()

    def leave_gradients(self) -> None:
        self.training.model(torch.ones(1, 16)).mean().backward()

    def after(self) -> None:
        dist.destroy_process_group()
        self.tried(super().start)


class ForeignGroup(Script):
    """Makes a group that is none of ours, and uses it in each step."""

    def start(self) -> None:
        super().start()
        self.group = dist.new_group(backend="gloo")

    def step(self) -> Tensor:
        loss = super().step()
        dist.all_reduce(loss, group=self.group)
        return loss


class TorchsOwnStart(Script):
    """Forgets whose init_process_group it has to call."""

    def start(self) -> None:
        dist.init_process_group("gloo")


class Outside(Script):
    """Communicates between two steps."""

    def between(self) -> None:
        counts = torch.ones(1)
        dist.all_reduce(counts)
        FAULT_POINTS.reached("outside")
        dist.all_reduce(counts)
        assert counts.item() == dist.get_world_size() ** 2


class OwnError(Script):
    """One rank has a bug."""

    def step(self) -> Tensor:
        if self.wrong and self.rank == 1:
            raise ZeroDivisionError("my own bug")
        return super().step()


class ErrorOnAll(Script):
    def step(self) -> Tensor:
        if self.wrong:
            raise ZeroDivisionError("everybody's bug")
        return super().step()


class Rough(Script):
    """Does not trust what it has received (in an aborted step rightly so), catches each Exception, and stops all threads."""

    seconds = 2.0

    def step(self) -> Tensor:
        try:
            return self.distrust()
        except Exception:
            return torch.zeros(())

    def distrust(self) -> Tensor:
        ones = torch.ones(4)
        dist.all_reduce(ones)
        FAULT_POINTS.reached("summed")
        dist.all_reduce(ones)
        if ones[0].item() != 16:
            raise ValueError(f"the sum is {ones[0]}")
        loss = super().step()
        if FAULT_POINTS.happens("holds"):
            ctypes.PyDLL(None).usleep(
                int(self.seconds * 1e6)
            )  # unlike CDLL it does not let go of the interpreter's lock
        return loss


class RoughAndLong(Rough):
    """It holds the interpreter's lock for longer than a process may need to be out of its collectives."""

    seconds = 8.0


class CatchesEverything(Script):
    def step(self) -> Tensor:
        try:
            return super().step()
        except:  # noqa: E722  # the case
            return torch.zeros(())


class HardExit(Script):
    """One rank leaves without a word, as if all were well."""

    def between(self) -> None:
        if self.wrong and self.rank == 1:
            os._exit(0)


class HardExitAtTheEnd(Script):
    """What some scripts do, so that nothing may hang at their end."""

    def run(self) -> None:
        super().run()
        os._exit(0)


class EarlyExit(Script):
    """One rank thinks that it is done."""

    def between(self) -> None:
        if self.wrong and self.rank == 1:
            sys.exit(0)


class LateEvaluation(Script):
    """One rank works on after the last step, for longer than a rank may be left behind in a step."""

    def after(self) -> None:
        if self.rank == 0:
            ctypes.CDLL(None).usleep(12_000_000)


class SlowToLeave(Script):
    """Rank 0 leaves the step that another one's death interrupts when that one's replacement builds its model."""

    def start(self) -> None:
        super().start()
        self.started = Path(os.environ["PHOENIX_HOME"]) / "started"
        if phoenix.generation() > 1:
            self.started.touch()

    def step(self) -> Tensor:
        try:
            return super().step()
        finally:
            if self.rank == 0 and self.state.step == WRONG_FROM:
                deadline = time.monotonic() + LONG
                while not self.started.exists() and time.monotonic() < deadline:
                    threading.Event().wait(0.01)


CASES: dict[str, Callable[[int], Script]] = {
    case.__name__: case
    for case in [
        Script, LateGroup, Refused, ForeignGroup, TorchsOwnStart, Outside, OwnError, ErrorOnAll, Rough, RoughAndLong,
        CatchesEverything, HardExit, HardExitAtTheEnd, EarlyExit, LateEvaluation,
        SlowToLeave,
    ]
}  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    CASES[sys.argv[1]](int(sys.argv[2])).run()
