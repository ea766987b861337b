"""torchrun's contract: what the command's exit code says about its workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract import NO_TORCH, Call, Called, call_all
from tests.jobs_under_test import script

# Rank 1 ends as its arguments say, in each attempt; the others wait to be told to end.
ENDS = """
import os, signal, sys
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "rank", os.environ["RANK"], flush=True)
if os.environ["RANK"] == "1":
    print("rank 1 has a reason", file=sys.stderr, flush=True)
    if int(sys.argv[1]) < 0:
        os.kill(os.getpid(), -int(sys.argv[1]))
    sys.exit(int(sys.argv[1]))
signal.pause()
"""

# The first attempt fails, the second does not.
ONCE = """
import os, sys
sys.exit(1 - int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
"""

# All ranks end well, rank 0 long after the others.
LATE = """
import os, time
time.sleep(1.5 * (os.environ["RANK"] == "0"))
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Called]:
    folder = tmp_path_factory.mktemp("exits")
    ends, two = script(folder, ENDS), ["--start-method", "spawn", "--nproc-per-node", 2]
    return call_all(
        folder,
        {
            "seven": Call([*two, ends, 7], NO_TORCH),
            "killed": Call([*two, ends, -9], NO_TORCH),
            "seven as it is": Call([*two, "--exit-code=worker", ends, 7], NO_TORCH),
            "killed as it is": Call([*two, "--exit-code=worker", ends, -11], NO_TORCH),
            "exhausted": Call([*two, "--max-restarts", 2, ends, 7], NO_TORCH),
            "once": Call([*two, "--max-restarts", 1, "--exit-code=worker", script(folder, ONCE, "once.py")], NO_TORCH),
            "late": Call([*two, script(folder, LATE, "late.py")], NO_TORCH),
            "not executable": Call(["--no-python", "--exit-code=worker", folder], NO_TORCH),
            "no module": Call(["--start-method", "spawn", "-m", "no_such_module"], NO_TORCH),
        },
    )


@pytest.mark.parametrize(
    ("name", "code"),
    [("seven", 1), ("killed", 1), ("seven as it is", 7), ("killed as it is", 128 + 11), ("exhausted", 1), ("once", 0),
     ("late", 0), ("no module", 1)],
)  # fmt: skip
def test_exit_codes(calls: dict[str, Called], name: str, code: int) -> None:
    assert calls[name].done.code == code, calls[name].done.err
    assert calls[name].done.status()["exit_code"] == code
    assert "Traceback" not in calls[name].done.err


@pytest.mark.parametrize(
    ("name", "words"), [("seven", "exited with code 7"), ("killed", "was killed by SIGKILL"), ("exhausted", "code 7")]
)
def test_the_worker_to_blame_is_named_and_its_own_words_come_last(
    calls: dict[str, Called], name: str, words: str
) -> None:
    lines = calls[name].done.err.splitlines()
    assert any(f"rank 1 on node0 {words}" in line or words in line for line in lines)
    assert lines[-1] == "rank 1 has a reason"


def test_every_restart_is_counted_and_no_more_are_made_than_allowed(calls: dict[str, Called]) -> None:
    done = calls["exhausted"].done
    failing = [
        line for line in done.out.splitlines() if line.endswith("rank 1")
    ]  # rank 0 may be ended before it speaks
    assert failing == [f"attempt {attempt} rank 1" for attempt in range(3)]
    assert len(done.events("fault")) == 3
    assert len(done.events("swap")) == 2
    assert json.loads((done.job / "status.json").read_text())["restarts"] == 2


def test_a_program_that_cannot_be_executed_is_a_clear_line(calls: dict[str, Called], tmp_path: Path) -> None:
    done = calls["not executable"].done
    assert done.code in (2, 126)
    assert "Traceback" not in done.err
