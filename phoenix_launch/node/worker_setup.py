"""Decides what a worker is started with: its environment, its command line, where its error file stands. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from phoenix_launch.bootstrap import AgentBootstrap, Command, OutputSettings, RunMode
from phoenix_launch.messages import RankOrder
from phoenix_launch.node.numa import Machine, NumaError
from phoenix_launch.wire import Generation

JOB_KEY: Final = "PHOENIX_JOB_KEY"
INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
# As torchrun's run_script_path does it: argv[0] is the script, which runs as __main__.
RUN_PATH_PROGRAM: Final = "import sys, runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


class WorkerSetupError(Exception):
    """What a plan asks for cannot be started here; the text is shown as the worker's last words."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """What of a worker's environment depends on the node alone."""

    node: str
    interface: str
    socket_path: str  # PHOENIX_AGENT


def node_environment(bootstrap: AgentBootstrap, prepared: Mapping[str, str], place: NodePlace) -> dict[str, str]:
    """What every process of this node has: the fork server, the parked ones, the store host, the workers."""
    environment = {**bootstrap.environment, **prepared, "PHOENIX_NODE": place.node, "PHOENIX_AGENT": place.socket_path}
    if place.interface:
        for name in INTERFACE_VARIABLES:
            environment.setdefault(name, place.interface)
    environment.pop(JOB_KEY, None)
    return environment


def worker_environment(
    node: Mapping[str, str], order: RankOrder, command: Command, error_file: Path, progress: str
) -> dict[str, str]:
    """The whole environment of one worker. Raises WorkerSetupError when it has no device to itself but should."""
    environment = {
        **node,
        **order.environment,
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "PHOENIX_PROGRESS": progress,
    }
    if command.virtual_local_rank:
        environment["CUDA_VISIBLE_DEVICES"] = own_device(node.get("CUDA_VISIBLE_DEVICES"), order.local_rank)
        environment["LOCAL_RANK"] = "0"
    environment.pop(JOB_KEY, None)
    return environment


def own_device(visible: str | None, local_rank: int) -> str:
    """The one device of a local rank, out of CUDA_VISIBLE_DEVICES as the node has it (None: not set)."""
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise WorkerSetupError(f"local rank {local_rank} has no device in CUDA_VISIBLE_DEVICES={visible}")
    return devices[local_rank].strip()


def near_cpus(command: Command, visible: str | None, local_rank: int, machine: Machine) -> frozenset[int]:
    """Those that --numa-binding leaves to a worker; empty: all. Raises WorkerSetupError.

    `visible`: CUDA_VISIBLE_DEVICES as the node has it. Without any GPU there is nothing to be near to.
    """
    if not command.numa_binding:
        return frozenset()
    gpus = machine.gpus(visible)
    try:
        return machine.cpus_near(command.numa_binding, gpus, local_rank) if gpus else frozenset()
    except NumaError as error:
        raise WorkerSetupError(f"--numa-binding {command.numa_binding}: {error}") from None


def arguments(command: Command, local_rank: int) -> tuple[str, ...]:
    """The script's own, to the letter, but for torchrun's one macro."""
    return tuple(argument.replace("${local_rank}", str(local_rank)) for argument in command.args)


def command_line(command: Command, local_rank: int) -> list[str]:
    """How a worker is started when it is not forked."""
    args = arguments(command, local_rank)
    match command.mode:
        case RunMode.EXEC:
            return [command.target, *args]
        case RunMode.MODULE:
            return [command.python, "-u", "-m", command.target, *args]
        case RunMode.RUN_PATH:
            return [command.python, "-u", "-c", RUN_PATH_PROGRAM, command.target, *args]
        case RunMode.SCRIPT:
            return [command.python, "-u", command.target, *args]


def error_file(output: OutputSettings, runtime: Path, order: RankOrder, generation: Generation, attempt: int) -> Path:
    """Where @record writes: in torchrun's layout when that was asked for, beside the logs, or with the sockets."""
    if output.files and output.torchrun_folder:
        return Path(output.torchrun_folder) / f"attempt_{attempt}" / str(order.local_rank) / "error.json"
    return (Path(output.folder) if output.files else runtime) / f"{order.rank}.{generation}.error.json"
