"""What a worker under test does to its own job, at a fault point: to its node, to other processes of it, to other nodes.

Each harm is a fault point ("POINT,RANK,STEP" in PHOENIX_FAULTS, see phoenix_runtime/fault_points.py) that a script
asks for between two steps. Who is where is read from the job's journal.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import psutil

from phoenix_runtime.communicators.group import PhoenixGroup
from phoenix_runtime.fault_points import FAULT_POINTS

LATER: Final = 0.1  # seconds after which "soon" happens: in the middle of what another fault at this step has caused
GONE: Final = 5.0  # seconds in which a killed process is gone
SPARE_NODE: Final = 2  # the index of the first spare node of a job with two nodes
_pause: Final = threading.Event()


class Counted:
    """Collectives of a step are fault points, too: "collective N", counted from 1."""

    def __init__(self) -> None:
        self.made = 0
        original = PhoenixGroup._carry

        def carry(group: PhoenixGroup, operation: str, outputs: Any, *arguments: Any) -> Any:
            if group.scripts:
                self.made += 1
                FAULT_POINTS.reached(f"collective {self.made}")
            return original(group, operation, outputs, *arguments)

        PhoenixGroup._carry = carry  # type: ignore[method-assign]


def do_harm() -> None:
    """Whatever is armed for this place."""
    for point, harm in HARMS.items():
        if FAULT_POINTS.happens(point):
            harm()


def lose_node(agent: psutil.Process | None = None) -> None:
    """As a power loss would: this worker's agent (or that one) and guardian, and all that they have started."""
    processes = _stopped(agent or _agent())
    mine = psutil.Process().parents()  # last: whose parent dies is killed, this process, too
    _signal(sorted(processes, key=lambda process: process in mine), signal.SIGKILL)
    if any(process.pid == os.getpid() for process in processes):
        os.kill(os.getpid(), signal.SIGKILL)


def _stopped(agent: psutil.Process) -> list[psutil.Process]:
    """All of a node stands still, but for this process: also orphans, which are the guardian's, and what was just forked."""
    guardian = agent.parent()
    assert guardian is not None and "guardian" in " ".join(guardian.cmdline())
    stopped: list[psutil.Process] = []
    while new := [process for process in (guardian, *guardian.children(recursive=True)) if process not in stopped]:
        _signal(new, signal.SIGSTOP)
        stopped += new
    return stopped


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid != os.getpid():
                process.send_signal(number)


def _agent() -> psutil.Process:
    agent = psutil.Process().parent()
    assert agent is not None
    return agent


def _events(kind: str) -> list[dict[str, Any]]:
    (journal,) = Path(os.environ["PHOENIX_HOME"]).glob("jobs/*/events.jsonl")
    lines = [line for line in journal.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def _parked(node: str) -> list[psutil.Process]:
    """Those of the node's processes that wait, and have not become workers."""
    taken = {event["pid"] for event in _events("worker_started")}
    pids = [event["pid"] for event in _events("spare_parked") if event["node"] == node]
    return [psutil.Process(pid) for pid in pids if pid not in taken and psutil.pid_exists(pid)]


def _kill(processes: list[psutil.Process]) -> None:
    """And see that they are gone (or zombies, which their parent has to collect)."""
    assert processes, "nobody to kill"
    for process in processes:
        process.kill()
    for _ in range(round(GONE / 0.01)):
        if not any(_lives(process) for process in processes):
            return
        _pause.wait(0.01)
    raise TimeoutError(f"{processes} live on")


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill_children(word: str) -> None:
    """Those of the agent that have this in their command line; of forked ones the oldest only."""
    found = [child for child in _agent().children() if word in " ".join(child.cmdline())]
    _kill([min(found, key=psutil.Process.create_time)])


def _lose_agent() -> None:
    """And no step more: the guardian ends what is below it."""
    _agent().kill()
    _pause.wait(GONE)


def _die_soon() -> None:
    threading.Timer(LATER, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()


def _stop_node() -> None:
    """All of this node stands still until `_wake` is called elsewhere: a machine that sleeps, or swaps."""
    processes = _stopped(_agent())
    _asleep().write_text(" ".join(str(process.pid) for process in processes))
    os.kill(os.getpid(), signal.SIGSTOP)


def _wake_node() -> None:
    for pid in map(int, _asleep().read_text().split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _asleep() -> Path:
    return Path(os.environ["PHOENIX_HOME"]) / "stopped"


def _lose_both_nodes() -> None:
    others = [event["pid"] for event in _events("worker_started") if event["node"] != os.environ["PHOENIX_NODE"]]
    lose_node(psutil.Process(others[-1]).parent())
    lose_node()


HARMS: Final[dict[str, Callable[[], None]]] = {
    "node": lose_node,
    "both nodes": _lose_both_nodes,
    "spare node": lambda: lose_node(_parked(f"node{SPARE_NODE}")[0].parent()),
    "spare": lambda: _kill(_parked(os.environ["PHOENIX_NODE"])[:1]),
    "spare elsewhere": lambda: _kill(_parked(f"node{SPARE_NODE}")[:1]),
    "agent": _lose_agent,
    "checkpoint server": lambda: _kill_children("checkpoint.server"),
    "fork server": lambda: _kill_children("phoenix_runtime.fork_server"),
    "soon": _die_soon,
    "node sleeps": _stop_node,
    "node wakes": _wake_node,
}
