"""The guardian of a node: parent of its agent, and the reason why nothing below the agent outlives it, however it dies.

Started as `python -m phoenix_launch.node.guardian` with one line of JSON (an AgentBootstrap) on stdin; what it and the agent
print are diagnostics for the supervisor. It imports as little as possible, forks the agent, and waits.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Final

from phoenix_launch.node.diagnostics import say
from phoenix_launch.node.runtime_folder import make_runtime_folder
from phoenix_launch.processes import POLITE_SIGNALS, become_subreaper, described, kill_descendants
from phoenix_launch.timeouts import timeout

MAX_BOOTSTRAP_BYTES: Final = 64 << 20


def read_bootstrap(descriptor: int) -> bytes:
    """The first line; shorter when the stream ends before it does."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < MAX_BOOTSTRAP_BYTES:
        part = os.read(descriptor, 1 << 16)
        if not part:
            break
        line += part
    return bytes(line)


def reap_seconds(line: bytes) -> float:
    try:
        return float(json.loads(line)["timeouts"]["reap"])
    except (ValueError, KeyError, TypeError):
        return timeout("reap")


def watch(agent: int, folder: Path, seconds: float) -> int:
    """Until the agent has ended, then until nothing below this process lives. Returns the exit code."""
    status = -1
    while True:
        pid, ended = os.waitpid(-1, 0)
        if pid == agent:
            status = os.waitstatus_to_exitcode(ended)
            break
    stuck = kill_descendants(seconds)
    if stuck:
        say(f"phoenix guardian: these do not die: {described(stuck)}")
    shutil.rmtree(folder, ignore_errors=True)
    return 0 if status == 0 and not stuck else 1


def become_agent(line: bytes, guardian: int, folder: Path) -> int:
    from phoenix_launch.node.agent import run

    return run(line, guardian, folder)


def main() -> int:
    try:
        os.setsid()
    except PermissionError:
        pass  # already the leader of a session of its own
    for number in POLITE_SIGNALS:  # the supervisor ends us through the bus, a terminal or sshd does not
        signal.signal(number, signal.SIG_IGN)
    become_subreaper()
    line = read_bootstrap(0)
    if not line.endswith(b"\n"):
        say("phoenix guardian: the channel closed before a bootstrap line had arrived")
        return 1
    folder = make_runtime_folder(os.environ)
    me = os.getpid()
    agent = os.fork()
    if agent == 0:
        code = 1
        try:
            code = become_agent(line, me, folder)
        except BaseException as error:
            import traceback

            traceback.print_exc()
            say(f"phoenix agent: {error!r}")
        finally:
            os._exit(code)
    return watch(agent, folder, reap_seconds(line))


if __name__ == "__main__":
    sys.exit(main())
