"""For the tests of torchrun's contract: the same script under phoenix-run and under torchrun, and what it saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.jobs_under_test import SECONDS, Done, environment, run, script

AT_ONCE: Final = 2
_STUBS: Final = Path(__file__).parent / "stub_torch"
# For jobs whose scripts know nothing of torch: nothing has to be loaded for their store.
NO_TORCH: Final = {"PYTHONPATH": os.pathsep.join((str(_STUBS), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)}

# Writes what it sees to $WITNESS/RANK-ATTEMPT.json. Knows nothing of torch.
WITNESS: Final = """
import json, os, sys
owners, pid = [], os.getppid()
while pid > 1:
    with open(f"/proc/{pid}/cmdline") as file:
        command = file.read().split("\\0")
    with open(f"/proc/{pid}/environ", "rb") as file:
        owners.append([command, b"PHOENIX_JOB_KEY" in file.read()])
    if "torchrun" in command or "phoenix_launch" in command:
        break
    with open(f"/proc/{pid}/stat") as file:
        pid = int(file.read().rpartition(")")[2].split()[1])
seen = {
    "environment": dict(os.environ), "argv": sys.argv, "original": sys.orig_argv, "name": __name__, "path": sys.path[0],
    "file": __file__, "unbuffered": sys.stdout.write_through, "stdin": sys.stdin.read() if sys.stdin else None,
    "session": os.getsid(0) == os.getpid(), "folder": os.getcwd(), "owners": owners,
}
place = os.path.join(os.environ["WITNESS"], os.environ["RANK"] + "-" + os.environ["TORCHELASTIC_RESTART_COUNT"])
with open(place + ".new", "w") as file:
    json.dump(seen, file)
os.rename(place + ".new", place + ".json")
"""


@dataclass(frozen=True)
class Call:
    """One command of a test: phoenix-run, or torchrun in its place."""

    args: Sequence[object]
    env: Mapping[str, str] = field(default_factory=dict)
    torchrun: bool = False


@dataclass(frozen=True)
class Called:
    """How it ended, and what its workers wrote as witnesses."""

    done: Done
    folder: Path

    def witness(self, rank: int = 0, attempt: int = 0) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.folder / f"{rank}-{attempt}.json").read_text())
        return document

    def environment(self, rank: int = 0, attempt: int = 0) -> dict[str, str]:
        environment: dict[str, str] = self.witness(rank, attempt)["environment"]
        return environment


# Several commands in one interpreter, as loading torch takes longer than all of them: torchrun is a call of `main`.
TORCHRUNS: Final = """
import json, os, sys, tempfile, traceback
from torch.distributed.run import main
tempfile.tempdir = os.getcwd()  # its log folders
for call in json.load(sys.stdin):
    os.environ.clear()
    os.environ.update(call["environment"])
    for descriptor, stream in ((1, "out"), (2, "err")):
        file = os.open(call["place"] + "." + stream, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    code = 0
    try:
        main(call["args"])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    with open(call["place"] + ".code", "w") as file:
        file.write(str(code))
"""


def call_all(folder: Path, calls: Mapping[str, Call]) -> dict[str, Called]:
    """Each with a home and a WITNESS folder of its own, in `folder`, a few at a time."""
    for name in calls:
        _witness(folder, name).mkdir()
    theirs = {name: call for name, call in calls.items() if call.torchrun}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        torchruns = pool.submit(_torchruns, folder, theirs)
        futures = {name: pool.submit(_call, folder, name, call) for name, call in calls.items() if name not in theirs}
        return torchruns.result() | {name: future.result() for name, future in futures.items()}


def _witness(folder: Path, name: str) -> Path:
    return folder / f"{name}-witness"


def _call(folder: Path, name: str, call: Call) -> Called:
    witness = _witness(folder, name)
    env = {**call.env, "WITNESS": str(witness)}
    return Called(run(folder / f"{name}-home", *call.args, env=env, cwd=folder), witness)


def _torchruns(folder: Path, calls: Mapping[str, Call]) -> dict[str, Called]:
    if not calls:
        return {}
    work = [
        {
            "args": [str(arg) for arg in call.args],
            "environment": environment(folder, {**call.env, "WITNESS": str(_witness(folder, name))}),
            "place": str(folder / name),
        }
        for name, call in calls.items()
    ]
    ended = subprocess.run(
        [sys.executable, "-c", TORCHRUNS],
        input=json.dumps(work),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr

    def said(name: str, what: str) -> str:
        return (folder / f"{name}.{what}").read_text()

    return {
        name: Called(
            Done(int(said(name, "code")), said(name, "out"), said(name, "err"), folder), _witness(folder, name)
        )
        for name in calls
    }


def witness_script(folder: Path) -> Path:
    return script(folder, WITNESS, "witness.py")


def free_port() -> int:
    """A port that nobody listens on now."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
