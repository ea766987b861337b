"""What is known of a cluster of test hosts: its file, its processes, its cgroups. Any process can read it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from typing import Any, TypedDict, cast

from namespaces import TestHostsError, all_pids, argv0, process_file, run_in_network, write

ROOT = os.environ.get("TESTHOSTS_DIR", "/var/lib/testhosts")


class HostState(TypedDict):
    addr: str
    port: str  # its end of the cable at the bridge
    pid: int | None


class Options(TypedDict):
    disk: str
    shm: str
    tmp: str
    mtu: int
    cc: str
    share: list[str]


class State(TypedDict):
    fabric: int | None
    hosts: dict[str, HostState]
    cut: list[list[str]]
    netem: dict[str, dict[str, Any]]
    touched: list[str]  # hosts whose sshd or disks are not as they were
    opts: Options


class ClusterState:
    """A named set of hosts, as its file and the kernel tell."""

    def __init__(self, name: str = "default") -> None:
        if not re.fullmatch(r"[a-z0-9_-]{1,24}", name):
            raise TestHostsError("bad cluster name")
        self.name = name
        self.dir = os.path.join(ROOT, name)
        self.ssh_config = os.path.join(self.dir, "ssh_config")

    @property
    def state(self) -> State:
        try:
            with open(self.dir + "/state.json") as file:
                return cast(State, json.load(file))
        except FileNotFoundError:
            raise TestHostsError(f"no cluster {self.name!r} (testhosts up N)") from None

    def save(self, state: State) -> None:
        write(self.dir + "/state.new", json.dumps(state, indent=1))
        os.rename(self.dir + "/state.new", self.dir + "/state.json")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        os.makedirs(ROOT, exist_ok=True)
        descriptor = os.open(ROOT, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def change(self) -> Iterator[State]:
        """The state under the lock; saved at the end."""
        with self.lock():
            state = self.state
            yield state
            self.save(state)

    def marker(self, what: str) -> str:
        """argv[0] of a process of ours, by which it is known."""
        return f"testhosts:{self.name}:{what}"

    def pid(self, what: str, state: State | None = None) -> int | None:
        """PID 1 of a host or of "fabric", as seen from here; None when it is dead."""
        state = state or self.state
        if what != "fabric" and what not in state["hosts"]:
            raise TestHostsError(f"no host {what!r}; there are: {' '.join(state['hosts'])}")
        pid = state["fabric"] if what == "fabric" else state["hosts"][what]["pid"]
        return pid if pid and argv0(pid) == self.marker(what) else None

    def need(self, what: str, state: State | None = None) -> int:
        pid = self.pid(what, state)
        if not pid:
            raise TestHostsError(f"{what} is down")
        return pid

    def in_fabric(self, *argv: str, **options: Any) -> str:
        return run_in_network(self.need("fabric"), *argv, **options)

    def processes(self, host: str) -> list[int]:
        """The processes of a host but its PID 1, as seen from here."""
        init = self.pid(host)
        if not init:
            return []
        namespace = os.readlink(f"/proc/{init}/ns/pid")

        def inside(pid: int) -> bool:
            with contextlib.suppress(OSError):
                return os.readlink(f"/proc/{pid}/ns/pid") == namespace
            return False

        return [pid for pid in all_pids() if pid != init and inside(pid)]

    def freezer(self, host: str) -> tuple[str, str, str, str]:
        """Directory, file, on, off: cgroup 2 if there is one (it needs no controller), else version 1's freezer."""
        for base, probe, *how in (
            ("/sys/fs/cgroup", "cgroup.controllers", "cgroup.freeze", "1", "0"),
            ("/sys/fs/cgroup/unified", "cgroup.controllers", "cgroup.freeze", "1", "0"),
            ("/sys/fs/cgroup/freezer", "cgroup.procs", "freezer.state", "FROZEN", "THAWED"),
        ):
            if os.path.exists(f"{base}/{probe}"):
                return f"{base}/testhosts.{self.name}.{host}", how[0], how[1], how[2]
        raise TestHostsError("no cgroup with a freezer")

    def is_own(self, pid: int) -> bool:
        """Whether this process of a host is one that every host has: the sshd that listens."""
        return self.command_line(pid).startswith("sshd: /usr/sbin/sshd")

    @staticmethod
    def command_line(pid: int) -> str:
        return process_file(pid, "cmdline").replace("\0", " ").strip()

    def command_lines(self, host: str) -> list[str]:
        """What runs in a host, PID 1 left out."""
        return [self.command_line(pid) for pid in self.processes(host)]
