"""A training script that waits for its test: `gated_script.py KIND STEPS FOLDER GATE...`.

After GATE steps each rank writes FOLDER/at-GATE-RANK and goes on when FOLDER/open-GATE is there; meanwhile it shows that it
lives.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

import torch
import torch.distributed as dist
from small_models import Job

import phoenix_runtime as phoenix

_pause = threading.Event()


def main(kind: str, steps: int, folder: Path, gates: frozenset[int]) -> None:
    torch.set_num_threads(1)
    phoenix.init_process_group("gloo")
    rank = dist.get_rank()
    job = Job(kind, rank)
    while job.state.step < steps:
        if job.state.step in gates:
            (folder / f"at-{job.state.step}-{rank}").touch()
            while not (folder / f"open-{job.state.step}").exists():
                phoenix.report(step=job.state.step)
                _pause.wait(0.02)
        phoenix.run_step(job.state, job.step)
        phoenix.report(step=job.state.step)
    print(json.dumps({"rank": rank, "digest": job.digest(), "generation": phoenix.generation()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), frozenset(map(int, sys.argv[4:])))
