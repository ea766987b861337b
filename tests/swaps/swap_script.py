"""A training script as a user would write it, of any kind of parallelism: `phoenix-run ... swap_script.py KIND STEPS`.

Each rank prints its digest at the end as a JSON line, and what the garbage collector, which it does without, would have had to
find. `PHOENIX_FAULTS` (see phoenix_runtime/fault_points.py) says where its
processes die: at points of the runtime, and at these: "built" (the model is), "collective N" (the step's N-th, from 1),
"between" (before run_step), "after" (the loop).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

import torch
import torch.distributed as dist
from harms import Counted
from small_models import Job
from torch._C._distributed_c10d import Work
from torch.distributed import ProcessGroup

import phoenix_runtime as phoenix
from phoenix_runtime.fault_points import FAULT_POINTS

KEPT = (ProcessGroup, Work, BaseException)


def rings() -> list[str]:
    """What of ours only the garbage collector finds: old communicators among it would keep threads and sockets until then."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    kinds = [type(item) for item in gc.garbage]
    return sorted({kind.__name__ for kind in kinds if kind.__module__.startswith("phoenix") or issubclass(kind, KEPT)})


def main(kind: str, steps: int) -> None:
    torch.set_num_threads(1)
    gc.disable()
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
    print(json.dumps({**digest, "pid": os.getpid(), "rings": rings()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
