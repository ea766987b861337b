"""A job's folder is private and whole, and a command without a job's name finds the one that is meant."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from phoenix_launch.errors import PhoenixError, UsageError
from phoenix_launch.process_table import start_time
from phoenix_launch.records.folders import (
    ClientKeys,
    JobFolder,
    JobNode,
    JobRecord,
    all_jobs,
    choose,
    is_running,
    jobs_root,
    new_job_id,
    settings_document,
    wait_for_end,
)
from phoenix_launch.records.view import JobLine, command_shown, jobs_text, status_text
from phoenix_launch.settings import RunSettings
from phoenix_launch.status import JobState, JobStatus, NodeStatus, RankStatus, decode_status, encode_status
from phoenix_launch.wording import rank_ranges

Make = Callable[..., JobFolder]


def record(job: str, pid: int, created: float = 1.0, **changes: object) -> JobRecord:
    made = JobRecord(
        job=job,
        created=created,
        hostname=socket.gethostname(),
        pid=pid,
        start_time=start_time(pid) or 0,
        control_endpoint="tcp://127.0.0.1:1",
        server_key="k" * 40,
        argv=("phoenix-run", "train.py"),
        cwd="/",
        settings=settings_document(RunSettings(script="train.py", redirects={0: 3})),
        nodes=(JobNode("node0", 0, "", sys.executable, "/nowhere"),),
    )
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def root(phoenix_home: Path) -> Path:
    return jobs_root(os.environ)


@pytest.fixture
def make(root: Path) -> Make:
    """`make("job", pid, created)`: a job whose supervisor is that process; pid 0: it is gone."""

    def made(job: str, pid: int = 0, created: float = 1.0, state: JobState | None = None) -> JobFolder:
        folder = JobFolder.create(root, job)
        folder.write_record(record(job, pid or os.getpid(), created, **({} if pid else {"start_time": 1})))
        if state is not None:
            folder.write_status(JobStatus(job=job, state=state))
        return folder

    return made


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait()


def test_jobs_are_kept_in_the_state_folder_of_the_user() -> None:
    assert jobs_root({"PHOENIX_HOME": "/a", "XDG_STATE_HOME": "/b", "HOME": "/c"}) == Path("/a/jobs")
    assert jobs_root({"XDG_STATE_HOME": "/b", "HOME": "/c"}) == Path("/b/phoenix/jobs")
    assert jobs_root({"HOME": "/c"}) == Path("/c/.local/state/phoenix/jobs")


@pytest.mark.parametrize(
    ("script", "name", "start"),
    [
        ("examples/train_gpt.py", "", "train_gpt-"),
        ("pkg.sub.train", "", "train-"),
        ("/x/ä b.py", "", "b-"),
        ("/x/...", "", "job-"),
        ("a.py", "exp.1", "exp.1-"),
    ],
)
def test_a_job_is_called_after_its_script_and_four_digits(tmp_path: Path, script: str, name: str, start: str) -> None:
    job = new_job_id(script, tmp_path, name)
    assert job.startswith(start)
    assert len(job) == len(start) + 4
    assert int(job[-4:], 16) >= 0


def test_a_job_id_is_never_given_twice(tmp_path: Path) -> None:
    class Taken(type(tmp_path)):  # type: ignore[misc]
        def exists(self, **_: object) -> bool:
            return len(self.name) <= len("a-1234")

    assert len(new_job_id("a.py", Taken(tmp_path))) == len("a-123456")


def test_only_the_owner_can_look_into_a_jobs_folder(make: Make) -> None:
    folder = make("a-1")
    folder.write_client_keys("control", ClientKeys("p", "s"))
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.path.rglob("*")}
    assert modes == {"keys": 0o700, "logs": 0o700, "control.json": 0o600, "job.json": 0o600}


def test_what_is_written_is_read_again(make: Make) -> None:
    folder = make("a-1", os.getpid(), state=JobState.RUNNING)
    assert folder.read_record() == record("a-1", os.getpid())
    assert msgspec.convert(folder.read_record().settings, RunSettings, strict=False) == RunSettings(
        script="train.py", redirects={0: 3}
    )
    assert folder.read_status() == JobStatus(job="a-1", state=JobState.RUNNING)
    folder.write_client_keys("status", ClientKeys("p", "s"))
    assert folder.read_client_keys("status") == ClientKeys("p", "s")
    assert sorted(path.name for path in folder.path.iterdir()) == ["job.json", "keys", "logs", "status.json"]


def test_a_folder_that_cannot_be_made_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*file/jobs/a-1: Not a directory") as error:
        JobFolder.create(tmp_path / "file" / "jobs", "a-1")
    assert "PHOENIX_HOME" in error.value.hint


def test_a_folder_in_which_nothing_can_be_written_is_a_users_mistake(make: Make) -> None:
    folder = make("a-1")
    (folder.path / "status.json").mkdir()
    with pytest.raises(UsageError, match=r"cannot write .*status\.json: Is a directory"):
        folder.write_status(JobStatus(job="a-1", state=JobState.RUNNING))
    assert not list(folder.path.glob(".*")), "the half-written file is gone"


def test_a_damaged_record_is_said_to_be_one(make: Make) -> None:
    folder = make("a-1")
    (folder.path / "job.json").write_text("{")
    with pytest.raises(PhoenixError, match="the record of job a-1 cannot be read"):
        folder.read_record()
    assert all_jobs(folder.path.parent) == []


def test_missing_keys_say_who_could_talk_to_the_job(make: Make) -> None:
    with pytest.raises(PhoenixError, match="the control key of job a-1") as error:
        make("a-1").read_client_keys("control")
    assert "only the user who started" in error.value.hint


def test_a_supervisor_is_known_by_pid_and_start_time(process: subprocess.Popen[bytes]) -> None:
    living = record("a-1", process.pid)
    assert is_running(living)
    assert not is_running(msgspec.structs.replace(living, start_time=living.start_time - 1)), "the pid was given away"
    process.kill()
    process.wait()
    assert not is_running(living)


def test_a_supervisor_that_nobody_has_reaped_does_not_run(process: subprocess.Popen[bytes]) -> None:
    living = record("a-1", process.pid)
    process.send_signal(signal.SIGKILL)
    assert wait_for_end(living, 10.0)


def test_a_supervisor_on_another_host_runs_when_its_port_is_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        there = record("a-1", os.getpid(), hostname="elsewhere", control_endpoint=f"tcp://127.0.0.2:{port}")
        here = msgspec.structs.replace(there, control_endpoint=f"tcp://127.0.0.1:{port}")
        assert not is_running(here), "that is its own loopback, not ours"
    assert not is_running(there)
    with socket.create_server(("127.0.0.2", port)):
        assert is_running(there)


def test_waiting_for_a_job_to_end_is_bounded(process: subprocess.Popen[bytes]) -> None:
    assert wait_for_end(record("a-1", process.pid), 0.01) is False


def test_the_job_that_runs_is_meant(make: Make, root: Path) -> None:
    make("old-1", os.getpid(), 1.0)
    make("new-1", 0, 2.0)
    assert choose(root).job == "old-1"


def test_else_the_newest_is_meant(make: Make, root: Path) -> None:
    make("new-1", 0, 2.0)
    make("old-1", 0, 1.0)
    assert choose(root).job == "new-1"


def test_a_job_that_said_its_last_word_does_not_run(make: Make, root: Path) -> None:
    make("old-1", os.getpid(), 1.0)
    make("new-1", os.getpid(), 2.0, JobState.FINISHED)
    assert choose(root).job == "old-1"


def test_with_several_running_one_must_be_named(make: Make, root: Path) -> None:
    make("a-1", os.getpid(), 1.0)
    make("b-1", os.getpid(), 2.0)
    make("c-1", 0, 3.0)
    with pytest.raises(UsageError, match="2 jobs are running") as error:
        choose(root)
    assert error.value.hint == "running: b-1, a-1"
    assert choose(root, "c-1").job == "c-1"


@pytest.mark.parametrize("job", ["c-1", "../jobs/a-1", ".", "..", "a-1/"])
def test_an_unknown_job_lists_those_that_exist(make: Make, root: Path, job: str) -> None:
    make("a-1", 0, 1.0)
    make("b-1", 0, 2.0)
    with pytest.raises(UsageError, match="there is no job") as error:
        choose(root, job)
    assert error.value.hint == "jobs: b-1, a-1"


def test_a_long_list_of_jobs_names_the_newest(make: Make, root: Path) -> None:
    for number in range(25):
        make(f"j-{number}", 0, float(number))
    with pytest.raises(UsageError) as error:
        choose(root, "x")
    assert error.value.hint.startswith("jobs: j-24, j-23, ") and error.value.hint.endswith("j-5 and 5 older ones")


def test_without_any_job_it_says_where_it_looked(root: Path) -> None:
    for job in ("", "x"):
        with pytest.raises(UsageError) as error:
            choose(root, job)
        assert str(root) in error.value.hint


def full_status(ranks: int = 2) -> JobStatus:
    return JobStatus(
        job="a-1",
        state=JobState.RUNNING,
        generation=2,
        step=7,
        nodes=(
            NodeStatus(index=0, name="node0", role="training", state="ready", spares=0),
            NodeStatus(index=1, name="node1", role="spare", state="ready", spares=2),
        ),
        ranks=tuple(
            RankStatus(rank=rank, node="node0", pid=100 + rank, state="running", step=7) for rank in range(ranks)
        ),
    )


def test_the_status_document_has_the_fields_of_schema_1() -> None:
    document = msgspec.json.decode(encode_status(full_status()))
    assert {
        "schema",
        "job",
        "state",
        "term",
        "generation",
        "step",
        "goodput",
        "redundancy",
        "exit_code",
        "nodes",
    } <= set(document)
    assert {"ranks", "last_swap"} <= set(document)
    assert (document["schema"], document["state"], document["last_swap"]) == (1, "running", None)
    assert {"index", "name", "role", "state", "spares"} <= set(document["nodes"][0])
    assert {"rank", "node", "pid", "state", "step"} <= set(document["ranks"][0])


def test_a_later_version_of_the_document_can_be_read() -> None:
    document = msgspec.json.decode(encode_status(full_status())) | {"something_new": 1}
    assert decode_status(msgspec.json.encode(document)) == full_status()
    with pytest.raises(PhoenixError, match="the status cannot be read"):
        decode_status(b'{"job": 1}')


def test_the_view_shows_job_nodes_and_ranks() -> None:
    assert status_text(full_status()).splitlines() == [
        "job a-1, running, generation 2, step 7",
        "NODE   ROLE      STATE  RANKS  PROCESSES  SPARES",
        "node0  training  ready  0-1    2 running  0",
        "node1  spare     ready                    2",
        "RANK  NODE   PID  STATE    STEP",
        "0     node0  100  running  7",
        "1     node0  101  running  7",
    ]


def test_many_ranks_are_summed_up_by_node() -> None:
    text = status_text(full_status(ranks=1000))
    assert "0-999" in text and len(text.splitlines()) == 4


def test_ranks_are_shown_as_ranges() -> None:
    assert rank_ranges([3, 0, 1, 2, 8, 10, 11]) == "0-3,8,10-11"
    assert rank_ranges([]) == ""


def test_steps_are_shown_only_where_some_rank_tells_its_own() -> None:
    silent = tuple(msgspec.structs.replace(rank, step=None) for rank in full_status().ranks)
    shown = status_text(msgspec.structs.replace(full_status(), ranks=silent, step=None))
    assert "STEP" not in shown and shown.splitlines()[-2:] == ["0     node0  100  running", "1     node0  101  running"]
    one = (silent[0], full_status().ranks[1])
    assert "RANK  NODE   PID  STATE    STEP" in status_text(msgspec.structs.replace(full_status(), ranks=one))


def test_a_stopped_job_is_not_said_to_have_failed() -> None:
    stopped = JobStatus(
        job="a-1", state=JobState.FAILED, exit_code=143, reason="stopped by signal 15", stopped_by="SIGTERM"
    )
    assert status_text(stopped) == "job a-1, stopped by SIGTERM, generation 0, exit code 143"
    assert msgspec.json.decode(encode_status(stopped))["state"] == "failed"


def test_the_command_of_a_job_begins_with_its_script() -> None:
    def shown(*argv: str, script: str = "/home/u/train.py", args: tuple[str, ...] = ()) -> str:
        return command_shown(script, args, ("/opt/env/bin/phoenix-run", *argv))

    assert shown("/home/u/train.py") == "train.py"
    assert shown("--nodes", "2", "/home/u/train.py", "--lr", "a b", args=("--lr", "a b")) == (
        "train.py --lr 'a b'  (--nodes 2)"
    )
    assert shown("run", "-m", "--", "pkg.train", "--", script="pkg.train", args=("--",)) == "pkg.train --  (-m)"
    assert shown("x", "two\nlines", script="x", args=("two\nlines",)) == "x 'two lines'"
    assert shown("--nodes", "2", script="") == "--nodes 2", "the record of a later version"


def test_jobs_fit_on_a_screen_of_eighty_columns() -> None:
    now = 1_800_000_000.0
    lines = [
        JobLine("train_gpt-7f3a", "orphaned", now - 1, 143, 16, "train_gpt.py " + "--more " * 20),
        JobLine("old-1", "finished", now - 1e8, 0, 1, "old.py"),
    ]
    heading, first, second = jobs_text(lines, now, columns=80).split("\n")
    assert len(first) == 80 and "train_gpt.py" in first and first.endswith("...")
    assert first.index("train_gpt.py") == heading.index("COMMAND") == second.index("old.py")
    assert "..." not in jobs_text(lines, now)
    long = JobLine("x" * 70, "running", now, None, 2, "train_gpt.py --lr 3e-4")
    assert jobs_text([long], now, columns=80).split("\n")[1].endswith("train_gpt.py ..."), "never less than the script"


def test_a_job_has_ended_when_it_said_so(make: Make) -> None:
    assert make("a-1").ended_at() is None
    assert make("b-1", state=JobState.RUNNING).ended_at() is None
    ended = make("c-1", state=JobState.FINISHED)
    assert ended.ended_at() == (ended.path / "status.json").stat().st_mtime
    ended.write_status(JobStatus(job="c-1", state=JobState.FAILED, as_of=5.0))
    assert ended.ended_at() == 5.0


def test_the_keys_of_a_job_can_be_thrown_away_twice(make: Make) -> None:
    folder = make("a-1")
    folder.write_client_keys("control", ClientKeys("p", "s"))
    folder.remove_client_keys()
    folder.remove_client_keys()
    assert sorted(path.name for path in folder.path.iterdir()) == ["job.json", "logs"]
