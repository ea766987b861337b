"""How many bytes a step sends to other nodes for its copies in memory, by kind of parallelism.

2 nodes of 2 ranks. Counted by the workers for each copy that another node's server has confirmed as sealed: headers and tables
in a slot are in it, frames of the protocol are not. Two runs of different length: what the first steps alone send drops out.
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


def totals(kind: str, steps: int) -> tuple[int, int]:
    """Bytes of all ranks' state, and bytes that all have sent by the end."""
    with job([PHOENIX, "--nodes", "2", "--nproc-per-node", "2", str(SCRIPT), kind, str(steps)], to_file=True) as (
        process,
        folder,
    ):
        if process.wait() != 0:
            raise SystemExit((folder / "output").read_text())
        (path,) = folder.glob("home/jobs/*/status.json")
        copies = [rank["copies"] for rank in json.loads(path.read_text())["ranks"]]
    return sum(each["state_bytes"] for each in copies), sum(each["sent_bytes"] for each in copies)


def main() -> None:
    for kind in sys.argv[1:] or KINDS:
        (_, fewer), (state, more) = (totals(kind, steps) for steps in STEPS)
        sent = (more - fewer) / (STEPS[1] - STEPS[0]) / WORLD
        print(f"{kind:6} a rank has {state / WORLD:9,.0f} bytes, sends {sent:9,.0f} in a step", flush=True)


if __name__ == "__main__":
    main()
