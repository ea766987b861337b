"""What is said of a job that failed: the worker to blame, its own last lines, and torchrun's error file. Mostly pure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from phoenix_launch.bootstrap import OutputSettings
from phoenix_launch.errors import EXIT_OK, EXIT_SIGNAL_BASE
from phoenix_launch.job.state import Ended, Outcome, State
from phoenix_launch.messages import RankOrder
from phoenix_launch.node.routes import STDERR, STDOUT, WorkerLabel, route
from phoenix_launch.node.worker_setup import error_file
from phoenix_launch.wire import Generation

TAIL_LINES = 30


def verdict(outcome: Outcome) -> str:
    """How the job ends and why, for every screen; empty when it ended well, or was stopped, which was said then."""
    stopped = outcome.cause is None and outcome.exit_code > EXIT_SIGNAL_BASE
    if outcome.exit_code == EXIT_OK or stopped:
        return ""
    text = f"phoenix-run: the job ends with exit code {outcome.exit_code}: {outcome.text}"
    return f"{text}\n  hint: {outcome.hint}" if outcome.hint else text


def summary(outcome: Outcome, files: Mapping[str, str] | None = None, shown: str = "") -> str:
    """The last lines on the screen. The worker's own words come last, nothing after them.

    Args:
        files: where more about the worker to blame stands, by what it is.
        shown: what its stderr showed on the screen, when no other worker has written there since. What stands there
            already is not shown again, but for its last line.
    """
    said, cause = verdict(outcome), outcome.cause
    if not said or cause is None:
        return said
    lines = [said]
    if cause.report.oom_killed:
        lines.append("  the kernel's out-of-memory killer ended it (its cgroup counts the kill)")
    lines += [f"  {what}: {where}" for what, where in (files or {}).items()]
    tail = cause.report.tail.rstrip().splitlines()[-TAIL_LINES:]
    if not tail:
        lines.append(f"  rank {cause.rank} wrote nothing to stderr")
    elif len(tail) > 1 and shown.rstrip().splitlines()[-len(tail) :] == tail:
        lines += [f"  last line of rank {cause.rank}'s stderr, which stands above:", tail[-1]]
    else:
        lines += [f"  last line{'s' * (len(tail) > 1)} of rank {cause.rank}'s stderr:", *tail]
    return "\n".join(lines)


def files_about(cause: Ended, state: State, output: OutputSettings, where: str = "") -> dict[str, str]:
    """The log and the error file of the worker to blame. `where`: what to add to a path that is of another host."""
    place = next(place for place in state.places if place.rank == cause.rank)
    generation = born(cause.rank, state)
    attempt = max(0, generation.n - state.first)
    label = WorkerLabel(cause.rank, place.local_rank, generation, attempt)
    log = route(output, label, STDERR if cause.report.tail else STDOUT).log
    files = {"log": f"{log}{where}"} if log else {}
    if cause.report.error and output.files:
        order = RankOrder(cause.rank, place.local_rank, {})
        path = error_file(output, Path(), order, generation, attempt)
        files["error file"] = f"{path}{where}"
    return files


def born(rank: int, state: State) -> Generation:
    """The generation that started the process of this rank, after which its files are named."""
    holder = state.holders.get(rank)
    return state.generation if holder is None else holder.born


def error_document(outcome: Outcome) -> str:
    """The root cause's error file with `errorCode` put in, as torchrun's agent does; empty when there is none."""
    cause = outcome.cause
    if cause is None or not cause.report.error:
        return ""
    try:
        document = json.loads(cause.report.error)
    except ValueError:
        return ""
    if isinstance(document, dict) and isinstance(message := document.get("message"), dict):
        message["errorCode"] = cause.report.code
    return json.dumps(document)


def write_error_file(path: str, outcome: Outcome) -> None:
    """Copy the root cause to the launcher's own TORCHELASTIC_ERROR_FILE, if it has one; failing to is no failure."""
    document = error_document(outcome)
    if not path or not document:
        return
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        Path(path).write_text(document, encoding="utf-8")
    except OSError as error:
        os.write(2, f"phoenix-run: cannot write {path}: {error.strerror}\n".encode())
