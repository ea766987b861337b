"""Runs cases on four forked ranks, first under gloo and then under phoenix, and prints one JSON line for each case and backend.

`python ranks.py FOLDER CASE...`. The ranks go case by case together, told by the process that forked them: it knows at each
moment which case is running, and when a case fails or hangs it ends the ranks and goes on with the next case on fresh ones.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import hashlib
import importlib
import json
import os
import random
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Final

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCHINDUCTOR_COMPILE_THREADS="1")

import case_table
import numpy as np
import torch
import torch._dynamo  # takes seconds: once, before the ranks are forked
import torch.distributed as dist
from case_table import BACKENDS, BODIES, Case, Rank
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from phoenix_runtime import communicators

SIZE: Final = 4
DEADLINE = 30.0  # seconds for one case on all ranks
SLOW: Final = 4  # times that for a slow one
STACKS_BEFORE: Final = 1.0  # seconds before that at which a rank writes down where it stands
OUT_OF_PATIENCE: Final = 3  # so many cases may hang before the rest is given up
PR_SET_PDEATHSIG: Final = 1
CHANGING: Final = re.compile(r"0x[0-9a-f]+|\[?127\.0\.0\.1\]?:\d+|\[[EFW]\d{4} [\d:.]+ |\[rank\d\]:")


def described(value: object) -> object:
    """A value as JSON that is equal exactly when all bits are; small tensors stay readable."""
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        dense = whole.detach().to_dense().contiguous() if whole.layout != torch.strided else whole.detach().contiguous()
        bits = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(bits).hexdigest()[:16]
        shown = str(dense.tolist()) if dense.numel() <= 8 else f"norm {dense.double().norm():.6g}"
        return f"{str(value.dtype)[6:]}{list(dense.shape)} {digest} {shown}"
    if isinstance(value, torch.nn.Module):
        return described([*value.parameters(), *value.buffers()])
    if isinstance(value, dict):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    if isinstance(value, str):
        return CHANGING.sub("<...>", value)
    return value if value is None or isinstance(value, bool | int | float) else repr(value)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Performer:
    """One rank: does what it is told, until it is ended."""

    def __init__(self, number: int, port: int, folder: Path, orders: Connection) -> None:
        self.rank = Rank(number, SIZE, folder, begin=self.begin)
        self.orders = orders
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE))
        self.begun = 0
        self.lap = ""

    def begin(self) -> None:
        """All ranks begin equally often, so the number makes a name that only they share."""
        self.begun += 1
        store = dist.PrefixStore(f"{self.lap}/{self.begun}", self.store)
        dist.init_process_group(
            self.rank.backend,
            store=store,
            rank=self.rank.number,
            world_size=SIZE,
            timeout=timedelta(seconds=DEADLINE * SLOW),  # not before the case's deadline, which is told apart better
        )

    def perform(self) -> None:
        while True:
            order, argument, seconds = self.orders.recv()
            faulthandler.dump_traceback_later(seconds - STACKS_BEFORE)
            try:
                answer = {"value": getattr(self, order)(argument)}
            except BaseException:
                answer = {"error": traceback.format_exc()}
            faulthandler.cancel_dump_traceback_later()
            self.orders.send(answer)

    def start(self, argument: tuple[str, str]) -> None:
        """Leave the groups of the backend before, begin with this one."""
        self.rank.backend, self.lap = argument
        if dist.is_initialized():
            dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it remembers meshes by their shape, with the names of groups that are gone
        gc.collect()
        self.begun = 0
        self.begin()
        dist.barrier()

    def play(self, name: str) -> object:
        self._tidy()
        torch.manual_seed(1234)
        np.random.seed(1234)
        random.seed(1234)
        return described(BODIES[name](self.rank))

    def _tidy(self) -> None:
        """What the last case left goes: all its ranks have finished it."""
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        gc.collect()


@dataclass
class Ranks:
    """The four processes, and a fifth that hosts their store. Each writes its stderr to a file of its own."""

    folder: Path
    pids: list[int] = field(default_factory=list)
    lines: list[Connection] = field(default_factory=list)

    def __post_init__(self) -> None:
        ours, theirs = Pipe()
        self._fork("store", lambda: host_store(theirs))
        port = ours.recv()
        ours.close()
        theirs.close()
        for number in range(SIZE):
            line, their_end = Pipe()
            self._fork(f"rank{number}", lambda: Performer(number, port, self.folder, their_end).perform())  # noqa: B023
            their_end.close()
            self.lines.append(line)

    def _fork(self, name: str, run: Callable[[], None]) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent()
                log = os.open(self.folder / f"{name}.stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(log, 1)
                os.dup2(log, 2)
                run()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self.pids.append(pid)

    def ask(self, order: str, argument: object, seconds: float) -> list[dict[str, Any]]:
        """Every rank's answer, or why there is none within this time."""
        answers: dict[Connection, dict[str, Any]] = {}
        for line in self.lines:
            try:
                line.send((order, argument, seconds))
            except BrokenPipeError:
                answers[line] = {"error": "the process had ended before"}
        until = time.monotonic() + seconds
        while len(answers) < SIZE and (left := until - time.monotonic()) > 0:
            for line in wait([line for line in self.lines if line not in answers], left):
                assert isinstance(line, Connection)
                try:
                    answers[line] = line.recv()
                except (EOFError, ConnectionResetError):
                    answers[line] = {"error": "the process ended"}
        return [
            answers.get(line, {"error": f"hung: no answer within {seconds:g} s", "hung": True}) for line in self.lines
        ]

    def end(self) -> dict[str, str]:
        """Kill them by pid; what each wrote to stderr, where a hung one has left its stacks."""
        for line in self.lines:
            line.close()
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return {path.stem: path.read_text(errors="replace")[-6000:] for path in sorted(self.folder.glob("*.stderr"))}


def host_store(answer_to: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answer_to.send(store.port)
    signal.pause()


class Round:
    """All cases under one backend."""

    def __init__(self, backend: str, folder: Path) -> None:
        self.backend, self.folder = backend, folder
        self.starts = self.hung = 0

    def run(self, ranks: Ranks | None, cases: list[Case]) -> Ranks | None:
        """On these processes as far as they last. Returns those on which the next round can run."""
        running = False
        for case in cases:
            if self.hung >= OUT_OF_PATIENCE:
                self._say(case.name, [{"error": f"not run: {self.hung} cases hung before"}])
                continue
            begun = time.monotonic()
            if ranks is None:
                ranks = Ranks(self.folder)
            answers = [] if running else self._start(ranks)
            running = not any("error" in answer for answer in answers)
            if running:
                answers = ranks.ask("play", case.name, DEADLINE * (SLOW if case.slow else 1))
            if any("error" in answer for answer in answers):
                self.hung += any("hung" in answer for answer in answers)
                self._say(case.name, answers, time.monotonic() - begun, ranks.end())
                ranks, running = None, False
            else:
                self._say(case.name, answers, time.monotonic() - begun)
        return ranks

    def _start(self, ranks: Ranks) -> list[dict[str, Any]]:
        self.starts += 1
        return ranks.ask("start", (self.backend, f"{self.backend}{self.starts}"), DEADLINE)

    def _say(
        self, case: str, answers: list[dict[str, Any]], seconds: float = 0.0, stderr: dict[str, str] | None = None
    ) -> None:
        line = {
            "case": case,
            "backend": self.backend,
            "seconds": round(seconds, 2),
            "answers": answers,
            "stderr": stderr,
        }
        print(json.dumps(line), flush=True)


def prepare() -> None:
    """All that the ranks will need, once, before they are forked."""
    die_with_parent()
    warnings.simplefilter("ignore")  # torch deprecates much of what scripts use
    torch.set_num_threads(1)
    for module in case_table.MODULES:
        importlib.import_module(module)
    communicators.register()
    torch.compile(lambda tensor: tensor + 1, backend="aot_eager")(torch.ones(1, requires_grad=True))  # imports the rest
    gc.collect()
    gc.freeze()  # the ranks' own collections need not look at all of torch


def main(folder: Path, names: list[str]) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    prepare()
    chosen = [case for case in case_table.declared() if case.name in names]
    ranks: Ranks | None = None
    for backend in BACKENDS:
        ranks = Round(backend, folder).run(ranks, [case for case in chosen if backend in case.backends])
    if ranks is not None:
        ranks.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
