"""--numa-binding: which CPUs are near which GPU, on machines made of files; and that a process is really bound."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phoenix_launch.bootstrap import Command, RunMode
from phoenix_launch.node.fresh_process import start
from phoenix_launch.node.numa import Gpu, Machine, NumaError, bind
from phoenix_launch.node.worker_setup import WorkerSetupError, near_cpus
from tests.contract import NO_TORCH
from tests.jobs_under_test import run

ALL = frozenset(range(32))


def put(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def cpus(root: Path, sockets: int, nodes_each: int, cores_each: int, complexes_each: int) -> None:
    """Two threads a core: CPU c and c + half. Each NUMA node has `complexes_each` groups that share a third-level cache."""
    nodes = sockets * nodes_each
    half = nodes * cores_each
    put(root, "sys/devices/system/node/possible", f"0-{nodes - 1}" if nodes > 1 else "0")
    for node in range(nodes):
        first, last = node * cores_each, (node + 1) * cores_each - 1
        put(root, f"sys/devices/system/node/node{node}/cpulist", f"{first}-{last},{half + first}-{half + last}")
        for core in range(first, last + 1):
            size = cores_each // complexes_each
            begin = first + (core - first) // size * size
            shared = f"{begin}-{begin + size - 1},{half + begin}-{half + begin + size - 1}"
            for cpu in (core, half + core):
                place = f"sys/devices/system/cpu/cpu{cpu}"
                put(root, f"{place}/topology/physical_package_id", str(node // nodes_each))
                put(root, f"{place}/topology/thread_siblings_list", f"{core},{half + core}")
                for index, (kind, level, who) in enumerate(
                    [("Data", 1, f"{core},{half + core}"), ("Instruction", 4, "0-31"), ("Unified", 3, shared)]
                ):
                    put(root, f"{place}/cache/index{index}/type", kind)
                    put(root, f"{place}/cache/index{index}/level", str(level))
                    put(root, f"{place}/cache/index{index}/shared_cpu_list", who)


def nvidia(root: Path, nodes: list[int]) -> None:
    """GPUs on these NUMA nodes, named in another order than they stand on the bus."""
    for number, node in enumerate(nodes):
        address = f"0000:{16 * (number + 1):02x}:00.0"
        put(root, f"sys/bus/pci/devices/{address}/numa_node", str(node))
        put(
            root,
            f"proc/driver/nvidia/gpus/{address.upper()}/information",
            f"Model: \t\t NVIDIA X\nIRQ:   \t\t 7\nGPU UUID: \t GPU-{number}aaa-0\nBus Location: \t {address.upper()}\n"
            f"Device Minor: \t {len(nodes) - number}",
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """2 sockets x 2 NUMA nodes x 4 cores x 2 threads; 3 GPUs on node 1, one on node 2."""
    cpus(tmp_path, sockets=2, nodes_each=2, cores_each=4, complexes_each=2)
    nvidia(tmp_path, [1, 1, 1, 2])
    return Machine(ALL, tmp_path)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("node", [{4, 5, 6, 7, 20, 21, 22, 23}] * 3 + [{8, 9, 10, 11, 24, 25, 26, 27}]),
        ("socket", [set(range(8)) | set(range(16, 24))] * 3 + [set(range(8, 16)) | set(range(24, 32))]),
        ("exclusive", [{4, 5, 20, 21}, {6, 22}, {7, 23}, {8, 9, 10, 11, 24, 25, 26, 27}]),
        ("core-complex", [{4, 5, 20, 21}, {6, 7, 22, 23}, {4, 5, 20, 21}, {8, 9, 24, 25}]),
    ],
)
def test_each_way_to_bind(machine: Machine, mode: str, expected: list[set[int]]) -> None:
    gpus = machine.gpus(None)
    assert [machine.cpus_near(mode, gpus, index) for index in range(4)] == expected


# What torch reads from the kernel comes from our files, what it asks of the driver from our list.
TORCHS_OWN = """
import builtins, os, sys
import torch.numa.binding as binding
root, addresses = sys.argv[1], sys.argv[2:]
opened, listed = builtins.open, os.listdir
builtins.open = lambda path, *a, **k: opened(root + path if str(path).startswith("/sys") else path, *a, **k)
os.listdir = lambda path: listed(root + path if str(path).startswith("/sys") else path)
os.sched_getaffinity = lambda _: set(range(32))
class Properties:
    def __init__(self, index):
        domain, bus, rest = addresses[index].split(":")
        self.pci_domain_id, self.pci_bus_id, self.pci_device_id = int(domain, 16), int(bus, 16), int(rest[:2], 16)
binding.torch.cuda.get_device_properties, binding.torch.cuda.device_count = Properties, lambda: len(addresses)
for mode in binding.AffinityMode:
    for index in range(len(addresses)):
        options = binding.NumaOptions(mode)
        cpus = binding._get_logical_cpus_to_bind_to(gpu_index=index, numa_options=options)
        print(mode.value, index, *sorted(cpus))
"""


def test_torch_says_the_same(machine: Machine) -> None:
    gpus = machine.gpus(None)
    argv = [sys.executable, "-c", TORCHS_OWN, str(machine.root), *(gpu.address for gpu in gpus)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    lines = [line.split() for line in said.splitlines()]
    assert len(lines) == 4 * len(gpus)
    for mode, index, *cpus in lines:
        assert machine.cpus_near(mode, gpus, int(index)) == {int(cpu) for cpu in cpus}, (mode, index)


def test_gpus_are_counted_by_their_place_on_the_bus_and_as_the_user_shows_them(machine: Machine) -> None:
    addresses = ["0000:10:00.0", "0000:20:00.0", "0000:30:00.0", "0000:40:00.0"]
    assert [gpu.address for gpu in machine.gpus(None)] == addresses
    assert [gpu.address for gpu in machine.gpus("3, 0")] == [addresses[3], addresses[0]]
    assert [gpu.address for gpu in machine.gpus("GPU-2aaa,GPU-0")] == [addresses[2], addresses[0]]
    assert [gpu.address for gpu in machine.gpus("1,9,0")] == [addresses[1]]
    assert machine.gpus("") == []


def test_amds_gpus_are_found_by_their_vector_units(tmp_path: Path) -> None:
    put(tmp_path, "sys/class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 64\nsimd_count 0\nlocation_id 0")
    put(tmp_path, "sys/class/kfd/kfd/topology/nodes/1/properties", f"simd_count 304\nlocation_id {0xC1 << 8}\ndomain 2")
    assert Machine(ALL, tmp_path).gpus(None) == [Gpu("0002:c1:00.0")]


def test_only_cpus_that_may_be_used_count(machine: Machine) -> None:
    fewer = replace(machine, allowed=frozenset({5, 6, 22}))
    assert fewer.cpus_near("node", fewer.gpus(None), 0) == {5, 6, 22}
    with pytest.raises(NumaError, match=r"no CPU near GPU 0000:40:00\.0"):
        fewer.cpus_near("node", fewer.gpus(None), 3)
    with pytest.raises(NumaError, match="NUMA node 1 has 2 physical cores for 3 GPUs"):
        fewer.cpus_near("exclusive", fewer.gpus(None), 0)


def test_a_machine_with_one_numa_node_may_call_it_minus_1(tmp_path: Path) -> None:
    cpus(tmp_path, sockets=1, nodes_each=1, cores_each=4, complexes_each=1)
    nvidia(tmp_path, [-1])
    machine = Machine(ALL, tmp_path)
    assert machine.cpus_near("node", machine.gpus(None), 0) == frozenset(range(8))


def command(mode: str) -> Command:
    return Command(RunMode.SCRIPT, "x.py", (), "python", numa_binding=mode)


def test_nothing_is_bound_without_the_option_or_without_gpus(machine: Machine, tmp_path: Path) -> None:
    assert near_cpus(command(""), None, 0, machine) == frozenset()
    assert near_cpus(command("node"), None, 0, Machine(ALL, tmp_path / "nothing")) == frozenset()
    assert near_cpus(command("node"), "3", 0, machine) == {8, 9, 10, 11, 24, 25, 26, 27}


def test_a_worker_that_cannot_be_bound_says_why(machine: Machine) -> None:
    with pytest.raises(WorkerSetupError, match="--numa-binding node: local rank 4 has no GPU to be near to: 4 are"):
        near_cpus(command("node"), None, 4, machine)
    (machine.root / "sys/bus/pci/devices/0000:10:00.0/numa_node").unlink()
    with pytest.raises(WorkerSetupError, match=r"cannot tell which CPUs are near GPU 0000:10:00\.0"):
        near_cpus(command("node"), None, 0, machine)


def test_a_process_that_is_started_runs_on_these_cpus_only() -> None:
    one = frozenset({max(os.sched_getaffinity(0))})
    started = start(
        [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"], dict(os.environ), "/", cpus=one
    )
    with os.fdopen(started.stdout) as out, os.fdopen(started.stderr):
        assert out.read().strip() == str(set(one))
    assert started.popen.wait(10) == 0


def test_a_process_that_waits_is_bound_with_all_its_threads() -> None:
    program = """
import os, sys, threading
stop = threading.Event()
threading.Thread(target=stop.wait).start()
print("up", flush=True)
sys.stdin.readline()
print(*[sorted(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")], sep=";")
stop.set()
"""
    one = frozenset({max(os.sched_getaffinity(0))})
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        bind(process.pid, one)
        out, _ = process.communicate("\n", timeout=10)
    assert out.strip() == ";".join([str(sorted(one))] * 2)


def test_without_gpus_a_job_says_once_that_it_has_no_effect_and_runs(tmp_path: Path) -> None:
    if Machine().gpus(None):
        pytest.skip("this machine has GPUs")
    options = ["--numa-binding", "exclusive", "--nodes", 2]
    done = run(tmp_path / "home", *options, "--no-python", "true", env=NO_TORCH)
    assert done.code == 0, done.err
    assert done.err.count("--numa-binding") == 1
    assert "--numa-binding exclusive has no effect on node0, node1: no GPU" in done.err
