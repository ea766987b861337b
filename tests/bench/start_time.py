"""From the command to the end of the first all-reduce of 4 workers: phoenix-run against torchrun."""

from __future__ import annotations

import time

from measure import PHOENIX, TORCHRUN, WORKERS, alternate, finish, job, rounds_option


def start(launcher: str) -> float:
    began = time.time()
    with job([launcher, "--nproc-per-node", "4", str(WORKERS / "first_all_reduce.py")]) as (process, folder):
        finish(process)
        ends = [float(path.read_text()) for path in folder.glob("rank-*")]
    if len(ends) != 4:
        raise SystemExit(f"{len(ends)} of 4 workers came to the end of the all-reduce")
    return max(ends) - began


if __name__ == "__main__":
    rounds = rounds_option(__doc__, 5)
    alternate({"phoenix-run": lambda: start(PHOENIX), "torchrun": lambda: start(TORCHRUN)}, rounds)
