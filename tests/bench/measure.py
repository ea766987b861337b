"""What the measurements share: the two launchers, jobs that are always ended, alternating rounds, median (min-max)."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from phoenix_launch.records.journal import AnyEvent, SpareParked, Swap, read_events

BIN: Final = Path(sys.executable).parent
PHOENIX: Final = str(BIN / "phoenix-run")
TORCHRUN: Final = str(BIN / "torchrun")
WORKERS: Final = Path(__file__).parent / "workers"
EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "train_plain.py"
RUN_SECONDS: Final = 300.0  # the longest that one run may take
_running: Final[list[subprocess.Popen[str]]] = []
END_SECONDS: Final = 40.0  # from asking a job to end to killing it


def rounds_option(description: str | None, default: int) -> int:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=default)
    return int(parser.parse_args().rounds)


def summary(samples: Sequence[float], unit: str = "s") -> str:
    return f"{statistics.median(samples):.3f} {unit} ({min(samples):.3f}-{max(samples):.3f}, n={len(samples)})"


def alternate(cases: Mapping[str, Callable[[], float]], rounds: int, unit: str = "s") -> None:
    """Run the cases in turn, print each one's summary and the ratio of the medians of the first to the last."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        for name, run in cases.items():
            samples[name].append(run())
            print(f"  round {number + 1}: {name} {samples[name][-1]:.3f} {unit}", file=sys.stderr, flush=True)
    for name, taken in samples.items():
        print(f"{name:24} {summary(taken, unit)}")
    first, *_, last = (statistics.median(taken) for taken in samples.values())
    print(f"{'ratio of medians':24} {first / last:.2f}")


@contextlib.contextmanager
def job(
    command: Sequence[str], to_file: bool = False, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A launcher with a folder of its own (its workers' BENCH_FOLDER, PHOENIX_HOME); ended when the block is left.

    `to_file`: nobody reads what it prints while it runs, and that may be much.
    """
    signal.signal(signal.SIGTERM, _leave)  # of `timeout`, say: so that the job ends with the measurement
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        environment = {"OMP_NUM_THREADS": "1", "PHOENIX_HOME": f"{name}/home", "BENCH_FOLDER": name, **environment}
        process = subprocess.Popen(
            command,
            cwd=name,
            env={**os.environ, **environment},
            stdout=(folder / "output").open("w") if to_file else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        _running.append(process)
        try:
            yield process, folder
        finally:
            _running.remove(process)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=END_SECONDS)
            if process.poll() is None:
                process.kill()
                process.communicate()


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def journal(folder: Path) -> list[AnyEvent]:
    """What the only job in a folder of `job` has written so far."""
    return [event for path in folder.glob("home/jobs/*/events.jsonl") for event in read_events(path)]


def swaps(folder: Path) -> list[Swap]:
    return [event for event in journal(folder) if isinstance(event, Swap)]


def parked(folder: Path) -> int:
    """How many processes were made ready so far."""
    return sum(isinstance(event, SpareParked) for event in journal(folder))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a job that ends by itself and return what it printed."""
    shown, _ = process.communicate(timeout=RUN_SECONDS)
    if process.returncode:
        raise SystemExit(f"{process.args!r} ended with {process.returncode}:\n{shown[-4000:]}")
    return shown


def until(check: Callable[[], object], what: str, seconds: float = RUN_SECONDS, pause: float = 0.01) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        for process in _running:
            if process.poll() is not None:
                shown, _ = process.communicate()
                raise SystemExit(
                    f"{process.args!r} ended with {process.returncode} while waiting for {what}:\n{(shown or '')[-4000:]}"
                )
        if time.monotonic() >= deadline:
            raise SystemExit(f"not within {seconds:g} s: {what}")
        time.sleep(pause)
