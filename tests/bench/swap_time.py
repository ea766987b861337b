"""From SIGKILL of one of four ranks until all four are past the interrupted step: in place, torchrun and torchft in turns.

4 ranks on 2 simulated nodes, each with one more process ready, a model of 4.8 M parameters; kills fall anywhere in a step.
torchrun has a checkpoint of every step. torchft (`--torchft PYTHON`, of an environment that has it) runs with its defaults, and
with a fifth replica that trains along. Then what swaps are made of, a whole node and a spare node, and kills in the copying.
`--parallel fsdp`: FSDP2 in place of DDP in our jobs (with `--rival-kills 0`): each rank then has a part that nobody else has.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Final

from measure import PHOENIX, TORCHRUN, WORKERS, finish, free_port, job, journal, summary, swaps, until
from step_times import Kill, Life, Logs, after_kill, kill_one

from phoenix_launch.records.journal import Fault, SpareParked, Swap, WorkerStarted

WORLD: Final = 4
ON_NODES: Final = ("--nodes", "2", "--nproc-per-node", "2")
SCRIPT: Final = str(WORKERS / "train_phoenix.py")
UNPATCHED: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # without it restarted gloo workers find the old store
COPIED_AT: Final = (6, 10, 14)  # steps in whose copying a rank dies
Run = Callable[[int], list[Kill]]


class InPlace:
    """What the jobs that were repaired in place have told."""

    def __init__(self, chance: random.Random, parallel: str) -> None:
        self.chance = chance
        self.script = [SCRIPT, "--parallel", parallel]
        self.swaps: list[Swap] = []
        self.parts: list[dict[str, float]] = []
        self.beyond: list[float] = []  # from the moment when the fault was found
        self.step = 0.0

    def run(self, kills: int) -> list[Kill]:
        with job([PHOENIX, *ON_NODES, "--local-spares", "1", *self.script]) as (_, folder):
            logs = Logs(folder)
            found = []
            for number in range(kills):
                found.append(kill_one(logs, 1 + number % (WORLD - 1), WORLD, self.chance))
                self.parts.append(parts(logs, found[-1]))
            until(lambda: len(swaps(folder)) == kills, "the swaps in the journal")
            self.beyond += beyond_detection(folder, found)
            self.swaps += swaps(folder)
            self.step = logs.step_seconds()
        return found

    def nodes(self, kills: int) -> list[Kill]:
        """The node of rank 3 loses power, and the next spare node takes its ranks."""
        options = ("--spares", str(kills), "--allow-drills")
        with job([PHOENIX, *ON_NODES, *options, *self.script]) as (_, folder):
            logs = Logs(folder)
            found: list[Kill] = []
            gone: set[str] = set()
            for _ in range(kills):
                logs.wait_for_steps(WORLD)
                until(lambda: spare_node_is_ready(folder, gone), "a spare node")
                node = seats(folder)[WORLD - 1]
                gone.add(node)
                victim, at = logs.newest()[WORLD - 1], time.monotonic()
                environment = {**os.environ, "PHOENIX_HOME": f"{folder}/home"}
                command = [PHOENIX, "inject-fault", "kill-node", "--node", node]
                subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
                found.append(after_kill(logs, victim, at, WORLD))
            until(lambda: len(swaps(folder)) == kills, "the swaps in the journal")
            self.beyond += beyond_detection(folder, found)
            self.swaps += swaps(folder)
        return found


def seats(folder: Path) -> dict[int, str]:
    """By rank: the node where it runs."""
    return {event.rank: event.node for event in journal(folder) if isinstance(event, WorkerStarted)}


def spare_node_is_ready(folder: Path, gone: Set[str]) -> bool:
    """One that has no ranks has made ready as many processes as a node has."""
    ready = [event.node for event in journal(folder) if isinstance(event, SpareParked)]
    return any(ready.count(node) >= WORLD // 2 for node in set(ready) - gone - set(seats(folder).values()))


def beyond_detection(folder: Path, kills: Sequence[Kill]) -> list[float]:
    """Seconds from each fault's line in the journal until all were past the interrupted step."""
    offset = time.time() - time.monotonic()
    faults = [event.t - offset for event in journal(folder) if isinstance(event, Fault)]
    return [kill.at + kill.seconds - min(t for t in faults if t > kill.at) for kill in kills]


def parts(logs: Logs, kill: Kill) -> dict[str, float]:
    """Of one swap, in seconds: what is the step's and the script's own, and what remains."""
    new = logs.newest()[kill.victim.rank]
    again = new.of("enters")[0].at
    doomed = [left_at(life, kill, again) for life in logs.newest().values() if life.pid != new.pid]
    began = {moment.event: moment.at for moment in reversed(new.moments)}
    own = began["imported"] - began["began"] + began["built"] - began["grouped"]
    found = {
        "until the step is run again": again - kill.at,
        "rest of the doomed step": max(doomed),
        "until the new process runs": began["began"] - kill.at,
        "start and model building": own,
        "repeated step": kill.at + kill.seconds - again,
    }
    found["remains"] = found["until the step is run again"] - max(max(doomed), own)
    found["remains, all taken off"] = found["until the step is run again"] - max(doomed) - own
    return found


def left_at(life: Life, kill: Kill, again: float) -> float:
    """When a survivor left the step that it was in, by seconds from the kill; 0: it was between two."""
    return max((moment.at - kill.at for moment in life.of("leaves", after=kill.at) if moment.at < again), default=0.0)


# --- the rivals -----------------------------------------------------------------------------------------------------------


def kill_ranks(logs: Logs, kills: int, chance: random.Random) -> list[Kill]:
    return [kill_one(logs, 1 + number % (WORLD - 1), WORLD, chance) for number in range(kills)]


def torchrun(kills: int, chance: random.Random) -> list[Kill]:
    options = ("--standalone", "--nproc-per-node", str(WORLD), "--max-restarts", str(kills))
    with job([TORCHRUN, *options, str(WORKERS / "train_disk.py")], True, BENCH_CHECKPOINTS="1", **UNPATCHED) as (
        _,
        folder,
    ):
        return kill_ranks(Logs(folder), kills, chance)


def torchft(python: str, extra: bool, kills: int, chance: random.Random) -> list[Kill]:
    """A lighthouse, and for each replica a torchrun that starts it again."""
    folder = Path(python).parent
    port, replicas = free_port(), WORLD + extra
    lighthouse = [str(folder / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}"]
    lighthouse += ["--min_replicas", str(WORLD), "--heartbeat_timeout_ms", "1000"] if extra else ["--min_replicas", "1"]
    environment = {**UNPATCHED, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    environment |= {"BENCH_EXTRA_REPLICA": "1"} if extra else {}
    options = ("--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", "99")
    with contextlib.ExitStack() as running:
        _, shared = running.enter_context(job(lighthouse, True))
        for number in range(replicas):
            torchrun = [python, "-m", "torch.distributed.run", *options, "--master-port", str(free_port())]
            own = {"REPLICA_GROUP_ID": str(number), "BENCH_FOLDER": str(shared)}
            running.enter_context(job([*torchrun, str(WORKERS / "train_torchft.py")], True, **environment, **own))
        logs = Logs(shared)
        logs.wait_for_steps(replicas)
        return [kill_one(logs, 1 + number % (WORLD - 1), WORLD, chance, replicas) for number in range(kills)]


# --- kills within the copying ---------------------------------------------------------------------------------------------


def within_copying(parallel: str) -> tuple[list[int | None], list[float]]:
    """Steps that each swap has lost; and seconds for which a copy is under way, of all copies of all ranks."""
    faults = ";".join(f"copying,{1 + number},{step}" for number, step in enumerate(COPIED_AT))
    command = [PHOENIX, *ON_NODES, "--local-spares", "1", SCRIPT, "--parallel", parallel]
    command += ["--steps", str(COPIED_AT[-1] + 4)]
    with job(command, BENCH_FAULTS=faults) as (process, folder):
        finish(process)
        logs = Logs(folder)
        logs.follow()
        window = [seconds for life in logs.lives.values() for seconds in life.spans("copies", "copied")]
        return [swap.lost_steps for swap in swaps(folder)], window


# --- the report -----------------------------------------------------------------------------------------------------------


def table(title: str, rows: Iterable[dict[str, float]], unit: float = 1000) -> None:
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value * unit)
    print(f"\n{title}, ms: median (min-max)")
    for name, values in columns.items():
        print(f"  {name:30} {statistics.median(values):7.0f} ({min(values):.0f}-{max(values):.0f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="in place")
    parser.add_argument("--rival-kills", type=int, default=4, help="of each other tool, 0: leave them out")
    parser.add_argument("--rounds", type=int, default=2, help="in so many turns")
    parser.add_argument("--torchft", default="", metavar="PYTHON", help="of an environment with torchft-nightly")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp", help="of our jobs")
    options = parser.parse_args()
    if options.parallel != "ddp" and options.rival_kills:
        parser.error("the others run DDP: --rival-kills 0")
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    ours, nodes = (InPlace(random.Random(1), options.parallel) for _ in range(2))
    chance = random.Random(1)
    cases: dict[str, tuple[Run, int]] = {"in place": (ours.run, options.kills)}
    if options.rival_kills:
        cases["torchrun, a checkpoint a step"] = (lambda kills: torchrun(kills, chance), options.rival_kills)
        if options.torchft:
            python = options.torchft
            cases["torchft"] = (lambda kills: torchft(python, False, kills, chance), options.rival_kills)
            cases["torchft, a fifth replica"] = (
                lambda kills: torchft(python, True, kills, chance),
                options.rival_kills,
            )
        else:
            print("torchft is not measured: no --torchft PYTHON")
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(options.rounds):
        for name, (run, kills) in cases.items():
            share = kills * (number + 1) // options.rounds - kills * number // options.rounds
            taken[name] += [kill.seconds for kill in run(share)] if share else []
            print(
                f"  round {number + 1}: {name} {', '.join(f'{s:.3f}' for s in taken[name])}",
                file=sys.stderr,
                flush=True,
            )
    print("\nall ranks past the interrupted step, after a SIGKILL of one")
    for name, seconds in taken.items():
        print(f"  {name:30} {summary(seconds)}", flush=True)
    best = min((statistics.median(seconds) for name, seconds in taken.items() if name != "in place"), default=0.0)
    if best:
        print(f"  in place / best other          {statistics.median(taken['in place']) / best:.2f}")
    print(f"  steps lost in place            {[swap.lost_steps for swap in ours.swaps]}; a step {ours.step:.3f} s")
    table("parts of a swap in place", ours.parts)
    table("its phases in the journal", [swap.phases for swap in ours.swaps])
    whole = [kill.seconds for kill in nodes.nodes(2)]
    print(f"\na whole node, a spare node       {summary(whole)}")
    print(f"  beyond detection               {summary(nodes.beyond)}")
    print(f"  of one process                 {summary(ours.beyond)}")
    table("its phases in the journal", [swap.phases for swap in nodes.swaps])
    lost, window = within_copying(options.parallel)
    print(f"\nkilled within the copying: steps lost {lost}; a copy is under way for {summary(window)}")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
