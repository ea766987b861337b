"""Real `phoenix-run` commands for tests: started in a home of their own, waited for with a deadline, ended by pid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 60.0  # for a whole small job on two busy cores
PHOENIX_RUN = (sys.executable, "-m", "phoenix_launch")


def events(job: Path, kind: str = "") -> list[dict[str, Any]]:
    """The journal's events of a kind, as a program of the user's would read them."""
    try:
        lines = (job / "events.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if kind in ("", event["event"])]


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str
    home: Path

    @property
    def job(self) -> Path:
        """The folder of the only job in this home."""
        (folder,) = (self.home / "jobs").iterdir()
        return folder

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        return events(self.job, kind)

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.job / "status.json").read_text())
        return document


class Running:
    """A command under way."""

    def __init__(self, process: subprocess.Popen[str], home: Path) -> None:
        self.process = process
        self.home = home

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def job(self) -> Path | None:
        found = list((self.home / "jobs").glob("*/job.json"))
        return found[0].parent if found else None

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        if self.job is None:
            return []
        return events(self.job, kind)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = SECONDS) -> Done:
        """Raises subprocess.TimeoutExpired, and ends the command then."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return Done(self.process.returncode, out, err, self.home)


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This one without what the machine's user may have set for phoenix-run or torchrun, and with a home of its own."""
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith(("PHOENIX_", "PET_", "TORCHELASTIC"))
    }
    return {**ours, "PHOENIX_HOME": str(home), **(extra or {})}


@contextmanager
def started(
    home: Path, args: Sequence[object], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[Running]:
    """Start `phoenix-run ARGS`; whatever happens, it has ended at the end of the block."""
    process = subprocess.Popen(
        [*PHOENIX_RUN, *map(str, args)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(home, env),
        cwd=cwd,
    )
    with attended(process, home) as running:
        yield running


@contextmanager
def attended(process: subprocess.Popen[str], home: Path) -> Iterator[Running]:
    """A command that was started with pipes: whatever happens, it has ended at the end of the block."""
    running = Running(process, home)
    try:
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def run(
    home: Path,
    *args: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    seconds: float = SECONDS,
) -> Done:
    """`phoenix-run ARGS` to its end."""
    with started(home, args, env=env, cwd=cwd) as running:
        return running.wait(seconds)


def script(folder: Path, source: str, name: str = "train.py") -> Path:
    """A training script of a test."""
    path = folder / name
    path.write_text(source)
    return path


def pids(running: Running, event: str) -> Callable[[], list[int]]:
    """For `eventually`: the pids that events of this kind name so far."""
    return lambda: [e["pid"] for e in running.events(event)]
