"""What the scripts of the measurements share: the example's model, and a log of moments, one file a process.

A line is `EVENT STEP SECONDS`, by CLOCK_MONOTONIC, which all processes of a machine share. A line is written at once and
whole, so that a reader may follow it, and so that a process may be killed at any moment. Imported first, so that the first
line tells when the script began.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))


class StepLog:
    """`RANK-PID.log` in the folder of the measurement."""

    def __init__(self, rank: str) -> None:
        path = Path(os.environ["BENCH_FOLDER"]) / f"{rank}-{os.getpid()}.log"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, event: str, step: int = -1) -> None:
        os.write(self._descriptor, f"{event} {step} {time.monotonic():.6f}\n".encode())


LOG: Final = StepLog(os.environ.get("REPLICA_GROUP_ID") or os.environ["RANK"])
LOG.note("began")


def parse_options() -> argparse.Namespace:
    """The settings of a measured job; the model is the example's, by default one of 4.8 M parameters."""
    parser = argparse.ArgumentParser()
    for name, default in {"layers": 6, "width": 256, "heads": 4, "batch": 4, "sequence": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--odd", action="store_true", help="register the blocks in the reverse of their order")
    return parser.parse_args()
