"""torchrun's contract: @record's error files, the launcher's own, and which worker is to blame."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.contract import NO_TORCH, Call, Called, call_all
from tests.jobs_under_test import script

RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("no good")
main()
"""

# Rank 0 ends the moment rank 1 is gone; neither was told to write an error file.
# On two nodes the first is told by two messages to one clock: it needs a head start of more than a message's way.
IN_A_ROW = """
import os, select, sys
place = os.path.join(os.environ["WITNESS"], "pid")
def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
if os.environ["RANK"] == "1":
    with open(place + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(place + ".new", place)
    print("the first to fail", file=sys.stderr)
    sys.exit(5)
while not os.path.exists(place) or not gone(int(open(place).read())):
    pass
select.select([], [], [], float(os.environ.get("HEAD_START", "0")))
print("the second", file=sys.stderr)
sys.exit(4)
"""

# A traceback of many lines by the one that fails; the other has nothing to say.
DEEP = """
import os, signal
def fall(n):
    if not n:
        raise ValueError("no good")
    fall(n - 1)
if os.environ["RANK"] == "1":
    fall(5)
signal.pause()
"""

# What a worker that is killed, or knows nothing of @record, leaves; and one that writes something else there.
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
STRANGE = """
import os
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    file.write("this is not JSON")
raise SystemExit(3)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("errors")


@pytest.fixture(scope="module")
def calls(folder: Path) -> dict[str, Called]:
    recorded, in_a_row = script(folder, RECORDED), script(folder, IN_A_ROW, "in_a_row.py")

    def to(name: str) -> dict[str, str]:
        return {"TORCHELASTIC_ERROR_FILE": str(folder / name / "launcher.json")}

    (folder / "torchrun").mkdir()
    spawn = ["--start-method", "spawn"]
    return call_all(
        folder,
        {
            "torchrun": Call(["--log-dir", folder / "tlogs", "-t", 3, recorded], to("torchrun"), True),
            "recorded": Call(["--log-dir", folder / "logs", "-t", 3, recorded], to("ours")),
            "one node": Call([*spawn, "--nproc-per-node", 2, in_a_row], NO_TORCH),
            "two nodes": Call([*spawn, "--nodes", 2, in_a_row], {**NO_TORCH, "HEAD_START": "0.3"}),
            "deep": Call([*spawn, "--nproc-per-node", 2, script(folder, DEEP, "deep.py")], NO_TORCH),
            "killed": Call([*spawn, script(folder, KILLED, "killed.py")], {**NO_TORCH, **to("killed")}),
            "strange": Call([*spawn, script(folder, STRANGE, "strange.py")], {**NO_TORCH, **to("strange")}),
        },
    )  # fmt: skip


def shape(document: Any) -> Any:
    """The keys, and the types of what they lead to."""
    if isinstance(document, dict):
        return {key: shape(value) for key, value in document.items()}
    return type(document).__name__


def test_the_launchers_error_file_is_torchruns(calls: dict[str, Called], folder: Path) -> None:
    assert (calls["torchrun"].done.code, calls["recorded"].done.code) == (1, 1)
    theirs, ours = (json.loads((folder / who / "launcher.json").read_text()) for who in ("torchrun", "ours"))
    assert shape(ours) == shape(theirs)
    assert ours["message"]["message"] == theirs["message"]["message"] == "ValueError: no good"
    assert ours["message"]["errorCode"] == theirs["message"]["errorCode"] == 1
    assert "raise ValueError" in ours["message"]["extraInfo"]["py_callstack"]


def test_each_workers_error_file_stands_in_torchruns_layout(calls: dict[str, Called], folder: Path) -> None:
    (theirs,) = (folder / "tlogs").glob("*/attempt_0/0/error.json")
    (ours,) = (folder / "logs").glob("*_node0/attempt_0/0/error.json")
    assert shape(json.loads(ours.read_text())) == shape(json.loads(theirs.read_text()))


def test_the_recorded_traceback_is_the_last_thing_on_the_screen(calls: dict[str, Called]) -> None:
    lines = calls["recorded"].done.err.splitlines()
    assert lines[-1] == "ValueError: no good"
    assert any("rank 0 on node0 exited with code 1" in line for line in lines)


def test_a_traceback_stands_on_the_screen_once_its_end_comes_last_and_its_files_are_named(
    calls: dict[str, Called],
) -> None:
    done = calls["deep"].done
    lines = done.err.splitlines()
    assert done.err.count("Traceback (most recent call last)") == 1, done.err
    assert lines[-1] == "ValueError: no good"
    assert f"  log: {done.job}/logs/node0/1.g1.err" in lines
    recorded = calls["recorded"].done.err
    (named,) = [line for line in recorded.splitlines() if line.startswith("  error file: ")]
    assert json.loads(Path(named.removeprefix("  error file: ")).read_text())["message"]["message"]
    assert recorded.count("Traceback (most recent call last)") == 1, recorded


@pytest.mark.parametrize("name", ["one node", "two nodes"])
def test_of_two_that_fail_within_a_moment_the_first_is_to_blame(calls: dict[str, Called], name: str) -> None:
    done = calls[name].done
    node = "node0" if name == "one node" else "node1"
    assert done.code == 1
    assert f"rank 1 on {node} exited with code 5" in done.status()["reason"], done.err
    assert done.err.splitlines()[-1] == "the first to fail"


@pytest.mark.parametrize(("name", "words"), [("killed", "was killed by SIGKILL"), ("strange", "exited with code 3")])
def test_without_a_record_there_is_nothing_to_copy_and_the_worker_is_named(
    calls: dict[str, Called], folder: Path, name: str, words: str
) -> None:
    done = calls[name].done
    assert done.code == 1
    assert f"rank 0 on node0 {words}" in done.err
    assert "rank 0 wrote nothing to stderr" in done.err.splitlines()[-1]
    assert not (folder / name).exists()
    assert "Traceback" not in done.err
    assert signal.SIGKILL.name in done.err or name == "strange"
