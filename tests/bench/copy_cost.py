"""What a copy in memory at every step costs an FSDP2 job, with a replica on another node, against the same job without copies.

2 nodes of one rank, one thread each, 2,048 tokens a rank. All jobs run side by side and take turns (`step_cost.py` says how).
Beside them: what users do without copies in memory, `torch.save` and DCP's `async_save` at every step.

The floor is what moving the bytes takes of a core at the least on this machine, measured while all jobs are stopped: a copy
within memory, and `sendfile` over the loopback interface into memory, both ends. On a machine with a network card and more
cores than ranks most of it is not there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Final

from measure import PHOENIX, WORKERS
from step_cost import STOPPED, TOKENS, Job, Turn, attended, interval, median

MODEL: Final = ["--layers", "10", "--width", "512", "--heads", "8", "--parallel", "fsdp"]
BASE: Final = "off"
CASES: Final = {  # launcher's options, BENCH_SAVE
    "copies": ([], ""),
    BASE: (["--snapshot-interval", "0"], ""),
    "auto": (["--snapshot-interval", "auto"], ""),
    "encrypted": (["--encrypt"], ""),
    "torch.save": (["--snapshot-interval", "0"], "torch"),
    "dcp async": (["--snapshot-interval", "0"], "dcp"),
}
SIZE: Final = 128 << 20


def memcpy_floor() -> float:
    """Seconds of a core for a byte."""
    source, target = memoryview(bytearray(os.urandom(1 << 20)) * (SIZE >> 20)), memoryview(bytearray(SIZE))
    target[:] = source
    began = time.thread_time()
    target[:] = source
    return (time.thread_time() - began) / SIZE


def loopback_floor() -> float:
    """Seconds of a core for a byte, sent and received."""
    file = os.memfd_create("bench")
    os.write(file, os.urandom(1 << 20) * (SIZE >> 20))
    target = memoryview(bytearray(SIZE))
    target[:] = bytes(SIZE)
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as ours:
        theirs, _ = door.accept()

        def send() -> None:
            sent = 0
            while sent < SIZE:
                sent += os.sendfile(theirs.fileno(), file, sent, SIZE - sent)

        began = time.process_time()
        thread = threading.Thread(target=send)
        thread.start()
        got = 0
        while got < SIZE:
            got += ours.recv_into(target[got:])
        thread.join()
        theirs.close()
        taken = time.process_time() - began
    os.close(file)
    return taken / SIZE


def bytes_a_step(one: Job) -> tuple[float, float]:
    """Of a rank: all that it copies for a version, and what of it goes to another node."""
    environment = {**os.environ, "PHOENIX_HOME": f"{one.folder}/home"}
    shown = subprocess.run([PHOENIX, "status", "--json"], env=environment, capture_output=True, text=True, check=True)
    copies = [rank["copies"] for rank in json.loads(shown.stdout)["ranks"]]
    share = sum(each["sent_bytes"] for each in copies) / sum(each["copied_bytes"] for each in copies)
    size = statistics.mean(each["state_bytes"] for each in copies)
    return size, size * share


def measured(cases: Sequence[str], turns: int, steps: int) -> None:
    taken: dict[str, list[Turn]] = {name: [] for name in cases}
    with contextlib.ExitStack() as open_:
        jobs = {}
        for name in cases:
            options, saves = CASES[name]
            script = [str(WORKERS / "train_phoenix.py"), *MODEL, *TOKENS]
            command = [PHOENIX, "--nodes", "2", *STOPPED, *options, *script]
            jobs[name] = open_.enter_context(attended(command, BENCH_SAVE=saves))
        floors: list[tuple[float, float]] = []
        for number in range(turns):
            for name in cases if number % 2 else reversed(cases):
                taken[name].append(jobs[name].turn(steps))
            floors.append((memcpy_floor(), loopback_floor()))
        copied, sent = bytes_a_step(jobs["copies"])
        stall = jobs["copies"].spans(("hands", "handed"), ("waits", "waited"))
        work = {name: one.work / one.steps for name, one in jobs.items()}
    memcpy, loopback = (statistics.median(floor[kind] for floor in floors) for kind in (0, 1))
    base = median(taken[BASE])
    floor = copied * memcpy + sent * loopback
    print(f"bytes a step and rank: {copied / 1e6:.1f} MB copied, {sent / 1e6:.1f} MB sent")
    print(f"floor: {memcpy * 1e12:.0f} + {loopback * 1e12:.0f} ms a GB, {floor * 1000:.0f} ms a step")
    print(f"1.2 x the floor is a ratio of {1 + 1.2 * floor / base:.3f}")
    for name in cases:
        low, high = interval(taken[name], taken[BASE])
        every = sorted(seconds for turn in taken[name] for seconds in turn)
        print(
            f"{name:10} {1000 * median(taken[name]):8.1f} ms median, {1000 * statistics.mean(every):8.1f} mean, "
            f"{1000 * every[min(len(every) - 1, int(0.99 * len(every)))]:8.1f} p99, n={len(every)}; "
            f"ratio {median(taken[name]) / base:.4f} ({low:.4f}-{high:.4f}); processor {work[name]:.3f} s a step, "
            f"{work[name] / work[BASE]:.4f}"
        )
    print(
        f"the training thread hands over and waits {1000 * statistics.median(stall):.1f} ms a step (median; mean "
        f"{1000 * statistics.mean(stall):.1f}, longest {1000 * max(stall):.1f}): {100 * statistics.median(stall) / base:.2f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} [all]")
    parser.add_argument("--turns", type=int, default=6, help="of each job")
    parser.add_argument("--steps", type=int, default=3, help="in each turn")
    options = parser.parse_args()
    cases = list(dict.fromkeys(["copies", BASE, *options.cases])) if options.cases else list(CASES)
    measured(cases, options.turns, options.steps)
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
