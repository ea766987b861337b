"""Starts the guardian of each node, as a child here or behind the system's ssh, and hears how it fares.

Threads: `bootstrap NODE`, only for a bootstrap line larger than the pipe: writes the rest of that line and ends. The
process's death ends it at the latest, so a host that never reads keeps nobody waiting.
"""

from __future__ import annotations

import collections
import ctypes
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import Final

import msgspec

from phoenix_launch.bootstrap import AgentBootstrap
from phoenix_launch.errors import StartError, UsageError
from phoenix_launch.hosts.environment import SECRETS
from phoenix_launch.hosts.ssh_failures import Reason, explain

WATCHING: Final = "watching"  # the first line of a channel that was opened again
_REMEMBERED_LINES: Final = 40
_MAX_LINE_BYTES: Final = 4096
_REAP_SECONDS: Final = 5.0
_ALIVE_INTERVAL: Final = 5  # seconds; heartbeats on the bus notice a silent host earlier, this ends the ssh client
_ALIVE_COUNT: Final = 3
_MAX_SOCKET_PATH: Final = 107 - 18  # ssh binds a name with a random ending first
_WATCH_INTERVAL: Final = 0.2  # seconds by which the end of a guardian is seen late
_PR_SET_PDEATHSIG: Final = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class NodeHandle:
    """The process through which a node was started: the guardian itself, or the ssh client that leads to it."""

    def __init__(self, process: subprocess.Popen[bytes], *, name: str, host: str, python: str) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.name = name
        self.host = host
        self.python = python
        self.ended_by_us = False
        self.at_end = False  # nothing can be read any more
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._partial = b""
        self._last: collections.deque[str] = collections.deque(maxlen=_REMEMBERED_LINES)
        self._writer: threading.Thread | None = None
        os.set_blocking(self._stdout.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._last)

    def fileno(self) -> int:
        """The pipe with what the process says, for a poller; unregister it when `at_end` is true."""
        return self._stdout.fileno()

    def read_lines(self) -> list[str]:
        """The lines that have come meanwhile; never blocks. What is left at the end counts as a line."""
        lines: list[str] = []
        while not self.at_end and len(lines) < 1000:
            try:
                data = os.read(self._stdout.fileno(), 65536)
            except BlockingIOError:
                break
            self.at_end = not data
            *whole, self._partial = (self._partial + data).split(b"\n")
            if self._partial and (self.at_end or len(self._partial) > _MAX_LINE_BYTES):
                whole.append(self._partial)
                self._partial = b""
            lines.extend(line[:_MAX_LINE_BYTES].decode(errors="replace").rstrip("\r") for line in whole)
        self._last.extend(lines)
        return lines

    def poll(self) -> int | None:
        """The exit code (negative for a signal), None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """End it at once. A guardian that was started here takes its whole node with it; one behind ssh lives on."""
        self.ended_by_us = self.ended_by_us or self.poll() is None
        self._process.kill()

    def close(self) -> None:
        """End it if it still runs, and let go of everything."""
        if self.poll() is None:
            self.terminate()
        try:
            self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # stuck in the kernel: nothing more can be done from here
        if self._writer is not None:
            self._writer.join(_REAP_SECONDS)
        if self._writer is None or not self._writer.is_alive():  # else its descriptor must not be used by another file
            try:
                self._stdin.close()
            except BrokenPipeError:
                pass
        self._stdout.close()
        self.at_end = True

    def give(self, line: bytes) -> None:
        """Write a line to its stdin, which stays open. Never blocks: what the pipe does not take a thread writes."""
        descriptor = self._stdin.fileno()
        os.set_blocking(descriptor, False)
        try:
            written = os.write(descriptor, line)
        except BlockingIOError:
            written = 0
        except BrokenPipeError:
            return  # it has ended: poll() tells
        finally:
            os.set_blocking(descriptor, True)
        if written < len(line):
            rest = memoryview(line)[written:]
            self._writer = threading.Thread(
                target=_write_all, args=(descriptor, rest), name=f"bootstrap {self.name}", daemon=True
            )
            self._writer.start()


def _write_all(descriptor: int, data: memoryview) -> None:
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        pass  # the reader has ended: poll() tells


def reason(handle: NodeHandle, lines: Sequence[str] = ()) -> Reason:
    """Why this node's agent never said a word. `lines`: its last ones, if not those that the handle remembers."""
    handle.read_lines()
    code = None if handle.ended_by_us else handle.poll()
    return explain(code, lines or handle.last_lines, host=handle.host, python=handle.python)


# --- starting --------------------------------------------------------------------------------------------------------


def start_local(bootstrap: AgentBootstrap, python: str, *, dies_with_us: bool = False) -> NodeHandle:
    """A node on this machine. A simulated one outlives us: an agent without a supervisor ends by its own rules.

    `dies_with_us`: for a host that joined, whose agent would go on with a supervisor elsewhere; main thread only.
    """
    argv = [python, *_GUARDIAN]
    handle = NodeHandle(_popen(argv, dies_with_us=dies_with_us), name=bootstrap.node, host="", python=python)
    handle.give(_line(bootstrap))
    return handle


def start_ssh(
    bootstrap: AgentBootstrap, host: str, ssh: str, python: str, control_folder: str, connect_timeout: float
) -> NodeHandle:
    """A node on another host. Must be called by the main thread: the ssh client dies with the thread that starts it.

    Args:
        bootstrap: goes over stdin; nothing of it is ever on a command line.
        host: destination as ssh takes it.
        ssh: --ssh, the client with options of its own.
        python: path of the interpreter there.
        control_folder: for ControlMaster sockets; short, 0700, ours.
        connect_timeout: seconds for TCP and sshd's banner.
    """
    remote = f"exec {shlex.quote(python)} {' '.join(_GUARDIAN)}"
    argv = ssh_command(host, remote, ssh, os.path.join(control_folder, str(bootstrap.index)), connect_timeout)
    handle = NodeHandle(_popen(argv, dies_with_us=True), name=bootstrap.node, host=host, python=python)
    handle.give(_line(bootstrap))
    return handle


def start_watch(
    name: str, index: int, host: str, guardian_pid: int, ssh: str, control_folder: str, connect_timeout: float
) -> NodeHandle:
    """After a node's ssh channel closed while its agent lives: a new channel, which ends when that guardian does."""
    remote = f"echo {WATCHING}; exec tail --pid={guardian_pid:d} -s {_WATCH_INTERVAL} -f /dev/null"
    argv = ssh_command(host, remote, ssh, os.path.join(control_folder, str(index)), connect_timeout)
    return NodeHandle(_popen(argv, dies_with_us=True), name=name, host=host, python="")


# -P: the folder we are started in (a home folder, over ssh) must not shadow the standard library
_GUARDIAN: Final = ("-P", "-m", "phoenix_launch.node.guardian")


def ssh_command(host: str, remote: str, ssh: str, control_path: str, connect_timeout: float) -> list[str]:
    """The ssh client's argv; no `control_path`: its own connection. The user's configuration holds for the rest."""
    try:
        client = shlex.split(ssh)
    except ValueError as error:
        raise UsageError(f"--ssh {ssh!r}: {error}", hint="write it as for a shell: --ssh 'ssh -F FILE'") from None
    if not client:
        raise UsageError("--ssh is empty", hint="leave it out, or write --ssh 'ssh -F FILE'")
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(max(1, round(connect_timeout))),
        "ServerAliveInterval": str(_ALIVE_INTERVAL),
        "ServerAliveCountMax": str(_ALIVE_COUNT),
        "ControlMaster": "no",
        "ControlPath": "none",
        "ControlPersist": "no",
        "ClearAllForwardings": "yes",
        "RemoteCommand": "none",
    }
    if control_path and len(os.fsencode(control_path)) <= _MAX_SOCKET_PATH:
        options["ControlMaster"] = "auto"
        options["ControlPath"] = '"' + control_path.replace("%", "%%") + '"'
    settings = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    return [*client, "-T", *settings, "--", host, remote]


def _line(bootstrap: AgentBootstrap) -> bytes:
    return msgspec.json.encode(bootstrap) + b"\n"


def _popen(argv: Sequence[str], *, dies_with_us: bool) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def die_with_parent() -> None:  # between fork and exec: no lock, no import, nothing that another thread may hold
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    if dies_with_us and threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a process dies with the thread that starts it: only the main thread may")
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name not in SECRETS},
            start_new_session=True,
            preexec_fn=die_with_parent if dies_with_us else None,
            bufsize=0,
        )
    except FileNotFoundError:
        hint = "install an ssh client, or name it with --ssh" if dies_with_us else ""
        raise StartError(f"there is no {argv[0]}", hint=hint) from None
    except PermissionError:
        raise StartError(f"{argv[0]} cannot be executed") from None
