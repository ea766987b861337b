"""What one job was asked to do, with every default: the settings of `phoenix-run`, and the door to the timeouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from phoenix_launch.errors import UsageError
from phoenix_launch.timeouts import ORDERS, TIMEOUTS, Timeout, check_timeouts, timeout

__all__ = ["ORDERS", "TIMEOUTS", "RunSettings", "Timeout", "check_timeouts", "timeout"]

DEFAULT_RDZV_PORT: Final = 29400  # torchrun's, for a --rdzv-endpoint without a port
AUTO: Final = -1  # of snapshot_interval: as often as copies hide behind the steps
DEFAULT_MASTER_PORT: Final = 29500  # torchrun's, for --master-addr without --master-port


@dataclass(kw_only=True, slots=True, frozen=True)
class RunSettings:
    """All options of the run verb as resolved. What each means stands in the table of options (`options.py`)."""

    script: str
    script_args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    start_method: str = "fork"  # or "spawn"
    preload: str = "auto"
    env: tuple[str, ...] = ()  # NAME or NAME=VALUE
    virtual_local_rank: bool = False
    numa_binding: str = ""
    role: str = "default"

    nodes: str = ""  # a count, or host names with ranges
    spares: str = "0"  # the same
    hostfile: str = ""
    nproc_per_node: str = "1"  # a count, or auto, cpu, gpu, xpu
    local_spares: int = 0
    interface: str = ""
    port_range: tuple[int, int] = (0, 0)
    ssh: str = "ssh"

    nnodes: tuple[int, int] = (1, 1)
    node_rank: int = -1  # -1: not given
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_id: str = "none"
    rdzv_conf: dict[str, str] = field(default_factory=dict)
    standalone: bool = False
    master_addr: str = ""  # without the brackets of an IPv6 address
    master_port: int | None = None
    local_addr: str = ""

    checkpoint_dir: str = ""
    checkpoint_interval: int = 0  # completed steps, 0: none are written
    resume: bool = False
    keep: int = 2

    max_restarts: int = 0
    max_failures_per_host: int = 3
    monitor_interval: float = 0.1
    shutdown_timeout: float = timeout("shutdown")
    heartbeat_timeout: float = timeout("heartbeat")
    hang_timeout: float = timeout("hang")
    spare_timeout: float = timeout("spare")
    orphan_timeout: float = timeout("orphan")
    join_timeout: float = timeout("join")
    signals_to_handle: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    rehearse: int = 0
    replicas: int = 1
    replica_distance: int = 1
    snapshot_interval: int = 1  # 0: no copies; AUTO
    replica_bandwidth: int = 0  # bytes a second, 0: no limit
    encrypt: bool = False
    copy_memory: int = 0  # bytes, 0: what is free
    replace_stragglers: bool = False
    verify_replicas: int = 0  # steps, 0: never
    allow_drills: bool = False
    drills: tuple[str, ...] = ()

    log_dir: str = ""
    redirects: dict[int, int] = field(default_factory=dict)  # local rank -> StreamChoice; -1: all other ranks
    tee: dict[int, int] = field(default_factory=dict)
    local_ranks_filter: tuple[int, ...] | None = None
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    prefix: str = "auto"  # or "always", "never"
    event_log_handler: str = "null"
    logs_specs: str = ""
    detach: bool = False
    exit_code: str = "phoenix"  # or "worker"
    job_name: str = ""

    given: frozenset[str] = frozenset()  # the fields that a flag or the environment set
    remarks: tuple[str, ...] = ()  # lines to say once at the start: options that are accepted and do nothing here

    @property
    def joins(self) -> bool:
        """Whether the same command is started on each of several hosts, and they find each other by an endpoint."""
        return self.nnodes[1] > 1 and not self.nodes and not self.hostfile

    @property
    def join_endpoint(self) -> tuple[str, int]:
        """Where the hosts of such a job meet; raises UsageError when nothing was said about it."""
        if self.rdzv_endpoint:
            return parse_endpoint(self.rdzv_endpoint, DEFAULT_RDZV_PORT)
        if self.master_addr:
            return self.master_addr, self.master_port or DEFAULT_MASTER_PORT
        raise UsageError(
            f"--nnodes {self.nnodes[1]} needs to know where the hosts meet",
            hint="give --rdzv-endpoint HOST:PORT (or --master-addr and --master-port) on every host, "
            "or start all from here with --nodes host1,host2",
        )

    def timeouts(self) -> dict[str, float]:
        """The table of timeouts with this job's own values in it."""
        return {name: row.seconds for name, row in TIMEOUTS.items()} | {
            "shutdown": self.shutdown_timeout,
            "heartbeat": self.heartbeat_timeout,
            "hang": self.hang_timeout,
            "spare": self.spare_timeout,
            "orphan": self.orphan_timeout,
            "join": self.join_timeout,
        }


def without_brackets(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def parse_endpoint(endpoint: str, default_port: int) -> tuple[str, int]:
    """(host, port) of `host[:port]`, an IPv6 address in brackets; raises ValueError, as torch's own reading does."""
    if endpoint.startswith("[") and endpoint.endswith("]"):
        return without_brackets(endpoint), default_port
    host, colon, port = endpoint.rpartition(":")
    if not colon:
        return endpoint, default_port
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError("the port must be a number from 0 to 65535")
    if not host:
        raise ValueError("there is no host before the port")
    return without_brackets(host), int(port)
