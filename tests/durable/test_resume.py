"""Whole jobs write checkpoints to disk, lose processes meanwhile, and go on from them in another job."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jobs_under_test
import pytest
from jobs_under_test import Done

from phoenix_launch.checkpoint import folders, saved
from phoenix_launch.errors import EXIT_DO_NOT_REQUEUE

pytestmark = pytest.mark.timeout(300)

TESTS = Path(__file__).parents[1]
SWAPS, FAULTY = TESTS / "swaps" / "swap_script.py", TESTS / "swaps" / "faulty_script.py"
RESHARD, KILLED = TESTS / "durable" / "reshard_script.py", TESTS / "durable" / "killed_script.py"
FOUR_RANKS = ("--nodes", 2, "--nproc-per-node", 2)
TWO_RANKS = ("--nodes", 2, "--nproc-per-node", 1)
IN_PLACE, FROM_SCRIPT = 1, 3


def run(
    home: Path, root: Path | None, *words: object, options: Sequence[object] = (), faults: Sequence[str] = ()
) -> Done:
    """A job with checkpoints in `root`, each third step; asserts exit code 0 and that all faults have happened."""
    happened = home / "faults"
    happened.mkdir(parents=True)
    durable = ("--checkpoint-dir", root, "--checkpoint-interval", 3) if root is not None else ()
    env = {"PHOENIX_FAULTS": f"{happened}:{';'.join(faults)}"}
    done = jobs_under_test.run(home / "home", *durable, *options, *words, env=env, seconds=120.0)
    assert done.code == 0, done.err
    assert len(list(happened.iterdir())) == len(faults), done.err
    return done


def lines(done: Done) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]


def digests(done: Done) -> dict[int, str]:
    return {line["rank"]: line["digest"] for line in lines(done) if "digest" in line}


def begun(done: Done) -> set[int]:
    return {line["begin"] for line in lines(done) if "begin" in line}


def steps(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def published(done: Done) -> list[int]:
    """The steps of its checkpoints: a version that is due while an older one is being written is left out."""
    return [event["step"] for event in done.events("checkpoint")]


def only(root: Path, step: int) -> None:
    """As if the job had ended before it wrote what is newer."""
    for path in root.iterdir():
        if path.name != folders.visible_name(step):
            shutil.rmtree(path)


def test_a_rank_that_dies_while_it_writes_leaves_nothing_and_the_job_can_be_resumed_later(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    whole = run(tmp_path / "a", root, SWAPS, "fsdp", 11, options=TWO_RANKS, faults=["writing,1,3"])
    written = published(whole)
    assert written in ([6], [9], [6, 9])
    assert [swap["rung"] for swap in whole.events("swap")] == [IN_PLACE]
    assert steps(root) == [folders.visible_name(step) for step in written]
    newest = root / folders.visible_name(written[-1])
    assert whole.status()["checkpoint"] == {"step": written[-1], "path": str(newest)}
    only(root, written[0])
    resumed = run(tmp_path / "b", root, SWAPS, "fsdp", 11, options=(*TWO_RANKS, "--resume"))
    assert f"going on from {root / folders.visible_name(written[0])}" in resumed.err
    assert digests(resumed) == digests(whole)
    assert folders.visible_name(9) in steps(root)


def test_another_number_of_ranks_goes_on_with_the_same_parameters_and_optimizer(tmp_path: Path) -> None:
    resharded(tmp_path, "fsdp", ("--nproc-per-node", 2), ("--nproc-per-node", 1), 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "before", "after", "were", "are"),
    [
        ("fsdp", FOUR_RANKS, TWO_RANKS, 4, 2),
        ("fsdp", TWO_RANKS, ("--nproc-per-node", 3), 2, 3),
        ("ddp", TWO_RANKS, ("--nproc-per-node", 3), 2, 3),
        ("zero", ("--nproc-per-node", 3), TWO_RANKS, 3, 2),
    ],
)
def test_other_kinds_go_on_with_another_number_of_ranks(
    kind: str, before: tuple[object, ...], after: tuple[object, ...], were: int, are: int, tmp_path: Path
) -> None:
    resharded(tmp_path, kind, before, after, were, are)


def resharded(
    folder: Path, kind: str, before: tuple[object, ...], after: tuple[object, ...], were: int, are: int
) -> None:
    root = folder / "ck"
    written = run(folder / "a", root, RESHARD, kind, 8, options=(*before, "--resume"))
    assert f"phoenix: {root} has no checkpoint: starting at step 0" in written.err
    resumed = run(folder / "b", root, RESHARD, kind, 8, options=(*after, "--resume"))
    step = published(written)[-1]
    (was,) = [line for line in lines(written) if line["rank"] == 0 and line["step"] == step]
    now = [line for line in lines(resumed) if line["step"] == step]
    assert len(now) == are
    (zeroth,) = [line for line in now if line["rank"] == 0]
    assert (zeroth["whole"], zeroth["lr"]) == (was["whole"], was["lr"])
    seen = step * were // are
    assert {tuple(line["data"]) for line in now} == {(0, seen, seen)}, "as many examples as were seen, about"


# --- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["ddp", "ddp with buffers and unused", "fsdp unresharded", "fsdp mixed", "hsdp", "tp", "tp fsdp", "zero", "1f1b"],
)
def test_every_kind_is_resumed_bit_for_bit(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "ck"
    calm = run(tmp_path / "calm", None, SWAPS, kind, 10, options=FOUR_RANKS)
    whole = run(tmp_path / "a", root, SWAPS, kind, 10, options=FOUR_RANKS)
    assert digests(whole) == digests(calm)
    only(root, published(whole)[-2:][0])
    resumed = run(tmp_path / "b", root, SWAPS, kind, 10, options=(*FOUR_RANKS, "--resume"))
    assert digests(resumed) == digests(calm)
    assert "going on from" in resumed.err


@pytest.mark.slow
def test_when_all_copies_in_memory_are_lost_the_job_goes_on_from_its_own_newest_on_disk(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    calm = run(tmp_path / "calm", None, FAULTY, "ddp", 20, options=TWO_RANKS)
    faults = ["node,0,14", "node,1,14", "between,1,18"]
    done = run(tmp_path / "a", root, FAULTY, "ddp", 20, options=(*TWO_RANKS, "--spares", 2), faults=faults)
    assert [swap["rung"] for swap in done.events("swap")] == [FROM_SCRIPT, IN_PLACE]
    assert f"going on from {root}" in done.err
    assert digests(done) == digests(calm)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["writing,0,6", "written,0,6", "written,3,6", "agreed,2,6", "between,1,7"])
def test_any_rank_may_die_around_a_checkpoint(fault: str, tmp_path: Path) -> None:
    root = tmp_path / "ck"
    calm = run(tmp_path / "calm", None, SWAPS, "fsdp", 14, options=FOUR_RANKS)
    done = run(tmp_path / "a", root, SWAPS, "fsdp", 14, options=FOUR_RANKS, faults=[fault])
    assert digests(done) == digests(calm)
    newest = published(done)[-1]
    only(root, newest)
    faults = [f"entry,0,{newest}"]
    resumed = run(tmp_path / "b", root, SWAPS, "fsdp", 14, options=(*FOUR_RANKS, "--resume"), faults=faults)
    assert digests(resumed) == digests(calm)


def stopped(home: Path, root: Path, *words: object, options: Sequence[object], faults: Sequence[str] = ()) -> Done:
    """A job that has to stop, and has written nothing to disk by itself."""
    happened = home / "faults"
    happened.mkdir(parents=True)
    durable = ("--checkpoint-dir", root, "--checkpoint-interval", 1000)
    env = {"PHOENIX_FAULTS": f"{happened}:{';'.join(faults)}"}
    return jobs_under_test.run(home / "home", *durable, *options, *words, env=env, seconds=120.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "zero"])
def test_a_job_that_runs_out_of_nodes_goes_on_from_what_was_in_memory(kind: str, tmp_path: Path) -> None:
    root, options = tmp_path / "ck", (*TWO_RANKS, "--spare-timeout", 0.1)
    done = stopped(tmp_path / "a", root, KILLED, kind, 11, options=options, faults=["node,1,7"])
    assert done.code == EXIT_DO_NOT_REQUEUE, done.err
    assert f"node0: its copies in memory are saved in {root}" in done.err
    assert done.events("checkpoint") == []
    resumed = run(tmp_path / "b", root, KILLED, kind, 11, options=(*TWO_RANKS, "--resume"))
    assert f"going on from {root / 'emergency-'}" in resumed.err
    assert begun(resumed) == {6}, "the lost rank alone knew its random numbers after step 7"
    calm = run(tmp_path / "calm", None, KILLED, kind, 11, options=TWO_RANKS)
    assert digests(resumed) == digests(calm)
    assert steps(root) == [folders.visible_name(9)], "what was overtaken is gone"


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "code"), [("stop", 128 + signal.SIGTERM), ("orphan", -signal.SIGKILL)])
def test_a_job_that_is_stopped_or_loses_its_supervisor_goes_on_from_what_was_in_memory(
    fault: str, code: int, tmp_path: Path, eventually: Callable[..., object]
) -> None:
    root, options = tmp_path / "ck", (*TWO_RANKS, "--orphan-timeout", 4)
    done = stopped(tmp_path / "a", root, KILLED, "fsdp", 11, options=options, faults=[f"{fault},1,7"])
    assert done.code == code, done.err
    eventually(lambda: saved.newest(root, 2), seconds=30.0, what="saved copies")
    resumed = run(tmp_path / "b", root, KILLED, "fsdp", 11, options=(*TWO_RANKS, "--resume"))
    assert begun(resumed) == {6}
    calm = run(tmp_path / "calm", None, KILLED, "fsdp", 11, options=TWO_RANKS)
    assert digests(resumed) == digests(calm)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("fsdp", ()),
        pytest.param("ddp", ("--snapshot-interval", 4), marks=pytest.mark.slow),
        pytest.param("zero", (), marks=pytest.mark.slow),
        pytest.param("tp fsdp", (), marks=pytest.mark.slow),
    ],
)
def test_no_step_that_was_done_is_lost_when_a_job_is_stopped(
    kind: str, options: Sequence[object], tmp_path: Path
) -> None:
    root = tmp_path / "ck"
    nodes = FOUR_RANKS if kind == "tp fsdp" else TWO_RANKS
    done = stopped(tmp_path / "a", root, KILLED, kind, 10_000, options=(*nodes, *options), faults=["term,1,7"])
    assert done.code == 128 + signal.SIGTERM, done.err
    newest = max(line["done"] for line in lines(done) if "done" in line)
    assert newest >= 7
    more = newest + 3
    resumed = run(tmp_path / "b", root, KILLED, kind, more, options=(*nodes, "--resume"))
    assert begun(resumed) == {newest}
    calm = run(tmp_path / "calm", None, KILLED, kind, more, options=nodes)
    assert digests(resumed) == digests(calm)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_no_step_that_was_done_is_lost_when_nobody_takes_over_from_a_dead_supervisor(
    kind: str, tmp_path: Path, eventually: Callable[..., object]
) -> None:
    root, options = tmp_path / "ck", (*TWO_RANKS, "--heartbeat-timeout", 1, "--orphan-timeout", 4)
    done = stopped(tmp_path / "a", root, KILLED, kind, 100_000, options=options, faults=["gone,1,7"])
    assert done.code == -signal.SIGKILL, done.err
    eventually(lambda: len(list(root.glob("emergency-*/node-*"))) == 2, seconds=60.0, what="saved copies of both nodes")
    logs = "".join(path.read_text() for path in done.job.glob("logs/*/*.out"))
    newest = max(json.loads(line)["done"] for line in logs.splitlines() if '"done"' in line)
    assert newest > 7, "training goes on without a supervisor"
    resumed = run(tmp_path / "b", root, KILLED, kind, newest + 3, options=(*TWO_RANKS, "--resume"))
    assert begun(resumed) == {newest}
    calm = run(tmp_path / "calm", None, KILLED, kind, newest + 3, options=TWO_RANKS)
    assert digests(resumed) == digests(calm)


@pytest.mark.slow
def test_everything_that_training_state_can_be_comes_back(tmp_path: Path) -> None:
    root, script = tmp_path / "ck", TESTS / "swaps" / "state_script.py"
    calm = run(tmp_path / "calm", None, script, "everything", 11, options=FOUR_RANKS)
    whole = run(tmp_path / "a", root, script, "everything", 11, options=FOUR_RANKS)
    only(root, published(whole)[-2:][0])
    resumed = run(tmp_path / "b", root, script, "everything", 11, options=(*FOUR_RANKS, "--resume"))
    for done in (whole, resumed):
        for was, now in zip(by_rank(calm), by_rank(done), strict=True):
            assert {name for name in was if was[name] != now[name]} == set()


def by_rank(done: Done) -> list[dict[str, str]]:
    return [line["digests"] for line in sorted(lines(done), key=lambda line: line["rank"])]


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_is_named_once_and_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(tmp_path / "a", tmp_path / "file" / "ck", SWAPS, "fsdp", 11, options=TWO_RANKS)
    assert done.err.count("no checkpoint of step") == 1 and "Not a directory" in done.err
    assert {line["step"] for line in lines(done)} == {11}
    assert done.events("checkpoint") == []
