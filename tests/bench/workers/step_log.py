"""What the scripts of the measurements share: the example's model, and a log of moments, one file a process.

A line is `EVENT STEP SECONDS`, by CLOCK_MONOTONIC, which all processes of a machine share. A line is written at once and
whole, so that a reader may follow it, and so that a process may be killed at any moment.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

BEGAN = time.monotonic()
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))


class StepLog:
    """`rank-PID.log` in the folder of the measurement, begun as soon as the script runs."""

    def __init__(self, rank: int) -> None:
        path = Path(os.environ["BENCH_FOLDER"]) / f"{rank}-{os.getpid()}.log"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, event: str, step: int, moment: float = 0.0) -> None:
        os.write(self._descriptor, f"{event} {step} {moment or time.monotonic():.6f}\n".encode())


def parse_options() -> argparse.Namespace:
    """The settings of a measured job; the model is the example's, by default one of 4.8 M parameters."""
    parser = argparse.ArgumentParser()
    for name, default in {"layers": 6, "width": 256, "heads": 4, "batch": 4, "sequence": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()
