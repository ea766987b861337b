"""A training script as a user would write it, of any kind of parallelism: `phoenix-run ... swap_script.py KIND STEPS`.

Each rank prints its digest at the end as a JSON line. `PHOENIX_FAULTS` (see phoenix_runtime/fault_points.py) says where its
processes die: at points of the runtime, and at these: "built" (the model is), "collective N" (the step's N-th, from 1),
"between" (before run_step), "after" (the loop).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

import torch
import torch.distributed as dist
from small_models import Job

import phoenix_runtime as phoenix
from phoenix_runtime.communicators.group import PhoenixGroup
from phoenix_runtime.fault_points import FAULT_POINTS


class Counted:
    """Collectives of a step are fault points."""

    def __init__(self) -> None:
        self.made = 0
        original = PhoenixGroup._carry

        def carry(group: PhoenixGroup, operation: str, outputs: Any, *arguments: Any) -> Any:
            if group.scripts:
                self.made += 1
                FAULT_POINTS.reached(f"collective {self.made}")
            return original(group, operation, outputs, *arguments)

        PhoenixGroup._carry = carry  # type: ignore[method-assign]


def main(kind: str, steps: int) -> None:
    torch.set_num_threads(1)
    phoenix.init_process_group("gloo")
    rank = dist.get_rank()
    job = Job(kind, rank)
    FAULT_POINTS.reached("built")
    counted = Counted()
    while job.state.step < steps:
        FAULT_POINTS.reached("between")
        counted.made = 0
        phoenix.run_step(job.state, job.step)
        phoenix.report(step=job.state.step)
    FAULT_POINTS.reached("after")
    digest = {"rank": rank, "digest": job.digest(), "step": job.state.step, "generation": phoenix.generation()}
    print(json.dumps({**digest, "pid": os.getpid()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
