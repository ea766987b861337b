"""As tests/swaps/swap_script.py, with harms that take more than one process; says at which step it began.

Fault points beside those of harms.py: "stop" (SIGTERM to the supervisor), "orphan" (SIGKILL to it). Whoever does that
goes no step further. "term", "gone": SIGTERM or SIGKILL to it, and training goes on.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
sys.path.insert(0, str(Path(__file__).parents[1] / "swaps"))

import psutil
import torch
import torch.distributed as dist
from harms import do_harm
from small_models import Job

import phoenix_runtime as phoenix
from phoenix_runtime.fault_points import FAULT_POINTS


def harm_supervisor() -> None:
    stop, kill = signal.SIGTERM, signal.SIGKILL
    for point, number in (("stop", stop), ("orphan", kill), ("term", stop), ("gone", kill)):
        if FAULT_POINTS.happens(point):
            _, guardian, supervisor = psutil.Process().parents()[:3]
            assert "guardian" in " ".join(guardian.cmdline()) and "phoenix_launch" in " ".join(supervisor.cmdline())
            supervisor.send_signal(number)
            if point in ("stop", "orphan"):
                threading.Event().wait()


def main(kind: str, steps: int) -> None:
    torch.set_num_threads(1)
    phoenix.init_process_group("gloo")
    rank = dist.get_rank()
    job = Job(kind, rank)
    begin = job.state.step
    while job.state.step < steps:
        do_harm()
        harm_supervisor()
        phoenix.run_step(job.state, job.step)
        print(json.dumps({"rank": rank, "done": job.state.step}), flush=True)
        phoenix.report(step=job.state.step)
    print(json.dumps({"rank": rank, "digest": job.digest(), "begin": begin}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
