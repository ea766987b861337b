"""The worker to blame has the last word, and torchrun's error file is passed on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phoenix_launch.bootstrap import OutputSettings
from phoenix_launch.job.last_words import TAIL_LINES, files_about, summary, write_error_file
from phoenix_launch.job.placement import Seat
from phoenix_launch.job.state import Ended, Outcome, Rules, State
from phoenix_launch.messages import ExitReport
from phoenix_launch.supervision.console import KEPT, NOTHING_SHOWN
from phoenix_launch.wire import Generation


def failed(*, error: str = "", tail: str = "", oom_killed: bool = False) -> Outcome:
    report = ExitReport(code=7, age=0.0, error=error, tail=tail, oom_killed=oom_killed)
    return Outcome(
        exit_code=1, text="rank 3 on node1 exited with code 7", cause=Ended(rank=3, node=1, at=0.0, report=report)
    )


def test_a_job_that_ended_well_needs_no_words() -> None:
    assert summary(Outcome(exit_code=0, text="finished")) == ""


def test_the_workers_own_last_lines_come_last() -> None:
    lines = summary(failed(tail="Traceback\nValueError: no")).splitlines()
    assert "rank 3 on node1 exited with code 7" in lines[0]
    assert lines[-1] == "ValueError: no"


def test_what_stands_on_the_screen_already_is_not_shown_again_but_for_its_last_line() -> None:
    tail = "Traceback\n  in main\nValueError: no"
    lines = summary(failed(tail=tail), {}, f"a warning\n{tail}\n").splitlines()
    assert lines[-2:] == ["  last line of rank 3's stderr, which stands above:", "ValueError: no"]
    assert "Traceback" not in lines
    for shown in ("", "Traceback\n", f"{tail}\nmore\n"):
        assert summary(failed(tail=tail), {}, shown).splitlines()[-3:] == tail.splitlines()


def test_a_single_line_is_just_shown() -> None:
    assert summary(failed(tail="no\n"), {}, "no\n").splitlines()[-2:] == ["  last line of rank 3's stderr:", "no"]


@pytest.mark.parametrize(
    ("tail", "error", "torchrun", "expected"),
    [
        ("no", "", "", {"log": "/logs/node1/3.g2.err on node1"}),
        ("", "", "", {"log": "/logs/node1/3.g2.out on node1"}),
        ("no", "{}", "", {"log": "/logs/node1/3.g2.err on node1", "error file": "/logs/node1/3.g2.error.json on node1"}),
        ("no", "{}", "/t", {"log": "/logs/node1/3.g2.err on node1", "error file": "/t/attempt_1/1/error.json on node1"}),
    ],
)  # fmt: skip
def test_the_files_of_the_worker_to_blame_are_named(
    tail: str, error: str, torchrun: str, expected: dict[str, str]
) -> None:
    lineup = (Seat(0, 2), Seat(1, 2))
    rules = Rules(seats_min=2, seats_max=2)
    state = State(rules=rules, generation=Generation(1, 2), first=1, lineup=lineup)
    cause = failed(tail=tail, error=error).cause
    assert cause is not None
    output = OutputSettings(folder="/logs/node1", torchrun_folder=torchrun)
    assert files_about(cause, state, output, " on node1") == expected
    assert summary(failed(tail=tail), expected).splitlines()[1].startswith("  log: /logs/node1/3.g2")
    assert files_about(cause, state, OutputSettings(folder="/x", files=False)) == {}


def test_the_last_words_on_the_screen_are_those_of_one_worker() -> None:
    one, other = (3, Generation(1, 2)), (4, Generation(1, 2))
    last = NOTHING_SHOWN.followed_by(other, b"x\n").followed_by(one, b"a\n").followed_by(one, b"b\n")
    assert last.of(*one) == "a\nb\n"
    assert last.of(*other) == last.of(3, Generation(1, 1)) == ""
    assert len(last.followed_by(one, b"z" * 100_000).of(*one)) == KEPT


def test_only_the_end_of_a_long_stderr_is_shown() -> None:
    shown = summary(failed(tail="\n".join(str(n) for n in range(1000)))).splitlines()
    assert shown[-1] == "999"
    assert len(shown) < TAIL_LINES + 5


def test_an_out_of_memory_kill_is_named_only_with_evidence() -> None:
    assert "out-of-memory" in summary(failed(oom_killed=True))
    assert "out-of-memory" not in summary(failed())


def test_a_hint_stands_below_what_is_wrong() -> None:
    shown = summary(Outcome(exit_code=93, text="node1 lost", hint="give spares")).splitlines()
    assert shown[1] == "  hint: give spares"


def test_the_error_file_gets_the_exit_code_as_torchrun_writes_it(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "error.json"
    write_error_file(str(target), failed(error=json.dumps({"message": {"message": "no", "extraInfo": {}}})))
    assert json.loads(target.read_text()) == {"message": {"message": "no", "extraInfo": {}, "errorCode": 7}}


def test_an_error_message_that_is_a_plain_string_is_passed_on_as_it_is(tmp_path: Path) -> None:
    target = tmp_path / "error.json"
    write_error_file(str(target), failed(error='{"message": "no"}'))
    assert json.loads(target.read_text()) == {"message": "no"}


def test_without_an_error_file_of_the_worker_nothing_is_written(tmp_path: Path) -> None:
    target = tmp_path / "error.json"
    write_error_file(str(target), failed())
    write_error_file(str(target), failed(error="not json"))
    assert not target.exists()
