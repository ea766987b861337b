"""Ranks that hang in one collective after the other since the last rank never enters it, and are told to abort.

`python abort_ranks.py RANKS`: prints a JSON line for each operation: how long the slowest rank took to come back, and what the
groups could do after they were rebuilt. Every rank's main thread runs the script's side, a second one brings the notice.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Final

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch
import torch.distributed as dist

from phoenix_runtime import communicators

DEADLINE: Final = 60.0
ABORT_SECONDS: Final = 10.0
BIG: Final = 1 << 18  # elements; too many for a socket's buffer


def operations(rank: int, size: int) -> dict[str, Callable[[], object]]:
    """What hangs on every rank but the last when the last one never enters it."""
    last, big = size - 1, torch.ones(BIG)

    def in_a_thread() -> None:
        """As autograd does it: the collective waits in a thread that is not the main one."""
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(3)))
        thread.start()
        thread.join()

    def on_another_group() -> None:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        dist.all_reduce(torch.ones(4), group=pair)
        work.wait()

    pair = dist.new_group([0, last]) if size > 1 else dist.group.WORLD
    if rank not in (0, last):
        pair = dist.group.WORLD
    return {
        "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
        "a large all_reduce": lambda: dist.all_reduce(big.clone()),
        "async all_reduce": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
        "a future": lambda: dist.all_reduce(torch.ones(3), async_op=True).get_future().wait(),
        "broadcast": lambda: dist.broadcast(torch.ones(3), last),
        "all_gather": lambda: dist.all_gather_single(torch.ones(size * 2), torch.ones(2)),
        "reduce_scatter": lambda: dist.reduce_scatter_single(torch.ones(2), torch.ones(size * 2)),
        "all_to_all": lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size)),
        "gather": lambda: dist.scatter(torch.ones(2), src=last),
        "barrier": dist.barrier,
        "recv": lambda: dist.recv(torch.ones(2), last),
        "a large send": lambda: dist.send(torch.ones(BIG * 16), last),
        "recv from any source": lambda: dist.recv(torch.ones(2)),
        "batched p2p": lambda: [
            work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(2), last)])
        ],
        "a thread": in_a_thread,
        "two groups": on_another_group,
        "nothing": lambda: None,
    }


class Rank:
    def __init__(self, rank: int, size: int, port: int, line: Connection) -> None:
        self.rank, self.size, self.line = rank, size, line
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE))
        communicators.register("gloo")
        dist.init_process_group("phoenix", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=DEADLINE))
        self.notices: list[tuple[float, tuple[str, ...]]] = []

    def bring_notice(self) -> None:
        """The second thread: what would come from the agent comes from the parent here."""
        assert self.line.recv() == "abort"
        begun = time.monotonic()
        stuck = communicators.BACKEND.abort(ConnectionAbortedError("a rank died"), ABORT_SECONDS)
        self.notices.append((time.monotonic() - begun, stuck))

    def play(self) -> None:
        gate = communicators.gate()
        for number, (name, operation) in enumerate(operations(self.rank, self.size).items()):
            dist.barrier()
            notice = threading.Thread(target=self.bring_notice)
            gate.keeps = True
            notice.start()
            self.line.send("entering")
            if self.rank != self.size - 1:
                operation()
                if name == "nothing":  # a step that communicates for the first time after the notice
                    notice.join()
                    dist.all_reduce(torch.ones(3))
            back = time.monotonic()
            notice.join()
            seconds, stuck = self.notices.pop()
            after = max(0.0, back - (time.monotonic() - seconds))
            gate.take_issued()
            gate.keeps = False
            self.line.send("back")
            self.line.recv()  # all are
            communicators.BACKEND.rebuild(f"after{number}")
            total = torch.tensor([float(self.rank)])
            dist.all_reduce(total)
            self.line.send({"operation": name, "seconds": max(seconds, after), "stuck": stuck, "sum": total.item()})
            self.line.recv()
        self.line.send({"threads": threading.active_count(), "groups": len(communicators.groups())})


def main(size: int) -> None:
    torch.set_num_threads(1)
    pids: list[int] = []

    def fork(run: Callable[[], Any]) -> None:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            try:
                run()
                os._exit(0)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        pids.append(pid)

    def host_store() -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        theirs.send(store.port)
        signal.pause()

    ours, theirs = Pipe()
    fork(host_store)
    port = ours.recv()
    lines = []
    for rank in range(size):
        line, their_end = Pipe()
        fork(lambda: Rank(rank, size, port, their_end).play())  # noqa: B023
        lines.append(line)

    def all_answer() -> list[Any]:
        answers: dict[Connection, Any] = {}
        until = time.monotonic() + DEADLINE
        while len(answers) < size and (left := until - time.monotonic()) > 0:
            for line in wait([line for line in lines if line not in answers], left):
                assert isinstance(line, Connection)
                answers[line] = line.recv()
        assert len(answers) == size, f"only {len(answers)} of {size} ranks answered"
        return [answers[line] for line in lines]

    def tell(word: str) -> None:
        for line in lines:
            line.send(word)

    try:
        while (answers := all_answer())[0] == "entering":
            tell("abort")
            all_answer()
            tell("rebuild")
            answers = all_answer()
            line = {
                "operation": answers[0]["operation"],
                "seconds": max(answer["seconds"] for answer in answers),
                "stuck": [answer["stuck"] for answer in answers],
                "sums": [answer["sum"] for answer in answers],
            }
            print(json.dumps(line), flush=True)
            tell("on")
        print(json.dumps({"end": answers}), flush=True)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
