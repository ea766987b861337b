"""Run on a host: a command in a real terminal, whose keys are pressed when its screen shows what is waited for."""

from __future__ import annotations

import json
import sys

import pexpect  # type: ignore[import-untyped]

SECONDS = 60


def main(wait_for: str, key: str, *argv: str) -> None:
    """Print as JSON what stood on the screen after the key, and the exit code."""
    child = pexpect.spawn(argv[0], list(argv[1:]), timeout=SECONDS, encoding="utf-8", dimensions=(40, 200))
    try:
        child.expect(wait_for)
        child.expect("\n")
        child.sendcontrol(key)
        child.expect(pexpect.EOF)
        shown = child.before
        child.wait()  # `close` would hurry it with signals
    finally:
        child.close()
    print(json.dumps({"shown": shown, "code": child.exitstatus, "signal": child.signalstatus}))


if __name__ == "__main__":
    main(*sys.argv[1:])
