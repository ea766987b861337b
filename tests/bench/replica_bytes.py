"""How many bytes a step sends to other nodes for its copies in memory, by kind of parallelism.

2 nodes of 2 ranks. Counted by the checkpoint servers as they send, and, beside it, by the workers for each copy that another
node's server has confirmed as sealed (with a slot's own header). Frames of the protocol are not in it. Two runs of different
length: what the first steps alone send drops out.
DDP and HSDP send each rank's private bundle alone (counters, generators, positions in the data, what its start has received).
Models are those of tests/runtime/small_models.py: what matters is which tensors are sent at all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from measure import PHOENIX, job

KINDS: Final = ("ddp", "hsdp", "zero", "fsdp", "tp")
SCRIPT: Final = Path(__file__).parents[1] / "swaps" / "swap_script.py"
STEPS: Final = (20, 60)
WORLD: Final = 4


def totals(kind: str, steps: int) -> tuple[int, int, int]:
    """Bytes of all ranks' state, and bytes that have been sent by the end: as servers count, as workers do."""
    with job([PHOENIX, "--nodes", "2", "--nproc-per-node", "2", str(SCRIPT), kind, str(steps)], to_file=True) as (
        process,
        folder,
    ):
        if process.wait() != 0:
            raise SystemExit((folder / "output").read_text())
        (path,) = folder.glob("home/jobs/*/status.json")
        status = json.loads(path.read_text())
    copies = [rank["copies"] for rank in status["ranks"]]
    by_servers = sum(node["sent_bytes"] for node in status["nodes"])
    return sum(each["state_bytes"] for each in copies), by_servers, sum(each["sent_bytes"] for each in copies)


def main() -> None:
    for kind in sys.argv[1:] or KINDS:
        few, many = (totals(kind, steps) for steps in STEPS)
        servers, workers = ((many[by] - few[by]) / (STEPS[1] - STEPS[0]) / WORLD for by in (1, 2))
        print(
            f"{kind:6} a rank has {many[0] / WORLD:9,.0f} bytes, sends {servers:9,.0f} in a step (workers: {workers:9,.0f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
