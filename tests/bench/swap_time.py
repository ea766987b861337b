"""From SIGKILL of one of four ranks until all four are past the interrupted step: in place, torchrun, torchft, in turns.

4 ranks on 2 simulated nodes, each with a process kept ready, a model of 4.8 M parameters; kills fall anywhere in a step. torchrun has
a checkpoint of every step. torchft (`--torchft PYTHON`, of an environment in which it is installed) runs with its defaults and with
a fifth replica that trains along. Then the swaps' phases; what is left when the rest of the doomed step, the script's own start and the
repeated step are taken off; a whole node against a spare node; and kills within the copying.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from measure import PHOENIX, TORCHRUN, WORKERS, job, summary, until
from step_times import Kill, Logs, after_kill, kill_one

from phoenix_launch.records.journal import Fault, SpareParked, Swap, read_events

WORLD: Final = 4
ON_NODES: Final = ("--nodes", "2", "--nproc-per-node", "2")
UNPATCHED: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # without it restarted gloo workers find the old store
Killed = list[tuple[Kill, Logs]]


def journal(folder: Path) -> Path:
    (path,) = folder.glob("home/jobs/*/events.jsonl")
    return path


def swaps(folder: Path) -> list[Swap]:
    return [event for event in read_events(journal(folder)) if isinstance(event, Swap)]


# --- the cases ------------------------------------------------------------------------------------------------------------


def in_place(kills: int, chance: random.Random, told: list[Swap]) -> Killed:
    command = [PHOENIX, *ON_NODES, "--local-spares", "1", str(WORKERS / "train_phoenix.py")]
    with job(command) as (_, folder):
        logs = Logs(folder)
        found = [(kill_one(logs, 1 + number % 3, WORLD, chance), logs) for number in range(kills)]
        until(lambda: len(swaps(folder)) == kills, "the swaps in the journal")
        told += swaps(folder)
    return found


def torchrun(kills: int, chance: random.Random) -> Killed:
    command = [TORCHRUN, "--standalone", "--nproc-per-node", "4", "--max-restarts", str(kills), str(WORKERS / "train_disk.py")]
    with job(command, BENCH_CHECKPOINTS="1", **UNPATCHED) as (_, folder):
        logs = Logs(folder)
        return [(kill_one(logs, 1 + number % 3, WORLD, chance), logs) for number in range(kills)]


def torchft(python: str, extra: bool, kills: int, chance: random.Random) -> Killed:
    """A lighthouse, and a torchrun for each replica, which starts it again."""
    ports = [free_port() for _ in range(6)]
    replicas = WORLD + extra
    bin_folder = Path(python).parent
    lighthouse = [str(bin_folder / "torchft_lighthouse"), "--bind", f"127.0.0.1:{ports[0]}", "--min_replicas", str(WORLD if extra else 1)]
    if extra:
        lighthouse += ["--heartbeat_timeout_ms", "1000"]
    environment = {**UNPATCHED, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{ports[0]}", "NUM_REPLICA_GROUPS": str(replicas)}
    with contextlib.ExitStack() as running:
        _, folder = running.enter_context(job(lighthouse))
        for number in range(replicas):
            command = [python, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", "99",
                       "--master-port", str(ports[1 + number]), str(WORKERS / "train_torchft.py")]  # fmt: skip
            more = {"BENCH_EXTRA_REPLICA": "1"} if extra else {}
            running.enter_context(job(command, **environment, **more, REPLICA_GROUP_ID=str(number), BENCH_FOLDER=str(folder)))
        logs = Logs(folder)
        return [(kill_one(logs, 1 + number % 3, WORLD, chance), logs) for number in range(kills)]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    options = parser.parse_args()
    chance = random.Random(1)
    told: list[Swap] = []
    found = in_place(options.kills, chance, told)
    for kill, logs in found:
        timeline(kill, logs)
    print(summary([k.seconds for k, _ in found]))
    for s in told:
        print(s.phases, s.lost_steps, round(s.total,3), s.rung)


def timeline(kill: Kill, logs: Logs) -> None:
    new = logs.newest()
    print(f"\nrank {kill.victim.rank}: {kill.seconds:.3f}  step {logs.step_seconds():.3f}")
    for life in logs.lives.values():
        ms = [m for m in life.moments if kill.at <= m.at <= kill.at + kill.seconds + 0.1]
        if life.pid == kill.victim.pid or not ms:
            continue
        print("  ", life.rank, life.pid, " ".join(f"{m.event}{m.step}@{m.at - kill.at:.3f}" for m in ms))


if __name__ == "__main__":
    main()
