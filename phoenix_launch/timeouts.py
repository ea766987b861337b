"""The one table of all timeouts: name, default, meaning, and the order between them that must hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from phoenix_launch.errors import UsageError


class Timeout(NamedTuple):
    """One row. `option` is the flag that sets it, empty when it is fixed."""

    name: str
    seconds: float
    meaning: str
    option: str = ""


class Order(NamedTuple):
    """`shorter` times `factor` must be at most `longer`, because of `why`."""

    shorter: str
    factor: float
    longer: str
    why: str


_ROWS: Final = (
    Timeout("heartbeat_interval", 0.5, "an agent says that it lives, this often"),
    Timeout("heartbeat", 3.0, "a node that was silent for this long is lost", "--heartbeat-timeout"),
    Timeout("probe", 1.0, "answer to the one probe of a node whose ssh channel closed"),
    Timeout("connect", 10.0, "an agent reaches the supervisor's bus"),
    Timeout("ssh_connect", 10.0, "ssh connects to a host"),
    Timeout("preflight", 30.0, "all hosts have said what they are"),
    Timeout("fork_server", 120.0, "torch and the script's imports are loaded"),
    Timeout("park", 10.0, "a forked process is ready to become a worker"),
    Timeout("store", 10.0, "a parked process has become a TCPStore"),
    Timeout(
        "abort",
        5.0,
        "a worker is out of the collectives of a step that is going to be repeated; past that it is replaced",
    ),
    Timeout(
        "leave_step", 60.0, "a worker comes to the end of a step that is going to be repeated; past that it is replaced"
    ),
    Timeout(
        "notice", 15.0, "a worker whose collective failed hears which process caused it; past that it is its own error"
    ),
    Timeout(
        "left_behind",
        10.0,
        "a worker is in a step that another one, whose script is over, will never begin; then the job ends",
    ),
    Timeout(
        "hang",
        30.0,
        "no rank moves (no step, no collective, no report), nor for ten of its usual steps: one hangs",
        "--hang-timeout",
    ),
    Timeout("first_step", 600.0, "the same before two steps are done: programs are loaded and compiled there"),
    Timeout("stacks", 2.0, "a worker that hangs has written where its threads are"),
    Timeout("rebuild", 60.0, "communicators of a new generation are connected"),
    Timeout("copies_ready", 60.0, "all nodes of a job that can be repaired have started their checkpoint servers"),
    Timeout(
        "slot_handshake", 5.0, "checkpoint servers of two nodes have proved to each other that they know the job's key"
    ),
    Timeout("slot_piece", 10.0, "a checkpoint server takes, gives or answers for the next piece of a copy"),
    Timeout("partner", 5.0, "a node that is asked to keep a replica takes it, before another one is asked"),
    Timeout("slot_request", 30.0, "a node's checkpoint server answers a worker that wants to write or read a slot"),
    Timeout("last_checkpoint", 120.0, "a script that is over waits for a checkpoint on disk that is being written"),
    Timeout("drain", 120.0, "a node that `phoenix-run drain` is about has left"),
    Timeout("halt", 15.0, "workers of a node whose supervisor is gone for good come to a version that is complete"),
    Timeout("emergency_save", 60.0, "a node that has to stop writes its copies in memory to disk"),
    Timeout("shutdown", 30.0, "a worker ends after its signal; then SIGKILL to its whole tree", "--shutdown-timeout"),
    Timeout("drain_output", 2.0, "a dead worker's last lines are read (a child of it may hold the pipe open)"),
    Timeout("reap", 5.0, "a process is gone after SIGKILL"),
    Timeout(
        "orphan",
        600.0,
        "an agent without a supervisor ends its node; until then training goes on and `resume` can take over",
        "--orphan-timeout",
    ),
    Timeout("takeover", 10.0, "the nodes of a job answer a supervisor that takes over"),
    Timeout("spare", 60.0, "waiting for a host to replace a lost one when no spare is left", "--spare-timeout"),
    Timeout("join", 600.0, "the hosts of a job that is started on each of them have joined", "--join-timeout"),
    Timeout("command", 5.0, "the supervisor answers a command such as `status`"),
    Timeout("resend", 1.0, "a plan that was not carried out is sent again"),
    Timeout("exit_output", 5.0, "the last output reaches the terminal after the last worker ended"),
    Timeout("reader", 600.0, "a job that is over waits for a reader of its output who stands still (a pager)"),
)
TIMEOUTS: Final[Mapping[str, Timeout]] = {row.name: row for row in _ROWS}

ORDERS: Final = (
    Order("heartbeat_interval", 2.0, "heartbeat", "one late heartbeat must not end a node"),
    Order("probe", 1.0, "heartbeat", "a probe must be answered before silence alone decides"),
    Order("heartbeat", 1.0, "orphan", "a node must be given up by its supervisor before it gives up its supervisor"),
    Order("resend", 2.0, "orphan", "a lost acknowledgement must not make an orphan"),
    Order("ssh_connect", 1.0, "preflight", "a host that ssh still tries must be waited for"),
    Order("connect", 1.0, "preflight", "an agent that still connects must be waited for"),
    Order("heartbeat", 1.0, "hang", "a node that is gone must be known before its silence is taken for a hang"),
    Order("abort", 1.0, "leave_step", "who still waits in a collective cannot come to the end of its step"),
    Order("slot_piece", 2.0, "slot_request", "a worker must wait while its server waits for another one"),
    Order("drain_output", 1.0, "exit_output", "lines that are still read must find the terminal open"),
    Order("exit_output", 1.0, "reader", "output must have the time to arrive before its reader is blamed"),
)


def timeout(name: str) -> float:
    """The default of a row, in seconds."""
    return TIMEOUTS[name].seconds


def check_timeouts(values: Mapping[str, float] | None = None) -> None:
    """Raises UsageError when the table, with `values` in place of some defaults, breaks one of `ORDERS`."""
    given = values or {}
    seconds = {name: given.get(name, row.seconds) for name, row in TIMEOUTS.items()}
    for order in ORDERS:
        low, high = seconds[order.shorter] * order.factor, seconds[order.longer]
        if low > high:
            longer, shorter = TIMEOUTS[order.longer], TIMEOUTS[order.shorter]
            raise UsageError(
                f"{_called(longer)} of {high:g} s is too short for {_called(shorter)} of {seconds[order.shorter]:g} s: "
                f"{order.why}",
                hint=f"give at least {low:g} s",
            )


def _called(row: Timeout) -> str:
    return row.option or f"the {row.name.replace('_', ' ')} timeout"


check_timeouts()
