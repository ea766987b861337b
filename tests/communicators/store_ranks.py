"""Ranks that build their groups over a bus of pipes, and over a TCPStore for comparison.

`python store_ranks.py WHAT:RANKS:GROUPS[:ROUNDS]...`: `compare` prints a JSON line for each round and way: messages a rank
sent, milliseconds from the word until the slowest rank had a sum over every group. `absent` or `published`: the last rank is
missing, or dies after it has told its addresses, and the others are told to abandon.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Final

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch
import torch.distributed as dist

from phoenix_runtime import communicators
from phoenix_runtime.communicators.store import Construction, RebuildAbandoned

DEADLINE: Final = 30.0


class Rank:
    """Builds on its main thread's word; a second thread takes what comes over the bus."""

    def __init__(self, rank: int, size: int, groups: int, port: int, orders: Connection, bus: Connection) -> None:
        self.rank, self.size, self.orders, self.bus = rank, size, orders, bus
        self.construction: Construction | None = None
        self.lock = threading.Lock()
        self.sent = 0
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE))
        communicators.register("gloo")
        dist.init_process_group("phoenix", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=DEADLINE))
        self.groups = [dist.group.WORLD, *(dist.new_group(list(range(size))) for _ in range(groups - 1))]
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        while True:
            message = self.bus.recv()
            with self.lock:
                if self.construction is None:
                    continue  # of a generation in which this rank takes no part
                if message == "abandon":
                    self.construction.abandon()
                else:
                    self.construction.deliver(message)

    def publish(self, addresses: Mapping[str, bytes]) -> None:
        self.sent += 1
        self.bus.send(dict(addresses))

    def construct(self) -> Construction:
        with self.lock:
            self.construction = communicators.BACKEND.construct(self.publish)
        return self.construction

    def by_bus(self, number: int) -> int:
        self.sent = 0
        communicators.BACKEND.adopt(self.construct(), DEADLINE)
        with self.lock:
            self.construction = None
        return self.sent

    def by_store(self, number: int) -> int:
        communicators.BACKEND.rebuild(f"round{number}")
        return 0

    def build(self, way: str, number: int) -> dict[str, Any]:
        begun = time.monotonic()
        sent = getattr(self, way)(number)
        sums = []
        for group in self.groups:
            total = torch.tensor([float(self.rank)])
            dist.all_reduce(total, group=group)
            sums.append(total.item())
        return {"messages": sent, "seconds": time.monotonic() - begun, "sums": sums}

    def abandoned(self, way: str, number: int) -> dict[str, Any]:
        """The last rank takes no part, or has published and is killed; then the bus brings the word to abandon."""
        last = self.rank == self.size - 1
        if last and way == "absent":
            return {}
        construction = self.construct()
        if last:
            threading.Event().wait(DEADLINE)  # killed before
        try:
            construction.wait(DEADLINE)
        except RebuildAbandoned:
            let_go = time.monotonic()
            with self.lock:
                self.construction = None
            return {"let go": let_go}
        return {"error": "was not abandoned"}

    def serve(self) -> None:
        while True:
            way, *arguments = self.orders.recv()
            self.orders.send(getattr(self, way)(*arguments))


class Ranks:
    """The processes, and the supervisor's part: it waits for the addresses of all and sends the table to everybody."""

    def __init__(self, size: int, groups: int) -> None:
        self.size, self.groups = size, groups
        self.pids: list[int] = []
        self.orders: list[Connection] = []
        self.buses: list[Connection] = []
        ours, theirs = Pipe()
        self.fork(lambda: host_store(theirs))
        port = ours.recv()
        for rank in range(size):
            order, their_order = Pipe()
            bus, their_bus = Pipe()
            self.fork(lambda: Rank(rank, size, groups, port, their_order, their_bus).serve())  # noqa: B023
            their_order.close()
            their_bus.close()
            self.orders.append(order)
            self.buses.append(bus)

    def fork(self, run: Callable[[], Any]) -> None:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            try:
                run()
            finally:
                os._exit(1)
        self.pids.append(pid)

    def end(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def ask(self, *order: object) -> None:
        for line in self.orders:
            line.send(order)

    def tell(self, message: object) -> None:
        for bus in self.buses:
            bus.send(message)

    def collect(self, ranks: int) -> dict[str, bytes]:
        """The addresses of so many ranks, as soon as all are there."""
        table: dict[str, bytes] = {}
        while len(table) < ranks * self.groups:
            ready = wait(self.buses, DEADLINE)
            assert ready, f"{len(table)} addresses"
            for bus in ready:
                assert isinstance(bus, Connection)
                table.update(bus.recv())
        return table

    def answers(self, lines: list[Connection]) -> list[Any]:
        return [line.recv() if line.poll(DEADLINE) else {"error": "hung"} for line in lines]

    # --- what is tried -----------------------------------------------------------------------------------------------

    def rebuild(self, way: str, number: int) -> list[dict[str, Any]]:
        self.ask("build", way, number)
        if way == "by_bus":
            self.tell(self.collect(self.size))
        return self.answers(self.orders)

    def compare(self, rounds: int) -> Iterator[dict[str, Any]]:
        for number in range(rounds):
            for way in ("by_bus", "by_store"):
                answers = self.rebuild(way, number)
                yield {
                    "way": way,
                    "milliseconds": max(answer["seconds"] for answer in answers) * 1000,
                    "messages": max(answer["messages"] for answer in answers),
                    "sums": [answer["sums"] for answer in answers],
                }

    def abandon(self, way: str) -> dict[str, Any]:
        """Milliseconds from the word until the slowest rank was let go; and whether the next generation is whole."""
        self.ask("abandoned", way, 0)
        table = self.collect(self.size - (way == "absent"))
        if way == "published":
            os.kill(self.pids[-1], signal.SIGKILL)
            os.waitid(os.P_PID, self.pids[-1], os.WEXITED | os.WNOWAIT)
            self.buses.pop()
        self.tell(table)
        told = time.monotonic()
        self.tell("abandon")
        answers = self.answers(self.orders[:-1])
        errors = [answer["error"] for answer in answers if "error" in answer]
        slowest = 0.0 if errors else max(answer["let go"] for answer in answers) - told
        sums = []
        if way == "absent":
            self.answers(self.orders[-1:])
            sums = [answer["sums"] for answer in self.rebuild("by_bus", 1)]
        return {"way": way, "milliseconds": slowest * 1000, "errors": errors, "sums": sums}


def host_store(answer_to: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answer_to.send(store.port)
    signal.pause()


def main(jobs: list[str]) -> None:
    torch.set_num_threads(1)
    for job in jobs:
        what, size, groups, rounds = (*job.split(":"), "1")[:4]
        ranks = Ranks(int(size), int(groups))
        try:
            lines = ranks.compare(int(rounds)) if what == "compare" else [ranks.abandon(what)]
            for line in lines:
                print(json.dumps({"job": job, **line}), flush=True)
        finally:
            ranks.end()


if __name__ == "__main__":
    main(sys.argv[1:])
