"""How long `--help` and `status` take, and that neither loads torch; with torchrun's `--help` beside it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from measure import PHOENIX, RUN_SECONDS, TORCHRUN, WORKERS, job, rounds_option, summary, until


def timed(command: Sequence[str], environment: dict[str, str] | None = None) -> float:
    began = time.monotonic()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=RUN_SECONDS)
    return time.monotonic() - began


def loads_torch(arguments: Sequence[str], environment: dict[str, str] | None = None) -> bool:
    command = [sys.executable, "-X", "importtime", PHOENIX, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=RUN_SECONDS)
    return any(line.split("|")[-1].strip() == "torch" for line in done.stderr.splitlines())


if __name__ == "__main__":
    import os

    rounds = rounds_option(__doc__, 10)
    with job([PHOENIX, str(WORKERS / "patient.py")]) as (_, folder):
        until(lambda: list(folder.glob("began-*")), "a job to ask about")
        there = {**os.environ, "PHOENIX_HOME": str(folder / "home")}
        for arguments in (["--help"], ["status"], ["status", "--json"]):
            samples = [timed([PHOENIX, *arguments], there) for _ in range(rounds)]
            torch = "loads torch" if loads_torch(arguments, there) else "no torch"
            print(f"phoenix-run {' '.join(arguments):16} {summary(samples)}  {torch}")
    print(f"torchrun {'--help':19} {summary([timed([TORCHRUN, '--help']) for _ in range(max(1, rounds // 3))])}")
