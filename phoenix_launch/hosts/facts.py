"""What an agent finds out about its host, without torch: versions, cores, GPUs, memory, disk, script, address."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]

from phoenix_launch import __version__
from phoenix_launch.bootstrap import AgentBootstrap, Command, OutputSettings, RunMode
from phoenix_launch.messages import HostFacts
from phoenix_launch.node.cgroup import ControlGroup, memory_free

LOOPBACK: Final = ("127.0.0.1", "lo")
_NVIDIA_DEVICE: Final = re.compile(r"nvidia\d+")


def gather(bootstrap: AgentBootstrap, place: tuple[str, str], probe_port: int, guardian: int) -> HostFacts:
    """`place` is the address and the interface, as `find_place` says."""
    cwd_error = folder_error(bootstrap.cwd)
    digest, script_error = ("", "") if cwd_error else script_digest(bootstrap.command, bootstrap.cwd)
    groups = ControlGroup()
    return HostFacts(
        hostname=socket.gethostname(),
        address=place[0],
        interface=place[1],
        python=platform.python_version(),
        phoenix=__version__,
        torch=package_version("torch"),
        cores=groups.cores(),
        gpus=visible_gpus(count_gpus(), bootstrap.environment.get("CUDA_VISIBLE_DEVICES")),
        memory_free=int(memory_free(groups)),
        disk_free=disk_free(bootstrap.output.folder),
        script_digest=digest,
        script_error=script_error,
        cwd_error=cwd_error,
        log_error=make_log_folder(bootstrap.output),
        probe_port=probe_port,
        agent_pid=os.getpid(),
        guardian_pid=guardian,
    )


def package_version(name: str) -> str:
    """From the package's metadata; empty when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def count_gpus(dev: Path = Path("/dev"), topology: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> int:
    """By device files: NVIDIA's, else AMD's (of whose nodes those with vector units are GPUs)."""
    nvidia = sum(bool(_NVIDIA_DEVICE.fullmatch(name)) for name in _names(dev))
    if nvidia:
        return nvidia
    return sum(_is_amd_gpu(topology / name / "properties") for name in _names(topology))


def visible_gpus(devices: int, visible: str | None) -> int:
    """How many of them CUDA_VISIBLE_DEVICES leaves; what follows an invalid entry does not count, as with CUDA."""
    if visible is None:
        return devices
    chosen = 0
    for entry in visible.split(","):
        name = entry.strip()
        if not name or name.startswith("-") or (name.isdecimal() and int(name) >= devices):
            break
        chosen += 1
    return min(chosen, devices)


def disk_free(folder: str) -> int:
    """Bytes free where `folder` is, or will be; 0 when that cannot be said."""
    path = Path(folder or tempfile.gettempdir())
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def script_digest(command: Command, cwd: str) -> tuple[str, str]:
    """(BLAKE2 of the script's bytes, "") or ("", why it cannot be read); both empty when there is no script file."""
    if command.mode not in (RunMode.SCRIPT, RunMode.RUN_PATH):
        return "", ""
    path = Path(cwd, command.target)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest(), ""
    except OSError as error:
        return "", f"{path}: {error.strerror or error}"


def folder_error(folder: str) -> str:
    try:
        with os.scandir(folder):
            return "" if os.access(folder, os.X_OK) else f"{folder}: permission denied"
    except OSError as error:
        return f"{folder}: {error.strerror or error}"


def make_log_folder(output: OutputSettings) -> str:
    """Make it, 0700; why it cannot be written to, or nothing."""
    if not output.files:
        return ""
    try:
        os.makedirs(output.folder, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.folder) as file:
            file.write(b"x")
    except OSError as error:
        return f"{output.folder}: {error.strerror or error}"
    return ""


def find_place(bootstrap: AgentBootstrap) -> tuple[str, str]:
    """(address, interface) by which other hosts reach this one; the address is empty when the interface is unknown."""
    if bootstrap.simulated:
        return LOOPBACK
    addresses = interface_addresses()
    if bootstrap.interface:
        if bootstrap.interface in addresses:
            known = addresses[bootstrap.interface]
            wanted = bootstrap.address if bootstrap.address in known else next(iter(known), "")
            return wanted, bootstrap.interface
        return (bootstrap.interface, named) if (named := _holder(addresses, bootstrap.interface)) else ("", "")
    if bootstrap.address and (named := _holder(addresses, bootstrap.address)):
        return bootstrap.address, named
    address = address_towards(*endpoint_address(bootstrap.control_endpoint))
    return (address, _holder(addresses, address)) if address else LOOPBACK


def interface_addresses() -> dict[str, list[str]]:
    """Interface -> its addresses, version 4 first, link-local ones left out."""
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        fitting = [e for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        fitting.sort(key=lambda entry: entry.family != socket.AF_INET)
        found[name] = [e.address for e in fitting if not e.address.startswith(("fe80:", "169.254."))]
    return found


def endpoint_address(endpoint: str) -> tuple[str, int]:
    """(host, port) of tcp://HOST:PORT."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def address_towards(host: str, port: int) -> str:
    """Our own address on the way to `host`; nothing is sent. Empty when there is no way."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(where)
            return str(sock.getsockname()[0])
    except OSError:
        return ""


def _holder(addresses: dict[str, list[str]], address: str) -> str:
    return next((name for name, known in addresses.items() if address in known), "")


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _is_amd_gpu(properties: Path) -> bool:
    try:
        text = properties.read_text()
    except OSError:
        return False
    return any(line.startswith("simd_count ") and not line.endswith(" 0") for line in text.splitlines())
