"""What the launcher knows about a job, as it travels to the nodes: the command, where output goes, an agent's bootstrap."""

from __future__ import annotations

import enum

import msgspec


class RunMode(enum.Enum):
    SCRIPT = "script"  # python SCRIPT ARGS
    MODULE = "module"  # python -m MODULE ARGS
    RUN_PATH = "run-path"  # runpy.run_path in a fresh interpreter
    EXEC = "exec"  # --no-python: the command itself


class StartMethod(enum.Enum):
    FORK = "fork"
    SPAWN = "spawn"


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every worker runs. `preload` is "auto", "none" or a comma-separated list of modules."""

    mode: RunMode
    target: str
    args: tuple[str, ...]
    python: str
    start_method: StartMethod = StartMethod.FORK
    preload: str = "auto"
    virtual_local_rank: bool = False
    numa_binding: str = ""  # --numa-binding, empty: none


class StreamChoice(enum.IntFlag):
    """torchrun's Std: which of a worker's streams an option speaks of."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class OutputSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the output of a node's workers goes. Maps are by local rank; the key -1 holds for all others."""

    folder: str  # logs/NODE of the job's folder (or of --log-dir)
    redirects: dict[int, int] = {}
    tees: dict[int, int] = {}
    console_local_ranks: tuple[int, ...] | None = None  # --local-ranks-filter
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    torchrun_folder: str = ""  # <log-dir>/<run id>_<random>_<node>, empty without --redirects, --tee and filters
    line_prefix_template: str = ""  # TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE
    role: str = "default"
    size_limit: int = 1 << 30  # bytes a log file may reach before it is rotated (one older file is kept)
    files: bool = True  # False: --log-dir /dev/null


class AgentTimeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of the table of timeouts that an agent needs, in seconds."""

    heartbeat_interval: float
    orphan: float
    connect: float
    fork_server: float
    drain_output: float
    reap: float
    heartbeat: float = 3.0
    first_step: float = 600.0


class AgentBootstrap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an agent gets on its stdin as one line of JSON: everything, keys included, never in argv, never by a shell."""

    job: str
    node: str
    index: int
    term: int
    incarnation: str
    control_endpoint: str
    output_endpoint: str
    server_key: str  # CURVE, Z85
    public_key: str
    secret_key: str
    environment: dict[str, str]  # the whole environment of the workers, before the per-rank part
    cwd: str
    command: Command
    output: OutputSettings
    timeouts: AgentTimeouts
    interface: str = ""  # --interface; empty: the address by which the supervisor is reached
    address: str = ""  # the address other hosts know this node by, empty: find out (ssh's, else towards the supervisor)
    port_low: int = 0  # --port-range, 0: any
    port_high: int = 0
    simulated: bool = False
    copy_memory: int = 0  # --copy-memory: bytes that a node's copies may take, 0: what is free
    replica_bandwidth: int = 0  # bytes a second, 0: no limit
    encrypt: bool = False  # what checkpoint servers send each other
    checkpoint_dir: str = ""  # --checkpoint-dir, empty: none
    keep: int = 2  # --keep
    slots_key: str = ""  # by which checkpoint servers of this job know each other, hexadecimal; empty: there are none
