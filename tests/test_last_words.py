"""The worker to blame has the last word, and torchrun's error file is passed on."""

from __future__ import annotations

import json
from pathlib import Path

from phoenix_launch.job.last_words import TAIL_LINES, summary, write_error_file
from phoenix_launch.job.state import Ended, Outcome
from phoenix_launch.messages import ExitReport

LOGS = Path("/logs")


def failed(*, error: str = "", tail: str = "", oom_killed: bool = False) -> Outcome:
    report = ExitReport(code=7, age=0.0, error=error, tail=tail, oom_killed=oom_killed)
    return Outcome(
        exit_code=1, text="rank 3 on node1 exited with code 7", cause=Ended(rank=3, node=1, at=0.0, report=report)
    )


def test_a_job_that_ended_well_needs_no_words() -> None:
    assert summary(Outcome(exit_code=0, text="finished"), LOGS) == ""


def test_the_workers_own_last_lines_come_last() -> None:
    lines = summary(failed(tail="Traceback\nValueError: no"), LOGS).splitlines()
    assert "rank 3 on node1 exited with code 7" in lines[0]
    assert lines[-1] == "ValueError: no"


def test_only_the_end_of_a_long_stderr_is_shown() -> None:
    shown = summary(failed(tail="\n".join(str(n) for n in range(1000))), LOGS).splitlines()
    assert shown[-1] == "999"
    assert len(shown) < TAIL_LINES + 5


def test_an_out_of_memory_kill_is_named_only_with_evidence() -> None:
    assert "out-of-memory" in summary(failed(oom_killed=True), LOGS)
    assert "out-of-memory" not in summary(failed(), LOGS)


def test_a_hint_stands_below_what_is_wrong() -> None:
    shown = summary(Outcome(exit_code=93, text="node1 lost", hint="give spares"), LOGS).splitlines()
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
