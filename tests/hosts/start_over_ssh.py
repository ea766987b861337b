"""Run on the head: starts nodes over ssh as told in a JSON file, waits, and prints how each of them fared as JSON."""

from __future__ import annotations

import json
import os
import select
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bootstraps import bootstrap

from phoenix_launch.hosts.remote import NodeHandle, reason, start_ssh


def wait(handles: list[NodeHandle], seconds: float) -> dict[str, float]:
    """Until each has said `ready`, has ended, or the time is over; when that was, by node."""
    began = time.monotonic()
    settled: dict[str, float] = {}
    while len(settled) < len(handles) and (left := began + seconds - time.monotonic()) > 0:
        open_ones = [handle for handle in handles if handle.name not in settled and not handle.at_end]
        select.select(open_ones, [], [], min(left, 0.05))
        for handle in handles:
            handle.read_lines()
            if handle.name not in settled and ("ready" in handle.last_lines or handle.poll() is not None):
                settled[handle.name] = time.monotonic() - began
    return settled


def main() -> None:
    task: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    folder = tempfile.mkdtemp(prefix="phoenix-", dir="/run")
    handles = [
        start_ssh(
            bootstrap(start["name"], start.get("environment"), index),
            start["host"],
            start.get("ssh", "ssh"),
            start.get("python", sys.executable),
            folder,
            task["connect_timeout"],
        )
        for index, start in enumerate(task["starts"])
    ]
    settled = wait(handles, task["patience"])
    report: dict[str, Any] = {}
    for handle in handles:
        if handle.poll() is None and handle.name not in settled:
            handle.terminate()
        said = reason(handle)
        report[handle.name] = {
            "code": handle.poll(),
            "reason": said,
            "hint": said.hint,
            "seconds": settled.get(handle.name),
            "lines": handle.last_lines,
            "pid": handle.pid,
        }
    report["sockets"] = sorted(os.listdir(folder))
    print(json.dumps(report), flush=True)
    if task.get("stay"):
        sys.stdin.read()
    for handle in handles:
        handle.close()


if __name__ == "__main__":
    main()
