"""Where the logs verb gets its lines from: folders of this machine, and readers on other hosts behind ssh."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Protocol

from phoenix_launch.records.folders import JobNode
from phoenix_launch.records.log_reader import Follower, LogName, parse_name, read_once
from phoenix_launch.timeouts import timeout

Lines = Iterator[tuple[LogName, bytes]]
_READ_BYTES: Final = 1 << 16
_READER: Final = ("-P", "-m", "phoenix_launch.records.log_reader")


class Source(Protocol):
    """The logs of one node: either `once`, or `poll` until the job has ended and `finish`; then `close`."""

    node: JobNode

    def once(self) -> Lines: ...

    def poll(self) -> Lines: ...

    def finish(self) -> Lines: ...

    def close(self) -> bool:
        """Whether everything could be read."""
        ...


class LocalLogs:
    def __init__(self, node: JobNode, rank: str) -> None:
        self.node = node
        self._folder = Path(node.log_folder)
        self._rank = rank
        self._follower = Follower(self._folder, rank)

    def once(self) -> Lines:
        return read_once(self._folder, self._rank)

    def poll(self) -> Lines:
        return self._follower.poll()

    def finish(self) -> Lines:
        return self._follower.finish()

    def close(self) -> bool:
        return True


class RemoteLogs:
    """A reader on the node's host, which ends when its stdin closes, and so also when ssh dies."""

    def __init__(self, node: JobNode, rank: str, ssh: str, *, follow: bool) -> None:
        self.node = node
        from phoenix_launch.hosts.remote import ssh_command  # needed for other hosts only

        reader = [*_READER, node.log_folder, rank, "follow" if follow else "once"]
        remote = f"exec {shlex.join([node.python, *reader])}"
        argv = ssh_command(node.host, remote, ssh, "", timeout("ssh_connect"))
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._rest = b""

    def once(self) -> Lines:
        return _named(self._stdout)

    def poll(self) -> Lines:
        while self._readable(0.0):
            data = os.read(self._stdout.fileno(), _READ_BYTES)
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from _named(line + b"\n" for line in lines)

    def finish(self) -> Lines:
        self._close_stdin()
        deadline = time.monotonic() + timeout("command")
        while self._process.poll() is None and self._readable(deadline - time.monotonic()):
            yield from self.poll()
        yield from self.poll()

    def close(self) -> bool:
        self._close_stdin()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout("reap"))
        self._process.kill()
        self._stdout.close()
        return self._process.wait() == 0

    def _readable(self, seconds: float) -> bool:
        return bool(select.select([self._stdout], [], [], max(0.0, seconds))[0])

    def _close_stdin(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()


def _named(lines: Iterable[bytes]) -> Lines:
    for line in lines:
        text, _, content = line.partition(b" ")
        if name := parse_name(text.decode(errors="replace")):
            yield name, content
