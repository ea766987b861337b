"""What is said of a job that failed: the worker to blame, its own last lines, and torchrun's error file. Mostly pure."""

from __future__ import annotations

import json
import os
from pathlib import Path

from phoenix_launch.errors import EXIT_OK, EXIT_SIGNAL_BASE
from phoenix_launch.job.state import Outcome

TAIL_LINES = 30


def summary(outcome: Outcome, logs: Path) -> str:
    """The last lines on the screen. The worker's own words come last, nothing after them."""
    stopped = outcome.cause is None and outcome.exit_code > EXIT_SIGNAL_BASE  # which was said when it was asked for
    if outcome.exit_code == EXIT_OK or stopped:
        return ""
    lines = [f"phoenix-run: the job ends with exit code {outcome.exit_code}: {outcome.text}"]
    if outcome.hint:
        lines.append(f"  hint: {outcome.hint}")
    cause = outcome.cause
    if cause is None:
        return "\n".join(lines)
    if cause.report.oom_killed:
        lines.append("  the kernel's out-of-memory killer ended it (its cgroup counts the kill)")
    lines.append(f"  logs: {logs}")
    tail = cause.report.tail.splitlines()[-TAIL_LINES:]
    if tail:
        lines.append(f"  last lines of rank {cause.rank}'s stderr:")
        lines += tail
    else:
        lines.append(f"  rank {cause.rank} wrote nothing to stderr")
    return "\n".join(lines)


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
