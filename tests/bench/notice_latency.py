"""From a worker's SIGKILL to the moment when the workers of every other node have been told to end.

This is a little more than the notice itself: the other agents' SIGTERM has arrived in their workers.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from pathlib import Path

from measure import PHOENIX, WORKERS, job, rounds_option, summary, until

NODES = 4


def notice(folder: Path, attempt: int) -> float:
    """Milliseconds until the last of the other nodes' workers was told."""
    until(lambda: len(list(folder.glob(f"began-{attempt}-*"))) == NODES, f"the workers of attempt {attempt}")
    victim = attempt % NODES
    pid = int((folder / f"began-{attempt}-{victim}").read_text())
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    until(lambda: len(list(folder.glob(f"told-{attempt}-*"))) == NODES - 1, "every other worker being told")
    return 1000 * (max(float(path.read_text()) for path in folder.glob(f"told-{attempt}-*")) - killed)


if __name__ == "__main__":
    rounds = rounds_option(__doc__, 20)
    command = [PHOENIX, "--nodes", str(NODES), "--max-restarts", str(rounds + 1), str(WORKERS / "patient.py")]
    with job([*command]) as (_, folder):
        samples = [notice(folder, attempt) for attempt in range(rounds)]
    print(f"{'notice':24} {summary(samples, 'ms')}")
    print(f"{'95th percentile':24} {statistics.quantiles(samples, n=20, method='inclusive')[-1]:.1f} ms")
