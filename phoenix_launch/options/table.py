"""The one table of the run verb's options: names, environment, meaning; flags, help, completions are made from it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phoenix_launch.options import kinds as v
from phoenix_launch.options.kinds import Value
from phoenix_launch.settings import RunSettings


class Group(enum.Enum):
    """The headings of the help."""

    WHAT = "What runs"
    HOSTS = "Hosts"
    TORCHRUN = "torchrun compatibility"
    CHECKPOINTS = "Checkpoints on disk"
    FAILURES = "Failures"
    COPIES = "Copies in memory"
    OUTPUT = "Output"


class Origin(enum.Enum):
    """Whose option it is, which decides the variable that is asked when no flag is given."""

    TORCHRUN = "PET"
    OURS = "PHOENIX"
    TORCHRUN_FLAG_ONLY = ""


@dataclass(frozen=True, slots=True)
class Option:
    """One row. `attribute` is that of RunSettings where it is not the name itself."""

    name: str
    group: Group
    origin: Origin
    value: Value
    help: str
    short: str = ""
    attribute: str = ""
    also_environment: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def field(self) -> str:
        return self.attribute or self.name.replace("-", "_")

    @property
    def environment(self) -> tuple[str, ...]:
        """Variables, the first one that is set counts."""
        own = f"{self.origin.value}_{self.name.replace('-', '_').upper()}" if self.origin.value else ""
        return tuple(variable for variable in (own, self.also_environment) if variable)


_W, _H, _T = Group.WHAT, Group.HOSTS, Group.TORCHRUN
_F, _C, _D, _P = Group.FAILURES, Group.COPIES, Group.CHECKPOINTS, Group.OUTPUT
_PET, _OWN, _FLAG = Origin.TORCHRUN, Origin.OURS, Origin.TORCHRUN_FLAG_ONLY

OPTIONS: Final[tuple[Option, ...]] = (
    Option("nproc-per-node", _W, _PET, v.PROCESSES,
           "Workers on each node: a number, or as many as there are GPUs or CPUs (auto: GPUs, else CPUs)."),
    Option("module", _W, _PET, v.SWITCH, "SCRIPT is a module, run as by python -m.", short="-m"),
    Option("no-python", _W, _PET, v.SWITCH, "SCRIPT is any program, run as it is."),
    Option("run-path", _W, _PET, v.SWITCH, "Run SCRIPT by runpy.run_path in a fresh interpreter."),
    Option("start-method", _W, _PET, v.START_METHOD,
           "How workers start: forked from a process that has torch loaded, or afresh (forkserver is read as fork)."),
    Option("preload", _W, _OWN, v.PRELOAD,
           "Modules loaded before workers are forked: what SCRIPT and its modules import from site-packages, none, or a list."),
    Option("env", _W, _OWN, v.VARIABLE,
           "Give the workers this variable (NAME alone: with the value it has here); may be repeated."),
    Option("job-name", _W, _OWN, v.JOB_NAME, "Begin the job's id with this instead of the script's name."),
    Option("detach", _W, _OWN, v.SWITCH, "Go on in the background; SIGHUP is ignored."),

    Option("nodes", _H, _OWN, v.NODES,
           "N simulated nodes on this machine, or the hosts to start on by ssh, such as h1,gpu[03-16]."),
    Option("spares", _H, _OWN, v.SPARES,
           "Nodes kept ready to replace lost ones: a number (of a host list: its last ones), or more hosts."),
    Option("hostfile", _H, _OWN, v.FILE,
           "Read hosts from a file, one a line: host slots=8 rack=a python=/path; `spare` marks spare nodes."),
    Option("local-spares", _H, _OWN, v.COUNT, "More processes kept ready on each node."),
    Option("interface", _H, _OWN, v.NAME, "Network interface or address that the job's nodes talk over."),
    Option("port-range", _H, _OWN, v.PORT_RANGE, "Listen on these ports only."),
    Option("ssh", _H, _OWN, v.COMMAND, "The ssh command, with its options."),

    Option("nnodes", _T, _PET, v.NODE_RANGE, "The same command is run on N hosts, or on MIN to MAX of them."),
    Option("node-rank", _T, _PET, v.PLACE, "This host's place among --nnodes."),
    Option("rdzv-backend", _T, _PET, v.RENDEZVOUS, "Either way the hosts meet at --rdzv-endpoint."),
    Option("rdzv-endpoint", _T, _PET, v.ENDPOINT, "Where the hosts of --nnodes meet: an address of one of them."),
    Option("rdzv-id", _T, _PET, v.NAME, "What the workers get as TORCHELASTIC_RUN_ID."),
    Option("rdzv-conf", _T, _PET, v.RENDEZVOUS_CONFIGURATION,
           "timeout and join_timeout mean --join-timeout; torchrun's other keys are accepted."),
    Option("standalone", _T, _PET, v.SWITCH, "One host, whatever is said about meeting others."),
    Option("master-addr", _T, _PET, v.ADDRESS, "The same as --rdzv-endpoint, without the port."),
    Option("master-port", _T, _PET, v.PORT, "The port of the first generation's TCPStore."),
    Option("local-addr", _T, _PET, v.ADDRESS, "The address at which this host is reached."),
    Option("role", _T, _PET, v.NAME, "What the workers get as ROLE_NAME."),
    Option("virtual-local-rank", _T, _PET, v.SWITCH, "Each worker sees one device and LOCAL_RANK 0."),
    Option("numa-binding", _T, _FLAG, v.one_of("node", "socket", "exclusive", "core-complex"),
           "Bind each worker to the CPUs near its GPU."),
    Option("monitor-interval", _T, _PET, v.SECONDS, "Accepted; a worker's end is seen at once."),
    Option("event-log-handler", _T, _PET, v.one_of("null", "console", "dynamic_rendezvous"),
           "Accepted; events are in the job's journal."),
    Option("logs-specs", _T, _FLAG, v.NAME, "Accepted; logs are laid out as ever."),

    Option("checkpoint-dir", _D, _OWN, v.FOLDER,
           "Where checkpoints on disk are, or are to be: a folder that all hosts share."),
    Option("checkpoint-interval", _D, _OWN, v.COUNT,
           "Write a checkpoint each time so many steps are completed, while training goes on; 0: none."),
    Option("resume", _D, _OWN, v.SWITCH,
           "Begin with the newest whole checkpoint in --checkpoint-dir; where there is none, at step 0."),
    Option("keep", _D, _OWN, v.COUNT_FROM_1, "How many checkpoints are kept; older ones are removed."),

    Option("max-restarts", _F, _PET, v.COUNT,
           "How often all workers are restarted because one failed; a lost node does not count."),
    Option("max-failures-per-host", _F, _OWN, v.COUNT_FROM_1, "A host that failed this often is not used any more."),
    Option("signals-to-handle", _F, _PET, v.SIGNALS, "Signals that are passed on to the workers."),
    Option("shutdown-timeout", _F, _PET, v.SECONDS_FROM_0,
           "How long workers may take to end after a signal, before they are killed.",
           also_environment="TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    Option("heartbeat-timeout", _F, _OWN, v.SECONDS, "A node that was silent for this long is lost."),
    Option("hang-timeout", _F, _OWN, v.SECONDS, "When no rank moved for this long, nor for ten steps, one hangs."),
    Option("replace-stragglers", _F, _OWN, v.SWITCH,
           "Move the ranks of a node to a spare one when one of them is slow: it computes 1.5 times as long as its peers."),
    Option("spare-timeout", _F, _OWN, v.SECONDS_FROM_0, "How long to wait for a host when no spare is left."),
    Option("orphan-timeout", _F, _OWN, v.SECONDS, "Nodes end when their supervisor was gone for this long."),
    Option("join-timeout", _F, _OWN, v.SECONDS, "How long to wait for the hosts of --nnodes."),
    Option("exit-code", _F, _OWN, v.one_of("phoenix", "worker"),
           "End with our own codes, or with that of the worker that failed first."),
    Option("rehearse", _F, _OWN, v.COUNT,
           "Abort, repair and repeat the first N steps of run_step, and name what is not the same the second time."),
    Option("allow-drills", _F, _OWN, v.SWITCH, "Let `phoenix-run inject-fault` harm this job."),
    Option("drill", _F, _OWN, v.DRILL,
           'Harm the job by plan, such as "kill-node --node 1 --after 20" (seconds); may be repeated.',
           attribute="drills"),

    Option("snapshot-interval", _C, _OWN, v.INTERVAL,
           "Steps between two copies of the training state; auto: more while copies hold up training; 0: none."),
    Option("replicas", _C, _OWN, v.COUNT,
           "Copies in other failure domains of what only one of them holds; 0: a lost node's state is lost."),
    Option("replica-distance", _C, _OWN, v.COUNT_FROM_1, "The first of them is this many failure domains on."),
    Option("verify-replicas", _C, _OWN, v.COUNT,
           "Every N steps compare what several ranks hold; who has other bits than most is replaced; 0: never."),
    Option("replica-bandwidth", _C, _OWN, v.BANDWIDTH,
           "Send replicas at no more than this many bytes a second from each node, such as 2G (0: no limit)."),
    Option("encrypt", _C, _OWN, v.SWITCH, "Encipher what nodes send each other of the training state."),
    Option("copy-memory", _C, _OWN, v.SIZE, "At most this much memory of each node for copies (0: what is free)."),

    Option("log-dir", _P, _PET, v.LOG_FOLDER, "Where log files go instead of the job's folder; /dev/null: nowhere."),
    Option("redirects", _P, _PET, v.STREAMS,
           "Streams for files only: 0 none, 1 stdout, 2 stderr, 3 both; for all, or per local rank.", short="-r"),
    Option("tee", _P, _PET, v.STREAMS, "Streams that go to files and to the console.", short="-t"),
    Option("local-ranks-filter", _P, _PET, v.RANKS, "Show only these local ranks on the console."),
    Option("duplicate-stdout-filters", _P, _PET, v.PHRASES,
           "Copy those lines of --tee that contain one of these texts to a file (,, is a comma)."),
    Option("duplicate-stderr-filters", _P, _PET, v.PHRASES, "The same for stderr."),
    Option("prefix", _P, _OWN, v.one_of("auto", "always", "never"),
           "Put node:rank before each line on the console (auto: on a terminal with several workers)."),
)  # fmt: skip

BY_FIELD: Final[Mapping[str, Option]] = {option.field: option for option in OPTIONS}
_FIELDS: Final = {field.name: field for field in dataclasses.fields(RunSettings)}


def default(option: Option) -> object:
    field = _FIELDS[option.field]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
