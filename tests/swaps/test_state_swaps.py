"""Whatever training state can be, it is the same bit for bit after failures; each part is compared by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jobs_under_test
import pytest
from swap_jobs import SECONDS, job

pytestmark = pytest.mark.timeout(600)  # jobs with many swaps

HERE = Path(__file__).parent
EVERYTHING, SECTIONS = HERE / "state_script.py", HERE / "section_script.py"
IN_PLACE, FROM_SLOTS, FROM_SCRIPT = 1, 2, 3
STEPS = 15
ONE_THREAD = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
PARTS = (
    "the parameters", "the norm's buffers", "the buffer that is not persistent", "the first optimizer",
    "the second optimizer's tensors and values", "the learning rates", "the schedulers", "the scaler", "the average",
    "the named generators", "the global generators", "the plain values", "the batches to come",
    "the batches of torchdata's loader",
)  # fmt: skip
# A step that is done again in place, one whose optimizers the scaler leaves out, a section, a copy window, a node.
FAULTS = ("between,0,2", "optimizer,3,4", "in section,3,8", "before-optimizer,1,11", "node,2,13")

Said = dict[int, dict[str, Any]]  # by rank, what the script printed at its end


def said(out: str) -> Said:
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {line["rank"]: line for line in lines}


@pytest.fixture(scope="module")
def words() -> list[str]:
    """What the two jobs below wrote to stderr."""
    return []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> Said:
    found = job("everything", STEPS, tmp_path_factory.mktemp("undisturbed"), script=EVERYTHING, env=ONE_THREAD)
    assert found.swaps == []
    words.append(found.done.err)
    return said(found.done.out)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> Said:
    found = job(
        "everything", STEPS, tmp_path_factory.mktemp("disturbed"), script=EVERYTHING, faults=FAULTS, env=ONE_THREAD
    )
    assert len(found.swaps) == len(FAULTS)
    assert found.rungs[0] == found.rungs[-1] == IN_PLACE and found.rungs[2] == FROM_SLOTS
    words.append(found.done.err)
    return said(found.done.out)


@pytest.mark.parametrize("part", PARTS)
def test_after_failures_it_is_the_same_bit_for_bit(part: str, undisturbed: Said, disturbed: Said) -> None:
    assert {rank: line["digests"][part] for rank, line in disturbed.items()} == {
        rank: line["digests"][part] for rank, line in undisturbed.items()
    }


def test_every_part_is_compared(undisturbed: Said) -> None:
    assert sorted(undisturbed) == [0, 1, 2, 3]
    assert all(tuple(line["digests"]) == PARTS for line in undisturbed.values())
    own = {line["digests"]["the global generators"] for line in undisturbed.values()}
    assert len(own) == 4, "each rank draws its own numbers"


def test_what_ranks_do_not_share_though_ddp_says_so_is_each_ranks_own(
    undisturbed: Said, disturbed: Said, words: list[str]
) -> None:
    assert len({line["digests"]["the parameters"] for line in undisturbed.values()}) == 4
    assert disturbed.keys() == undisturbed.keys()
    said = "model.module.head.bias should be equal on ranks 0-3 and is not: from now on each rank's own is copied"
    assert [text.count(said) for text in words] == [1, 1]


def test_survivors_are_told_of_each_swap_and_replacements_of_none(undisturbed: Said, disturbed: Said) -> None:
    assert all(
        (line["swapped"], line["generation"], line["resilient"]) == ([], 1, True) for line in undisturbed.values()
    )
    last = disturbed[0]["generation"]
    assert all(line["generation"] == last >= len(FAULTS) for line in disturbed.values())
    for rank in (0, 1):
        assert disturbed[rank]["swapped"][-1] == last
    for rank in (2, 3):  # of the node that was lost last
        assert disturbed[rank]["swapped"] == []


def launched(command: Sequence[object], steps: int) -> Said:
    done = subprocess.run(
        [*map(str, command), str(EVERYTHING), "everything", str(steps)], env=jobs_under_test.environment(HERE, ONE_THREAD),
        capture_output=True, text=True, timeout=2 * SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return said(done.stdout)


@pytest.mark.slow
def test_torchrun_gives_the_same_bits(undisturbed: Said) -> None:
    theirs = launched([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 4], STEPS)
    assert {rank: line["digests"] for rank, line in theirs.items()} == {
        rank: line["digests"] for rank, line in undisturbed.items()
    }
    for line in theirs.values():
        assert (line["backend"], line["resilient"], line["generation"], line["swapped"]) == ("gloo", False, 0, [])


@pytest.mark.slow
def test_plain_python_gives_the_bits_of_a_job_of_one(tmp_path: Path) -> None:
    steps = 9
    ours = jobs_under_test.run(tmp_path, EVERYTHING, "everything", steps, env=ONE_THREAD, seconds=SECONDS)
    assert ours.code == 0, ours.err
    alone = launched([sys.executable], steps)
    assert alone[0]["digests"] == said(ours.out)[0]["digests"]
    assert (alone[0]["resilient"], alone[0]["generation"]) == (False, 0)


# --- sections ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sections_are_repeated_or_passed_wherever_a_rank_dies(tmp_path: Path) -> None:
    """Before the first step; in the step after a section, whose result rank 1 has to get; and rank 0, whose is too large to be
    kept; at a section; once more in the step after one."""
    faults = ["section,1,0", "stepped,1,3", "stepped,0,6", "section,3,9", "stepped,2,12"]
    quiet = job("large", 14, tmp_path / "quiet", script=SECTIONS, env=ONE_THREAD)
    found = job("large", 14, tmp_path / "faults", script=SECTIONS, faults=faults, env=ONE_THREAD)
    assert found.digests == quiet.digests and len(found.digests) == 4
    assert found.rungs == [FROM_SCRIPT, IN_PLACE, FROM_SLOTS, FROM_SLOTS, IN_PLACE]
    calm, lines = said(quiet.done.out), said(found.done.out)
    assert list(lines[2]["losses"]) == ["12"], "the last replacement passed one section"
    for rank, line in lines.items():
        assert line["losses"].items() <= calm[rank]["losses"].items()
    assert (
        "the result of the section 'evaluate' has 2097183 bytes, more than the 1048576 that are kept" in quiet.done.err
    )
    assert "rank 0 cannot be repaired in place: the result of the section 'evaluate' was too large" in found.done.err


@pytest.mark.slow
def test_a_result_that_cannot_be_pickled_is_an_error_of_the_script(tmp_path: Path) -> None:
    done = jobs_under_test.run(tmp_path, "--nproc-per-node", 2, SECTIONS, "lambda", 4, env=ONE_THREAD, seconds=SECONDS)
    assert done.code == 1
    assert "what the section 'evaluate' returns cannot be kept: " in done.err
    assert "hint: return plain values" in done.err
