"""`--detach`: the supervisor goes on in a session of its own, and the command returns when the job has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from phoenix_launch.errors import PhoenixError

_STARTED = b"started"
_OUT, _ERR = "supervisor.out", "supervisor.err"


def detached(run: Callable[[Callable[[], None]], int], job: str, logs: Path) -> int:
    """Run `run(started)` in a process of its own; returns 0 once it called `started`, else its exit code.

    Must be called before any thread or socket exists. What the supervisor would say on the terminal goes to
    supervisor.out and supervisor.err in the job's logs. stdout gets the job's id and nothing else.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    if os.fork() == 0:
        os._exit(_supervise(run, logs, read, write))
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read()  # until it has started or ended
    if said.startswith(_STARTED):
        print(job)
        print(
            f"phoenix-run: it goes on in the background, and says what it has to say in {logs / _ERR}", file=sys.stderr
        )
        return 0
    code, _, text = said.decode(errors="replace").partition("\n")
    if text:
        print(text, file=sys.stderr)
    return int(code) if code.isdecimal() else 1


def _supervise(run: Callable[[Callable[[], None]], int], logs: Path, read: int, write: int) -> int:
    os.close(read)
    os.setsid()
    if os.fork():
        return 0  # the session has no leader left that could get a terminal
    for descriptor, name in ((1, _OUT), (2, _ERR)):
        file = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    open_pipes = [write]

    def tell(text: bytes) -> None:
        if open_pipes:
            os.write(open_pipes[0], text)
            os.close(open_pipes.pop())

    code, text = 1, ""
    try:
        code = run(lambda: tell(_STARTED))
    except PhoenixError as error:
        code, text = error.exit_code, error.show()
        print(text, file=sys.stderr, flush=True)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    tell(f"{code}\n{text}".encode())
    return code
