"""Loads modules into a fork server and tells which of them leave something behind that no forked process can share."""

from __future__ import annotations

import glob
import os
import sys
import warnings
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from phoenix_runtime.imports import Import


@dataclass(frozen=True, slots=True)
class Traces:
    """What of this process a fork would tear apart or hand to several owners."""

    threads: Set[int]
    children: Set[int]
    shared: Set[str]  # writable shared mappings: a lock in one would be one lock for all ranks
    cuda: bool

    def beyond(self, before: Traces) -> str:
        """In words what is here and was not before; empty: nothing."""
        found = [
            "starts threads" if self.threads - before.threads else "",
            "starts processes" if self.children - before.children else "",
            "maps memory that processes share" if self.shared - before.shared else "",
            "initialises CUDA" if self.cuda and not before.cuda else "",
        ]
        return " and ".join(part for part in found if part)


@dataclass(slots=True)
class Loaded:
    """`unsafe`: modules to leave out in a fresh process and why; `failed`: those that could not be imported and why."""

    modules: list[str] = field(default_factory=list)
    unsafe: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def load(imports: Iterable[Import]) -> Loaded:
    """Import one after the other; none of them can end the process by raising."""
    loaded = Loaded()
    before = traces()
    for item in imports:
        try:
            __import__(item.module, fromlist=item.names)
        except (Exception, SystemExit) as error:
            loaded.failed[item.module] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        after = traces()
        if after.threads - before.threads:
            fork_once()  # ends the threads of pools that handle a fork themselves, such as OpenBLAS's
            after = traces()
        harm = after.beyond(before)
        if harm:
            loaded.unsafe[item.module] = harm
        else:
            loaded.modules.append(item.module)
        before = after
    return loaded


def traces() -> Traces:
    return Traces(
        threads=frozenset(int(name) for name in os.listdir("/proc/self/task")),
        children=_children(),
        shared=_shared_mappings(),
        cuda=_cuda_in_use(),
    )


def fork_once() -> None:
    """Fork a process that ends at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of exactly what we are here to find out
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _children() -> frozenset[int]:
    found: list[int] = []
    for path in glob.glob("/proc/self/task/*/children"):
        try:
            with open(path) as opened:
                found += map(int, opened.read().split())
        except OSError:  # the thread ended meanwhile
            continue
    return frozenset(found)


def _shared_mappings() -> frozenset[str]:
    with open("/proc/self/maps") as opened:
        rows = [line.split(maxsplit=2) for line in opened]
    return frozenset(row[0] for row in rows if row[1][1] == "w" and row[1][3] == "s")


def _cuda_in_use() -> bool:
    """cuInit opens /dev/nvidia-uvm, whichever library called it; NVML, which survives a fork, does not."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return True
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia-uvm"):
                return True
        except OSError:
            continue
    return False
