"""Drills from a file and by a schedule on a job that runs, each waited for; jobs of a second or two."""

from __future__ import annotations

import re

import pytest

from phoenix_launch.cli import main
from tests.quick_jobs import Eventually, Ground
from tests.quick_jobs import ground as ground

PATIENT = """
import pathlib, threading
while not pathlib.Path("finish").exists():
    threading.Event().wait(0.05)
"""


def test_all_drills_of_a_file_are_done_one_after_the_other_and_told(ground: Ground, eventually: Eventually) -> None:
    options = ("--nodes", 2, "--spares", 1, "--allow-drills", "--max-restarts", 3)
    with ground.started(*options, ground.script(PATIENT)) as running:
        eventually(lambda: len(running.events("worker_started")) == 2, 20)
        plan = ground.folder / "drills.txt"
        plan.write_text("kill-worker --rank 1 # one\nkill-worker --rank 9\nkill-node --node 1\n")
        done = ground.run("drill", "--plan", plan, "--patience", 30)
        assert done.code == 1, "one of them could not be done"
        first, second, third, last = done.out.splitlines()
        assert first.startswith("kill-worker rank 1 on node1: detected in ") and ", recovered in " in first
        assert second == "kill-worker: there is no rank 9"
        assert third.startswith("kill-node node1 (rank 1): detected in ") and ", recovered in " in third
        assert last.startswith("2 of 3 drills recovered, ")
        again = ground.run("inject-fault", "kill-worker", "--mtbf", 0.2, "--count", 2, "--seed", 4)
        assert again.code == 0
        assert [line.split(" s  ")[1].startswith("kill-worker rank ") for line in again.out.splitlines()] == [True] * 2
        shown = [ground.run("inject-fault", "kill-worker", "--mtbf", 9, "--seed", 4, "--dry-run").out for _ in range(2)]
        assert shown[0] == shown[1] and shown[0].count("would kill-worker rank ") == 5
        (ground.folder / "finish").touch()
        running.wait()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("drill",), "drill needs a file of drills"),
        (("drill", "--plan", "none.txt"), "none.txt cannot be read"),
        (("inject-fault", "hang", "--every", "x"), "--every 'x': must be seconds, more than 0"),
        (("inject-fault", "hang", "--every", "1", "--mtbf", "2"), "two ways to say when"),
        (("inject-fault", "hang", "--rank", "0", "--count", "2"), "--count belongs to --every or --mtbf"),
        (("inject-fault", "hang", "--mtbf", "1", "--count", "0"), "--count '0': must be a whole number"),
        (("inject-fault", "hang", "--mtbf", "1", "--seed", "1.5"), "--seed '1.5': must be a whole number"),
        (("inject-fault", "hang", "--mtbf", "1", "--node", "1"), "hang harms one rank, not a node"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line_and_a_hint(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"phoenix-run: .+\n  hint: .+\n", shown.err), shown.err
    assert said in shown.err
