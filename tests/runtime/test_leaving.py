"""A worker's exit code is its script's, even while threads of it are in C++; and exit handlers are called as ever."""

from __future__ import annotations

import subprocess
import sys

import pytest

BUSY = """
import atexit, sys, threading
import torch
from phoenix_runtime import leaving

ours, theirs = torch.ones(1 << 16), torch.ones(1 << 16)

def copy() -> None:
    while True:
        ours.copy_(theirs)

atexit.register(print, "registered first")
leaving.at_the_end(lambda: print("waited"), lambda: print("stopped"))
atexit.register(print, "registered last")
for _ in range(2):
    threading.Thread(target=copy, daemon=True).start()
"""
RAISES = "raise ZeroDivisionError('my own bug')"
EXITS = "leaving.note({0}); leaving.script_over(leaving.exit_code({0})); sys.exit({0})"  # as the fork server does it


def ended(end: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", BUSY + end]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("end", "code", "last", "called"),
    [
        (RAISES, 1, "ZeroDivisionError: my own bug", "stopped"),
        (EXITS.format(7), 7, "", "stopped"),
        (EXITS.format("'a word'"), 1, "a word", "stopped"),
        ("leaving.script_over(0)", 0, "", "waited"),
    ],
    ids=["an exception", "a number", "a word", "well"],
)
def test_the_exit_code_is_the_scripts_and_all_exit_handlers_are_called_once(
    end: str, code: int, last: str, called: str
) -> None:
    done = ended(end)
    assert (done.returncode, done.stderr.rstrip().rpartition("\n")[2]) == (code, last)
    assert done.stdout.splitlines() == ["registered last", called, "registered first"]


def test_a_script_that_was_interrupted_dies_by_the_signal_as_ever() -> None:
    quiet = BUSY.replace("range(2)", "range(0)")
    command = [sys.executable, "-W", "ignore", "-c", quiet + "raise KeyboardInterrupt"]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == -2


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit(3)", "raise ZeroDivisionError"])
def test_what_a_script_forks_ends_for_itself_alone(end: str) -> None:
    """It has the sockets of its parent: to leave, or to break communicators, would be the parent's doing."""
    quiet = BUSY.replace("range(2)", "range(0)").replace('print("waited")', "print(os.getpid() == parent)")
    quiet = quiet.replace('print("stopped")', "print(os.getpid() == parent)")
    script = f"import os\nparent = os.getpid()\n{quiet}\nif os.fork() == 0:\n    {end}\nos.wait()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line in ("True", "False")] == ["True"]
