"""torchrun's contract: where output goes with --redirects, --tee, filters and --log-dir, and that nothing of it is deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.contract import NO_TORCH, Call, Called, call_all
from tests.jobs_under_test import script

# The last line comes in pieces that are no characters, and has no end.
SPEAKS = """
import os, sys
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
for text in (f"out {rank}.{attempt}", f"loss={rank}", f"a,b {rank}"):
    os.write(1, (text + "\\n").encode())
os.write(2, f"err {rank}\\nloss={rank}\\n".encode())
for byte in f"é{rank}".encode():
    os.write(1, bytes([byte]))
sys.exit(len(sys.argv) > 1 and rank == "1" and attempt == "0")
"""

# Waits in the first attempt until its node, or another one, is lost.
WAITS = """
import os, signal
print("node", os.environ["PHOENIX_NODE"], "attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.pause()
"""

TEMPLATE = "<${role_name} ${rank} of here ${local_rank}> "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def calls(folder: Path) -> dict[str, Called]:
    speaks = script(folder, SPEAKS)
    split = ["--nproc-per-node", 2, "--redirects", "0:3", "--tee", "1:3"]
    filtered = ["--nproc-per-node", 3, "-t", 3, "--local-ranks-filter", "0,2", "--role", "trainer",
                "--duplicate-stdout-filters", "loss=,a,,b", "--duplicate-stderr-filters", "err"]  # fmt: skip

    def ours(name: str, *args: object, env: dict[str, str] | None = None) -> Call:
        options = ["--start-method", "spawn", "--log-dir", folder / name]
        return Call([*options, *args], {**NO_TORCH, **(env or {})})

    return call_all(
        folder,
        {
            "torchrun split": Call(["--log-dir", folder / "torchrun split", *split, speaks], torchrun=True),
            "torchrun filtered": Call(["--log-dir", folder / "torchrun filtered", *filtered, speaks], torchrun=True),
            "split": ours("split", *split, speaks),
            "filtered": ours("filtered", *filtered, speaks),
            "filters alone": ours("filters alone", "--duplicate-stdout-filters", "loss=", speaks),
            "plain": ours("plain", "--nproc-per-node", 2, speaks),
            "template": ours("template", "--tee", 3, "--role", "boss", speaks,
                             env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": TEMPLATE}),
            "many": ours("many", "--nproc-per-node", 12, "--redirects", "10:1,11:3", "--no-python", "sh", "-c",
                         "echo out $LOCAL_RANK; echo err $LOCAL_RANK >&2"),
            "nowhere": Call(["--start-method", "spawn", "--log-dir", os.devnull, "-r", 3, speaks], NO_TORCH),
            "restarted": ours("restarted", "--nproc-per-node", 2, "--max-restarts", 1, "-r", 3, speaks, "fail"),
            "moved": ours("moved", "--nodes", 2, "--spares", 1, "--tee", 3,
                          "--drill", "kill-node --node 1 --after 1", script(folder, WAITS, "waits.py")),
        },
    )  # fmt: skip


def files(folder: Path) -> dict[str, str]:
    """Path below `folder` -> content."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def torchrun_files(folder: Path, node: str = "") -> dict[str, str]:
    """What torchrun's layout has of one node, below <run id>_<random>[_<node>]."""
    (run,) = [path for path in folder.iterdir() if path.name.endswith(f"_{node}" if node else "") and "_" in path.name]
    return files(run)


def test_all_end_well(calls: dict[str, Called]) -> None:
    assert {name: (call.done.code, call.done.err) for name, call in calls.items() if call.done.code} == {}


@pytest.mark.parametrize("name", ["split", "filtered"])
def test_files_are_laid_out_as_torchruns_and_say_the_same(calls: dict[str, Called], folder: Path, name: str) -> None:
    theirs, ours = torchrun_files(folder / f"torchrun {name}"), torchrun_files(folder / name, "node0")
    assert set(ours) == set(theirs)
    streams = [path for path in theirs if not path.startswith("attempt_0/filtered")]
    assert {path: ours[path] for path in streams} == {path: theirs[path] for path in streams}


def test_the_console_shows_what_torchruns_does(calls: dict[str, Called]) -> None:
    theirs, ours = calls["torchrun split"].done, calls["split"].done
    assert sorted(ours.out.splitlines()) == sorted(theirs.out.splitlines())
    assert "[default1]:out 1.0" in ours.out.splitlines()
    assert [line for line in ours.err.splitlines() if line.startswith("[default")] == [
        "[default1]:err 1",
        "[default1]:loss=1",
    ]


def test_filters_copy_lines_of_the_wanted_ranks_with_their_prefix(calls: dict[str, Called], folder: Path) -> None:
    ours = torchrun_files(folder / "filtered", "node0")
    assert sorted(ours["attempt_0/filtered_stdout.log"].splitlines()) == [
        "[trainer0]:a,b 0", "[trainer0]:loss=0", "[trainer2]:a,b 2", "[trainer2]:loss=2",
    ]  # fmt: skip
    assert sorted(ours["attempt_0/filtered_stderr.log"].splitlines()) == ["[trainer0]:err 0", "[trainer2]:err 2"]
    theirs = torchrun_files(folder / "torchrun filtered")
    for name in ("attempt_0/filtered_stdout.log", "attempt_0/filtered_stderr.log"):
        assert sorted(ours[name].splitlines()) == sorted(theirs[name].splitlines())


def test_the_local_ranks_filter_silences_the_console_only(calls: dict[str, Called], folder: Path) -> None:
    done = calls["filtered"].done
    assert "out 1.0" not in done.out and "out 2.0" in done.out
    assert "out 1.0" in torchrun_files(folder / "filtered", "node0")["attempt_0/1/stdout.log"]


def test_without_those_options_lines_come_bare_and_files_are_by_node_rank_and_generation(
    calls: dict[str, Called], folder: Path
) -> None:
    assert sorted(calls["plain"].done.out.splitlines()) == sorted(
        line for rank in "01" for line in (f"out {rank}.0", f"loss={rank}", f"a,b {rank}", f"é{rank}")
    )
    kept = files(folder / "plain")
    assert set(kept) == {f"node0/{rank}.g1.{stream}" for rank in "01" for stream in ("out", "err")} | {
        name for name in kept if name.startswith("node0/spare-")
    }
    assert kept["node0/1.g1.err"] == "err 1\nloss=1\n"


@pytest.mark.parametrize("name", ["plain", "filters alone"])
def test_nothing_is_written_twice_unless_torchruns_layout_is_asked_for(
    calls: dict[str, Called], folder: Path, name: str
) -> None:
    assert calls[name].done.code == 0
    assert [path.name for path in (folder / name).iterdir()] == ["node0"]


def test_the_prefix_can_be_chosen(calls: dict[str, Called]) -> None:
    assert "<boss 0 of here 0> out 0.0" in calls["template"].done.out.splitlines()


def test_ranks_of_two_digits_can_be_redirected(calls: dict[str, Called], folder: Path) -> None:
    done = calls["many"].done
    assert sorted(done.out.splitlines()) == sorted(f"out {rank}" for rank in range(10))
    assert "err 10" in done.err and "err 11" not in done.err
    kept = torchrun_files(folder / "many", "node0")
    assert kept == {
        "attempt_0/10/stdout.log": "out 10\n",
        "attempt_0/11/stdout.log": "out 11\n",
        "attempt_0/11/stderr.log": "err 11\n",
    }


def test_no_files_are_kept_when_log_dir_is_dev_null(calls: dict[str, Called]) -> None:
    done = calls["nowhere"].done
    assert done.out.splitlines() == ["out 0.0", "loss=0", "a,b 0", "é0"]
    assert not list(done.job.rglob("*.out")) and not list(done.job.rglob("*.log"))


def test_a_restart_keeps_what_was_written_before(calls: dict[str, Called], folder: Path) -> None:
    kept = torchrun_files(folder / "restarted", "node0")
    assert [kept[f"attempt_{attempt}/1/stdout.log"].splitlines()[0] for attempt in (0, 1)] == ["out 1.0", "out 1.1"]
    plain = files(folder / "restarted" / "node0")
    assert [plain[f"1.{generation}.out"].splitlines()[0] for generation in ("g1", "g2")] == ["out 1.0", "out 1.1"]


def test_a_lost_node_keeps_its_logs_and_each_node_has_a_folder_with_its_name(
    calls: dict[str, Called], folder: Path
) -> None:
    kept = {node: torchrun_files(folder / "moved", node) for node in ("node0", "node1", "node2")}
    assert kept["node1"]["attempt_0/0/stdout.log"] == "node node1 attempt 0\n"
    assert kept["node2"] == {"attempt_1/0/stdout.log": "node node2 attempt 1\n", "attempt_1/0/stderr.log": ""}
    assert {"attempt_0/0/stdout.log", "attempt_1/0/stdout.log"} <= set(kept["node0"])
