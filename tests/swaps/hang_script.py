"""A script whose ranks hang: `hang_script.py Hanging STEPS`. Each way to hang is a fault point of its own, see HANGS.

Before step 3 there is a section that takes longer than any step may: it says so, and nothing hangs.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist
from bad_script import Script
from torch import Tensor

import phoenix_runtime as phoenix
from phoenix_runtime.fault_points import FAULT_POINTS

LONG: Final = 7.0  # seconds; more than the --hang-timeout of the test
_NEVER: Final = threading.Event()

HANGS: Final[dict[str, Callable[[], object]]] = {
    "hang in step": _NEVER.wait,
    "hang with the lock": lambda: re.match("(a+)+$", "a" * 60 + "b"),  # in C code, with python's lock
    "hang stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang in a collective": lambda: dist.all_reduce(torch.zeros(1), group=OWN[0]),  # that nobody else comes to
}
OWN: Final[list[dist.ProcessGroup]] = []


class Hanging(Script):
    def start(self) -> None:
        super().start()
        OWN.append(dist.new_group())

    def between(self) -> None:
        """What feeds the steps; the other ranks are in the next one by then."""
        if self.state.step == 2:
            phoenix.run_section(self.state, lambda: _NEVER.wait(LONG), "evaluation", timeout=60)
        if FAULT_POINTS.happens("hang between"):
            _NEVER.wait()

    def step(self) -> Tensor:
        for point, hang in HANGS.items():
            if FAULT_POINTS.happens(point):
                hang()
        return super().step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert sys.argv[1] == Hanging.__name__
    Hanging(int(sys.argv[2])).run()
