"""Which CPUs are near a worker's GPU, as --numa-binding asks for it: torchrun's four ways, read from /proc and /sys."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")


class NumaError(Exception):
    """A worker cannot be bound as asked; the text says why."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """`address` on the PCI bus, as /sys/bus/pci/devices names it."""

    address: str
    uuid: str = ""


@dataclass(frozen=True)
class Machine:
    """What the kernel says about GPUs and CPUs. `allowed`: the CPUs that may be used at all."""

    allowed: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    root: Path = Path("/")

    def gpus(self, visible: str | None) -> list[Gpu]:
        """In the order in which torch counts them. `visible`: CUDA_VISIBLE_DEVICES, None when it is not set."""
        gpus = sorted(self._nvidia() or self._amd(), key=lambda gpu: gpu.address)
        if visible is None:
            return gpus
        chosen = []
        for entry in visible.split(","):
            name = entry.strip()
            found = [gpu for index, gpu in enumerate(gpus) if name and _is_named(gpu, index, name)]
            if not found:
                break  # as with CUDA, what follows an invalid entry does not count
            chosen.append(found[0])
        return chosen

    def cpus_near(self, mode: str, gpus: list[Gpu], index: int) -> frozenset[int]:
        """The CPUs for the worker of GPU `index`. Raises NumaError."""
        if index >= len(gpus):
            raise NumaError(f"local rank {index} has no GPU to be near to: {len(gpus)} are visible")
        try:
            node = self._node_of(gpus[index])
            neighbours = [place for place, gpu in enumerate(gpus) if self._node_of(gpu) == node]
            cpus = self._modes[mode](self, node, neighbours.index(index), len(neighbours))
        except (OSError, ValueError) as error:
            raise NumaError(f"cannot tell which CPUs are near GPU {gpus[index].address}: {error}") from None
        if not cpus:
            raise NumaError(f"no CPU near GPU {gpus[index].address} may be used")
        return frozenset(cpus)

    # --- the four ways: the GPU's NUMA node, its place among the GPUs of that node, how many these are ---

    def _near_node(self, node: int, place: int, count: int) -> set[int]:
        return self._cpus_of(node)

    def _near_socket(self, node: int, place: int, count: int) -> set[int]:
        nodes = _numbers(self._read("sys/devices/system/node/possible"))
        socket = self._socket_of(node)
        return {cpu for each in nodes if self._socket_of(each) == socket for cpu in self._cpus_of(each)}

    def _exclusive(self, node: int, place: int, count: int) -> set[int]:
        """Its share of the node's physical cores; what does not divide evenly goes to the first ones."""
        cores = sorted(self._grouped(node, self._siblings).items())
        each, more = divmod(len(cores), count)
        if not each:
            raise ValueError(f"NUMA node {node} has {len(cores)} physical cores for {count} GPUs")
        start = place * each + min(place, more)
        return {cpu for _, cpus in cores[start : start + each + (place < more)] for cpu in cpus}

    def _core_complex(self, node: int, place: int, count: int) -> set[int]:
        """One group of cores that share their last cache, another for each GPU as far as there are any; large ones first."""
        groups = sorted(self._grouped(node, self._sharing_cache).items(), key=lambda group: (-len(group[1]), group[0]))
        return groups[place % len(groups)][1]

    _modes: ClassVar[Mapping[str, Callable[[Machine, int, int, int], set[int]]]] = {
        "node": _near_node,
        "socket": _near_socket,
        "exclusive": _exclusive,
        "core-complex": _core_complex,
    }

    # --- what the kernel says ---

    def _read(self, path: str) -> str:
        return (self.root / path).read_text().strip()

    def _nvidia(self) -> list[Gpu]:
        gpus = []
        for place in _entries(self.root / "proc/driver/nvidia/gpus"):
            said = dict(
                line.partition(":")[::2]
                for line in self._read(f"proc/driver/nvidia/gpus/{place}/information").split("\n")
            )
            address = said.get("Bus Location", place).strip().lower()
            gpus.append(Gpu(address, said.get("GPU UUID", "").strip()))
        return gpus

    def _amd(self) -> list[Gpu]:
        gpus = []
        for place in _entries(self.root / "sys/class/kfd/kfd/topology/nodes"):
            said = dict(
                line.rpartition(" ")[::2]
                for line in self._read(f"sys/class/kfd/kfd/topology/nodes/{place}/properties").split("\n")
            )
            if said.get("simd_count", "0") != "0":
                domain, where = int(said.get("domain", "0")), int(said["location_id"])
                gpus.append(Gpu(f"{domain:04x}:{where >> 8:02x}:{where >> 3 & 31:02x}.{where & 7:x}"))
        return gpus

    def _node_of(self, gpu: Gpu) -> int:
        if not _ADDRESS.fullmatch(gpu.address):
            raise ValueError(f"{gpu.address!r} is no PCI address")
        return max(0, int(self._read(f"sys/bus/pci/devices/{gpu.address}/numa_node")))  # -1: there is only one

    def _cpus_of(self, node: int) -> set[int]:
        return _numbers(self._read(f"sys/devices/system/node/node{node}/cpulist")) & self.allowed

    def _socket_of(self, node: int) -> int:
        cpus = self._cpus_of(node)
        return int(self._read(f"sys/devices/system/cpu/cpu{min(cpus)}/topology/physical_package_id")) if cpus else -1

    def _siblings(self, cpu: int) -> set[int]:
        return _numbers(self._read(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))

    def _sharing_cache(self, cpu: int) -> set[int]:
        """The CPUs that share this one's highest cache for data."""
        folder, highest, sharing = f"sys/devices/system/cpu/cpu{cpu}/cache", -1, {cpu}
        for entry in _entries(self.root / folder):
            if entry.startswith("index") and self._read(f"{folder}/{entry}/type") in ("Unified", "Data"):
                level = int(self._read(f"{folder}/{entry}/level"))
                if level > highest:
                    highest, sharing = level, _numbers(self._read(f"{folder}/{entry}/shared_cpu_list"))
        return sharing

    def _grouped(self, node: int, sharing: Callable[[int], set[int]]) -> dict[int, set[int]]:
        """The node's CPUs by the lowest number of those they share something with."""
        groups: dict[int, set[int]] = {}
        for cpu in sorted(self._cpus_of(node)):
            groups.setdefault(min(sharing(cpu)), set()).add(cpu)
        return groups


def bind(pid: int, cpus: frozenset[int]) -> None:
    """Bind a process that waits, with every thread it has. Raises OSError when it is gone, or may not use them."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cpus)


def _is_named(gpu: Gpu, index: int, name: str) -> bool:
    return int(name) == index if name.isdecimal() else gpu.uuid.startswith(name)


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _numbers(ranges: str) -> set[int]:
    """0-3,8 -> {0, 1, 2, 3, 8}"""
    numbers: set[int] = set()
    for part in filter(None, (piece.strip() for piece in ranges.split(","))):
        low, _, high = part.partition("-")
        numbers.update(range(int(low), int(high or low) + 1))
    return numbers
