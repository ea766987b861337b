"""The command line: where the script's words begin, what a mistake looks like, and what each verb says and does."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from phoenix_launch import __version__
from phoenix_launch.bus.keys import new_key_pair
from phoenix_launch.bus.supervisor import Peer, PeerKind, SupervisorBus
from phoenix_launch.cli import main
from phoenix_launch.cli.command import VERBS, load
from phoenix_launch.cli.completion import FILES, script
from phoenix_launch.cli.inject_fault import KINDS, RANKS, VALUED
from phoenix_launch.cli.showing import plain
from phoenix_launch.command_messages import Answer, DrillKind, FaultRequest, StatusReply, StatusRequest, StopRequest
from phoenix_launch.job import drills
from phoenix_launch.messages import Body
from phoenix_launch.options.table import OPTIONS
from phoenix_launch.process_table import start_time
from phoenix_launch.records.folders import (
    ClientKeys,
    JobFolder,
    JobNode,
    JobRecord,
    KeyKind,
    jobs_root,
    settings_document,
)
from phoenix_launch.records.journal import Journal
from phoenix_launch.records.log_reader import Follower, parse_name
from phoenix_launch.settings import RunSettings
from phoenix_launch.status import JobState, JobStatus, NodeStatus, RankStatus, encode_status
from phoenix_launch.timeouts import TIMEOUTS
from phoenix_launch.wire import Generation

ROOT = Path(__file__).parent.parent
Output = pytest.CaptureFixture[str]
LIMIT = 0.2  # seconds of processor time for --help and status, without a job to ask


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print(1)\n")
    return path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[RunSettings]:
    """What was launched instead of real jobs, which end with exit code 7."""
    settings: list[RunSettings] = []
    fake = ModuleType("phoenix_launch.supervision.launch")

    def launch(asked: RunSettings, environ: object) -> int:
        settings.append(asked)
        return 7

    fake.launch = launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "phoenix_launch.supervision.launch", fake)
    return settings


def refused(output: Output, *words: str) -> str:
    """What is shown for words that exit 2: one line and one hint, nothing else."""
    assert main(words) == 2
    shown = output.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"phoenix-run: .+\n  hint: .+\n", shown.err), shown.err
    return shown.err


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], ["--nodes", "3", "-h", "--"]),
        ([], ["--", "--x", "--"]),
        (["--"], ["--", "a b", ""]),
        (["run"], ["status"]),
        (["run", "--"], ["--version"]),
        (["--nodes", "1"], ["é\n'\"$x"]),
    ],
)
def test_everything_after_the_script_is_the_scripts(
    launched: list[RunSettings], train: Path, before: list[str], after: list[str]
) -> None:
    assert main([*before, str(train), *after]) == 7
    assert launched[0].script == str(train)
    assert launched[0].script_args == tuple(after)


def test_a_verb_is_one_only_in_the_first_place(
    launched: list[RunSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "status").write_text("")
    for words in (["run", "status"], ["--", "status"], ["--nodes", "1", "status"], ["./status"]):
        assert main(words) == 7
    assert {settings.script for settings in launched} == {"status", "./status"}


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--nproc", "--nproc-per-node"),
        ("--rdzv_en", "--rdzv-endpoint"),
        ("--max-restart", "--max-restarts"),
        ("--heartbeet-timeout", "--heartbeat-timeout"),
        ("--masterport=5", "--master-port"),
        ("--stand-alone", "--standalone"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest(output: Output, train: Path, word: str, meant: str) -> None:
    shown = refused(output, word, str(train))
    assert f"there is no option {word.partition('=')[0].replace('_', '-')}\n" in shown
    assert f"did you mean {meant}?" in shown


def test_an_option_like_no_other_points_to_the_help(output: Output) -> None:
    assert "see `phoenix-run --help`" in refused(output, "--qqqqq", "x")
    assert "see `phoenix-run status --help`" in refused(output, "status", "--qqqqq")
    assert "did you mean --json?" in refused(output, "status", "--jsn")


def test_an_option_without_its_value_is_one_line(output: Output) -> None:
    assert "hint: give it one: --nodes N|HOSTS" in refused(output, "--nodes")
    assert "hint: write --standalone alone" in refused(output, "--standalone=1", "x")
    shown = refused(output, "keygen", "now")
    assert "unexpected extra argument" in shown and "hint: leave it out: phoenix-run keygen [OPTIONS]" in shown
    assert "hint: for example phoenix-run inject-fault kill-worker --rank 0" in refused(output, "inject-fault")


@pytest.fixture
def output(capsys: Output) -> Output:
    return capsys


# --- scripts that cannot run -----------------------------------------------------------------------------------------


def test_without_a_script_the_usage_is_shown(output: Output) -> None:
    assert "[OPTIONS] SCRIPT [ARGS...]" in refused(output)
    assert "no SCRIPT is given" in refused(output, "--nodes", "2")


def test_a_missing_script_is_said_to_be_missing(output: Output, tmp_path: Path) -> None:
    assert f"there is no script {tmp_path}/none.py" in refused(output, f"{tmp_path}/none.py")
    (tmp_path / "there.py").write_text("")
    assert f"did you mean {tmp_path}/there.py?" in refused(output, f"{tmp_path}/there")
    assert "--no-python" in refused(output, "sh")


def test_a_misspelt_verb_is_no_script(output: Output) -> None:
    assert "did you mean `phoenix-run status`?" in refused(output, "statsu")


def test_a_host_file_that_is_not_there_is_said_before_anything_is_loaded(
    output: Output, launched: list[RunSettings], train: Path, tmp_path: Path
) -> None:
    for words in ([], ["config"]):
        assert "cannot read the host file" in refused(output, *words, "--hostfile", f"{tmp_path}/none", str(train))
    assert launched == []


def test_a_folder_is_no_script(output: Output, tmp_path: Path) -> None:
    assert "is a folder" in refused(output, str(tmp_path))
    assert "is no file" in refused(output, "/dev/null")


def test_a_script_that_cannot_be_read_is_named(output: Output, train: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # root reads everything

        def denied(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("builtins.open", denied)
    else:
        train.chmod(0)
    assert f"{train} cannot be read: Permission denied" in refused(output, str(train))


@pytest.mark.parametrize(
    ("text", "place"),
    [("x = 1\nif x\n    y\n", ":2: expected ':'"), ("a\0b", ": source code string cannot contain null")],
)
def test_a_syntax_error_is_shown_with_its_line(output: Output, train: Path, text: str, place: str) -> None:
    train.write_text(text)
    assert f"{train}{place}" in refused(output, str(train))
    assert f"{train}{place}" in refused(output, "--nodes", "h1,h2", str(train)), "it is the same script on all hosts"


def test_warnings_of_the_compiler_are_left_to_the_workers(
    output: Output, launched: list[RunSettings], train: Path
) -> None:
    train.write_text("assert (1, 'x')\n'\\d'\n")
    assert main([str(train)]) == 7
    assert output.readouterr().err == ""


def test_what_is_no_script_is_not_read_as_one(output: Output, launched: list[RunSettings]) -> None:
    assert main(["-m", "some.module"]) == main(["--no-python", "sh"]) == 7
    assert main(["--no-python", "--nodes", "h1", "only-there"]) == 7
    assert "there is no program nowhere-to-be-found" in refused(output, "--no-python", "nowhere-to-be-found")


# --- help, version, config, keygen, completion -----------------------------------------------------------------------


def test_the_help_shows_every_option_and_verb(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["--help"]) == main(["-h"]) == main(["run", "--help"]) == 0
    text = " ".join(output.readouterr().out.split())
    for option in OPTIONS:
        assert option.flag in text and option.help in text
    for verb in VERBS:
        assert verb in text
    for heading in ("What runs:", "Hosts:", "torchrun compatibility:", "Failures:", "Output:"):
        assert heading in text


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_begins_with_its_docstring(output: Output, verb: str) -> None:
    assert (load(verb).help or "").splitlines()[0] == VERBS[verb]
    assert main([verb, "--help"]) == 0
    assert VERBS[verb] in " ".join(output.readouterr().out.split())


def test_the_version_is_the_packages(output: Output) -> None:
    assert main(["--version"]) == 0
    assert output.readouterr().out == f"phoenix-run {__version__}\n"


def test_config_shows_where_each_value_comes_from(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    assert main(["config", "--nodes", "2"]) == 0
    rows = [re.split(r"  +", line) for line in output.readouterr().out.splitlines()]
    assert ["nodes", "2", "flag"] in rows
    assert ["max-restarts", "3", "PET_MAX_RESTARTS"] in rows
    assert ["role", "default", "default"] in rows
    assert [row[0] for row in rows[1:]] == [option.name for option in OPTIONS]


def test_config_refuses_what_a_run_would_refuse(output: Output) -> None:
    assert "--no-python and --module" in refused(output, "config", "--no-python", "-m", "x")


def test_config_shows_the_table_of_timeouts(output: Output) -> None:
    assert main(["config", "--timeouts", "--orphan-timeout", "99"]) == 0
    rows = [re.split(r"  +", line) for line in output.readouterr().out.splitlines()]
    assert ["orphan", "99", "--orphan-timeout", TIMEOUTS["orphan"].meaning] in rows
    assert set(TIMEOUTS) <= {row[0] for row in rows}


def test_config_writes_the_tables_of_a_document(output: Output) -> None:
    assert main(["config", "--markdown"]) == 0
    lines = output.readouterr().out.splitlines()
    assert len(lines) == len(OPTIONS) + 2
    assert all(re.search(r"(?<!\\)\|", line[1:-1]) and line.count(" | ") == 2 for line in lines)


def test_each_key_is_new_and_long_enough(output: Output) -> None:
    assert main(["keygen"]) == main(["keygen"]) == 0
    first, second = output.readouterr().out.split()
    assert first != second and re.fullmatch(r"[0-9a-f]{64}", first)


@pytest.mark.parametrize("shell", FILES)
def test_the_completions_are_current(output: Output, shell: str) -> None:
    assert main(["completion", shell]) == 0
    made = output.readouterr().out
    assert made == script(shell) == (ROOT / "completions" / FILES[shell]).read_text(), (
        f"phoenix-run completion {shell} > completions/{FILES[shell]}"
    )
    if program := shutil.which(shell):
        subprocess.run([program, "-n", str(ROOT / "completions" / FILES[shell])], check=True, timeout=20)


def test_the_faults_that_are_named_are_those_that_there_are() -> None:
    assert set(KINDS) == {kind.value for kind in DrillKind}
    assert {kind.value for kind in drills.RANKS} == set(RANKS)
    assert {kind.value for kind in drills.VALUED} == set(VALUED)


def test_an_unknown_shell_lists_those_that_are_known(output: Output) -> None:
    assert "bash, zsh, fish" in refused(output, "completion", "csh")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nodes", "2", "--pre"], {"--preload", "--prefix"}),
        (["st"], {"status", "stop"}),
        (["--prefix", "a"], {"auto", "always"}),
        (["inject-fault", "kill-w"], {"kill-worker"}),
        (["status", "jo"], {"job-1"}),
        (["inject-fault", "kill-node", "--job", ""], {"job-1"}),
        (["inject-fault", "kill-node", "--node", "1", "jo"], {"job-1"}),
        (["inject-fault", ""], set(KINDS)),
        (["--nodes", ""], set()),
        (["setup.py", "--nod"], set()),
    ],
)
def test_bash_completes(phoenix_home: Path, tmp_path: Path, words: list[str], expected: set[str]) -> None:
    (phoenix_home / "jobs" / "job-1").mkdir(parents=True)
    line = ["phoenix-run", *words]
    typed = " ".join(f"'{word}'" for word in line)
    program = f"source {ROOT}/completions/phoenix-run.bash; COMP_WORDS=({typed}); COMP_CWORD={len(line) - 1}; "
    program += '_phoenix_run; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=20, check=False
    )
    assert (set(done.stdout.split()), done.stderr) == (expected, "")


def measured(*words: str) -> tuple[float, set[str]]:
    """Processor seconds of a fresh interpreter that runs these words, the best of thirty, and what it has imported."""
    program = (
        "import sys, os; sys.argv[1:] = sys.argv[1:]\n"
        "from phoenix_launch.cli import main\n"
        "code = main(); sys.stdout.flush()\n"
        "used = os.times()\n"
        "print(code, used.user + used.system, *sys.modules, file=sys.stderr)"
    )
    best, modules = 1e9, set()
    for _ in range(30):  # a busy machine makes the same work take longer
        done = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60, check=True
        )
        code, seconds, *names = done.stderr.split()
        assert code == "0"
        best, modules = min(best, float(seconds)), set(names)
        if best < LIMIT:
            break
    return best, modules


@pytest.mark.parametrize("words", [["--help"], ["status"], ["jobs"], ["completion", "bash"]])
def test_commands_are_quick_and_import_no_torch(phoenix_home: Path, words: list[str]) -> None:
    folder = JobFolder.create(jobs_root(os.environ), "job-1")
    folder.write_record(record(os.getpid(), start_time=1))
    seconds, modules = measured(*words)
    assert seconds < LIMIT
    assert not {"torch", "numpy", "zmq", "rich", "psutil", "phoenix_runtime"} & modules


def test_asking_a_supervisor_is_quick_and_loads_its_own_end_of_the_bus_only(supervisor: Supervisor) -> None:
    """Neither what only a supervisor needs (asyncio, ssl, logging), nor what only other commands do (click)."""
    seconds, modules = measured("status")
    assert seconds < LIMIT
    assert "zmq" in modules
    assert not {"torch", "asyncio", "ssl", "logging", "hashlib", "rich", "psutil", "click"} & modules
    assert not {"phoenix_launch.messages", "phoenix_launch.bus.supervisor", "phoenix_launch.bus.agent"} & modules


def test_what_status_reads_without_click_it_reads_as_click_does() -> None:
    """All lines of up to three words; those that it leaves to click are no concern here."""
    words = ("--json", "--watch", "job-1", "job-2", "", "-", "--", "-h", "--jsn", "--json=1", "--no-watch")
    read = {line: wish for count in range(4) for line in product(words, repeat=count) if (wish := plain(line))}
    assert {(), ("--json",), ("job-1",), ("job-1", "--watch"), ("--watch", "job-1", "--json")} <= set(read)
    for line, wish in read.items():
        assert load("status").make_context("status", [*line]).params == wish._asdict(), line


# --- verbs about jobs ------------------------------------------------------------------------------------------------


def record(pid: int, **changes: object) -> JobRecord:
    made = JobRecord(
        job="job-1",
        created=time.time(),
        hostname=os.uname().nodename,
        pid=pid,
        start_time=start_time(pid) or 0,
        control_endpoint="tcp://127.0.0.1:1",
        server_key="k" * 40,
        argv=("phoenix-run", "train.py"),
        cwd="/",
        settings=settings_document(RunSettings(script="train.py", nproc_per_node="2", shutdown_timeout=0)),
        nodes=(JobNode("node0", 0, "", sys.executable, ""),),
    )
    return msgspec.structs.replace(made, **changes)


@dataclass
class Supervisor:
    """A process that stands for the supervisor, and a thread that answers in its place. `asked`: what it was asked."""

    folder: JobFolder
    process: subprocess.Popen[bytes]
    answers: Callable[[Body], Body | None]
    asked: list[tuple[PeerKind, Body]] = field(default_factory=list)
    _up: threading.Event = field(default_factory=threading.Event)
    _leave: threading.Event = field(default_factory=threading.Event)

    def serve(self) -> None:
        bus = SupervisorBus("job-1", new_key_pair(), "127.0.0.1")
        for kind, peer in (("status", PeerKind.STATUS), ("control", PeerKind.CONTROL)):
            keys = new_key_pair()
            bus.allow(keys.public, Peer(peer))
            self.folder.write_client_keys(kind, ClientKeys(keys.public, keys.secret))  # type: ignore[arg-type]
        place = {"control_endpoint": bus.control_endpoint, "server_key": bus.keys.public}
        nodes = (JobNode("node0", 0, "", sys.executable, str(self.folder.logs_path / "node0")),)
        self.folder.write_record(record(self.process.pid, nodes=nodes, **place))
        self._up.set()
        while not self._leave.is_set():
            if bus.control.poll(20) and (received := bus.receive()):
                self.asked.append((received.peer.kind, received.envelope.body))
                if answer := self.answers(received.envelope.body):
                    bus.answer(received.route, answer)
        bus.close()

    def end(self, exit_code: int) -> None:
        state = JobState.FAILED if exit_code else JobState.FINISHED
        self.folder.write_status(JobStatus(job="job-1", state=state, exit_code=exit_code))
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Supervisor:
        self._thread = threading.Thread(target=self.serve)
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join(10)
        self.process.kill()
        self.process.wait()


RUNNING = JobStatus(
    job="job-1",
    state=JobState.RUNNING,
    generation=1,
    ranks=(RankStatus(rank=0, node="node0", pid=4, state="running"),),
)


def answer(body: Body) -> Body | None:
    if isinstance(body, StatusRequest):
        return StatusReply(encode_status(RUNNING).decode())
    if isinstance(body, FaultRequest):
        return Answer(not body.dry_run, f"{body.kind.value} as asked" if not body.dry_run else "drills are not allowed")
    return Answer(True)


@pytest.fixture
def supervisor(phoenix_home: Path) -> Iterator[Supervisor]:
    folder = JobFolder.create(jobs_root(os.environ), "job-1")
    with Supervisor(folder, subprocess.Popen(["sleep", "60"]), answer) as running:
        yield running


@pytest.fixture
def ended(phoenix_home: Path) -> JobFolder:
    """A job whose supervisor is gone."""
    folder = JobFolder.create(jobs_root(os.environ), "job-1")
    nodes = (JobNode("node0", 0, "", "", str(folder.logs_path / "node0")),)
    folder.write_record(record(os.getpid(), start_time=1, nodes=nodes))
    return folder


def test_status_asks_the_supervisor_with_the_key_that_may_only_look(supervisor: Supervisor, output: Output) -> None:
    supervisor.folder.write_status(JobStatus(job="job-1", state=JobState.STARTING))
    assert main(["status", "--json"]) == 0
    document = json.loads(output.readouterr().out)
    assert (document["schema"], document["job"], document["state"]) == (1, "job-1", "running")
    assert supervisor.asked == [(PeerKind.STATUS, StatusRequest())]
    assert main(["status", "job-1"]) == 0
    assert output.readouterr().out.startswith("job job-1, running, generation 1\n")


def test_status_watches_until_the_job_ends(supervisor: Supervisor, output: Output) -> None:
    def end_after_the_second(body: Body) -> Body | None:
        if len(supervisor.asked) == 2:
            supervisor.end(0)
        return answer(body)

    supervisor.answers = end_after_the_second
    assert main(["status", "--watch"]) == 0
    states = [line.split(", ")[1] for line in output.readouterr().out.splitlines() if line.startswith("job ")]
    assert states == ["running", "running", "finished"]


def test_a_finished_jobs_status_is_read_from_its_folder(ended: JobFolder, output: Output) -> None:
    ended.write_status(JobStatus(job="job-1", state=JobState.FINISHED, exit_code=0))
    assert main(["status", "--watch"]) == 0
    assert output.readouterr().out == "job job-1, finished, generation 0, exit code 0\n"


@pytest.mark.parametrize("last", [None, JobState.RUNNING, JobState.STARTING])
def test_a_job_whose_supervisor_left_no_last_word_is_orphaned(
    ended: JobFolder, output: Output, last: JobState | None
) -> None:
    if last is not None:
        ended.write_status(JobStatus(job="job-1", state=last, generation=3))
    assert main(["status", "--json"]) == 0
    assert json.loads(output.readouterr().out)["state"] == "orphaned"


def test_an_orphaned_job_is_shown_as_it_was_last_seen(ended: JobFolder, output: Output) -> None:
    seen = time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))
    ended.write_status(msgspec.structs.replace(RUNNING, as_of=seen))
    assert main(["status"]) == 0
    assert output.readouterr().out.splitlines()[:3] == [
        "job job-1, orphaned, generation 1",
        f"supervisor is gone (pid {os.getpid()} died): training goes on until the next fault, "
        "its nodes end by themselves 600 s after that; `phoenix-run resume job-1` takes over",
        "last seen 03:04:05:",
    ]
    ended.write_record(msgspec.structs.replace(ended.read_record(), hostname="elsewhere"))
    assert main(["status"]) == 0
    assert f"supervisor cannot be reached (pid {os.getpid()} on elsewhere)" in output.readouterr().out


def test_a_supervisor_that_does_not_answer_is_said_not_to(
    supervisor: Supervisor, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phoenix_launch.cli.asking.timeout", lambda name: 0.2)
    supervisor.answers = lambda body: None
    assert main(["status"]) == 1
    assert "the supervisor of job job-1 does not answer" in output.readouterr().err


def test_a_supervisor_that_ends_while_it_is_asked_leaves_its_status(
    supervisor: Supervisor, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phoenix_launch.cli.asking.timeout", lambda name: 0.2)
    supervisor.answers = lambda body: supervisor.end(93)
    assert main(["status"]) == 0
    assert "failed" in output.readouterr().out


def test_a_supervisor_that_throws_its_keys_away_has_ended(
    supervisor: Supervisor, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says its last word, throws the keys away, and lives on for a moment."""
    read = JobFolder.read_client_keys

    def too_late(folder: JobFolder, kind: KeyKind) -> ClientKeys:
        folder.write_status(JobStatus(job="job-1", state=JobState.FINISHED, exit_code=0))
        folder.remove_client_keys()
        return read(folder, kind)

    monkeypatch.setattr(JobFolder, "read_client_keys", too_late)
    assert main(["status"]) == 0
    assert output.readouterr().out == "job job-1, finished, generation 0, exit code 0\n"


@pytest.mark.parametrize(
    "words", [["status", "x"], ["logs", "x"], ["stop", "x"], ["inject-fault", "kill-node", "--node", "0", "--job", "x"]]
)
def test_a_job_that_does_not_exist_lists_those_that_do(ended: JobFolder, output: Output, words: list[str]) -> None:
    shown = refused(output, *words)
    assert "there is no job x" in shown and "jobs: job-1" in shown


def test_jobs_lists_all_with_their_states(ended: JobFolder, output: Output) -> None:
    other = JobFolder.create(jobs_root(os.environ), "job-2")
    other.write_record(record(os.getpid(), job="job-2", created=time.time() + 1))
    third = JobFolder.create(jobs_root(os.environ), "job-3")
    third.write_record(record(os.getpid(), job="job-3", start_time=1, created=time.time() + 2))
    third.write_status(JobStatus(job="job-3", state=JobState.FAILED, exit_code=1))
    assert main(["jobs"]) == 0
    rows = [line.split()[:3] for line in output.readouterr().out.splitlines()]
    assert rows == [
        ["JOB", "STATE", "EXIT"],
        ["job-1", "orphaned", "1"],
        ["job-2", "starting", "1"],
        ["job-3", "failed", "1"],
    ]


def test_jobs_counts_the_hosts_that_joined(ended: JobFolder, output: Output) -> None:
    ended.write_record(msgspec.structs.replace(ended.read_record(), nodes=()))
    nodes = tuple(NodeStatus(index=n, name=f"h{n}", role="training", state="left", spares=0) for n in range(3))
    ended.write_status(JobStatus(job="job-1", state=JobState.FAILED, exit_code=143, stopped_by="SIGTERM", nodes=nodes))
    assert main(["jobs"]) == 0
    row = output.readouterr().out.splitlines()[1].split()
    assert (row[:4], row[-1]) == (["job-1", "stopped", "143", "3"], "train.py")


def test_pruning_removes_what_ended_long_ago_and_nothing_that_may_live(phoenix_home: Path, output: Output) -> None:
    root, long_ago = jobs_root(os.environ), time.time() - 20 * 86400
    for name, pid, state, as_of in (
        ("old", 0, JobState.FINISHED, long_ago),
        ("recent", 0, JobState.FAILED, time.time() - 3600),
        ("orphaned", 0, JobState.RUNNING, long_ago),
        ("running", os.getpid(), JobState.RUNNING, long_ago),
        ("begun", os.getpid(), None, 0.0),
        ("damaged", 0, JobState.FINISHED, long_ago),
    ):
        folder = JobFolder.create(root, name)
        folder.write_record(record(os.getpid(), job=name, created=long_ago, **({} if pid else {"start_time": 1})))
        if state is not None:
            folder.write_status(JobStatus(job=name, state=state, as_of=as_of))
    (root / "damaged" / "status.json").write_text("{")
    (root / "not-ours").mkdir()
    assert main(["jobs", "--prune"]) == 0
    assert output.readouterr().out == "removed 1 job that ended more than 14 days ago: old\n"
    assert main(["jobs", "--prune", "0"]) == 0
    assert output.readouterr().out == "removed 1 job that ended more than 0 days ago: recent\n"
    assert sorted(path.name for path in root.iterdir()) == ["begun", "damaged", "not-ours", "orphaned", "running"]
    for wrong in ("x", "nan", "inf"):
        assert "must be a number of days" in refused(output, "jobs", f"--prune={wrong}")


def test_jobs_says_that_there_are_none(phoenix_home: Path, output: Output) -> None:
    assert main(["jobs"]) == 0
    assert output.readouterr().out == "no jobs\n"


def test_stop_waits_until_the_job_has_ended(supervisor: Supervisor, output: Output) -> None:
    def stopping(body: Body) -> Body:
        threading.Timer(0.1, supervisor.end, [143]).start()
        return Answer(True)

    supervisor.answers = stopping
    assert main(["stop"]) == 0
    assert output.readouterr().out == "job job-1 stopped, exit code 143\n"
    assert supervisor.asked == [(PeerKind.CONTROL, StopRequest(signal.SIGTERM))]


def test_stop_does_not_wait_for_ever(supervisor: Supervisor, output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phoenix_launch.cli.stop.timeout", lambda name: 0.05)
    assert main(["stop"]) == 1
    assert "was told to stop and has not ended" in output.readouterr().err


def test_stop_has_nothing_to_do_for_an_ended_job(ended: JobFolder, output: Output) -> None:
    ended.write_status(JobStatus(job="job-1", state=JobState.FINISHED, exit_code=0))
    assert main(["stop"]) == 0
    assert output.readouterr().out == "job job-1 has ended already, exit code 0\n"


def test_stop_says_when_nobody_can_be_asked(ended: JobFolder, output: Output) -> None:
    assert main(["stop"]) == 1
    assert "the supervisor of job job-1 is gone" in output.readouterr().err


def test_a_fault_is_asked_for_with_the_control_key(supervisor: Supervisor, output: Output) -> None:
    assert main(["inject-fault", "kill-node", "--node", "1"]) == 0
    assert main(["inject-fault", "kill-worker", "--rank", "3", "--job", "job-1"]) == 0
    assert main(["inject-fault", "kill-worker", "job-1", "--rank", "3"]) == 0
    assert main(["inject-fault", "slow", "2.5", "job-1", "--rank", "3", "--duration", "4"]) == 0
    assert main(["inject-fault", "kill-supervisor"]) == 0
    kinds = ("kill-node", "kill-worker", "kill-worker", "slow", "kill-supervisor")
    assert output.readouterr().out == "".join(f"{kind} as asked\n" for kind in kinds)
    assert supervisor.asked == [
        (PeerKind.CONTROL, FaultRequest(DrillKind.KILL_NODE, node="1")),
        (PeerKind.CONTROL, FaultRequest(DrillKind.KILL_WORKER, rank=3)),
        (PeerKind.CONTROL, FaultRequest(DrillKind.KILL_WORKER, rank=3)),
        (PeerKind.CONTROL, FaultRequest(DrillKind.SLOW, rank=3, value=2.5, duration=4.0)),
        (PeerKind.CONTROL, FaultRequest(DrillKind.KILL_SUPERVISOR)),
    ]


def test_a_refused_fault_says_why(supervisor: Supervisor, output: Output) -> None:
    assert main(["inject-fault", "kill-agent", "--node", "node0", "--dry-run"]) == 1
    assert output.readouterr().err == "phoenix-run: drills are not allowed\n"


def test_a_fault_needs_a_kind_and_one_target(supervisor: Supervisor, output: Output) -> None:
    assert "did you mean kill-worker?" in refused(output, "inject-fault", "kill-worke", "--rank", "0")
    assert "one of --rank R and --node N" in refused(output, "inject-fault", "kill-node")
    assert "one of --rank R and --node N" in refused(output, "inject-fault", "kill-node", "--node", "0", "--rank", "0")
    assert "--rank R" in refused(output, "inject-fault", "kill-worker", "--node", "0")
    assert "must be a whole number" in refused(output, "inject-fault", "kill-worker", "--rank", "-1")
    assert "missing argument" in refused(output, "inject-fault")
    assert "slow needs a number, not ''" in refused(output, "inject-fault", "slow", "--rank", "1")
    assert "exit 300: must be from 0 to 255" in refused(output, "inject-fault", "exit", "300", "--rank", "1")
    assert "must be seconds" in refused(output, "inject-fault", "freeze", "--rank", "1", "--duration", "x")
    assert "harms no rank and no node" in refused(output, "inject-fault", "kill-supervisor", "--node", "1")
    assert "b: one job at a time" in refused(output, "inject-fault", "freeze", "a", "b", "--rank", "1")
    assert "two jobs are named" in refused(output, "inject-fault", "kill-node", "a", "--job", "b", "--node", "0")
    assert supervisor.asked == []


def test_a_fault_needs_a_running_job(ended: JobFolder, output: Output) -> None:
    assert "does not run" in refused(output, "inject-fault", "kill-node", "--node", "0")


# --- logs ------------------------------------------------------------------------------------------------------------


def wrote(folder: JobFolder, node: str, **files: str) -> None:
    place = folder.logs_path / node
    place.mkdir(exist_ok=True)
    for name, text in files.items():
        (place / name.replace("__", "-").replace("_", ".").replace("rank", "")).write_text(text)


def test_log_names_say_rank_generation_and_stream() -> None:
    parsed = [
        parse_name(name) for name in ("3.g2.out", "12.t2g1.err.1", "spare-77.out", "3.out", "x.g1.out", "3.g2.txt")
    ]
    assert [name and (name.label, name.order) for name in parsed] == [
        ("3", (1, 2, 3, 1, 1)),
        ("12", (2, 1, 12, 2, 0)),
        ("spare-77", (0, 0, 77, 1, 1)),
        None,
        None,
        None,
    ]


def test_logs_come_in_order_of_generation_with_labels(ended: JobFolder, output: Output) -> None:
    nodes = tuple(JobNode(f"node{n}", n, "", "", str(ended.logs_path / f"node{n}")) for n in range(3))
    ended.write_record(record(os.getpid(), start_time=1, nodes=nodes))
    wrote(ended, "node0", rank0_g1_out="a1\na2\n", rank0_g1_err="oops\n", rank0_g2_out="c\n")
    wrote(ended, "node1", rank1_g1_out="b", spare__9_out="early\n")
    assert main(["logs"]) == 0
    shown = output.readouterr()
    assert shown.out.splitlines() == [
        "node1:spare-9| early",
        "node0:0| a1",
        "node0:0| a2",
        "node1:1| b",
        "node0:0| c",
    ]
    assert shown.err == "node0:0| oops\n"


def test_logs_of_one_rank_have_no_labels_wherever_it_ran(ended: JobFolder, output: Output) -> None:
    nodes = tuple(JobNode(f"node{n}", n, "", "", str(ended.logs_path / f"node{n}")) for n in range(2))
    ended.write_record(record(os.getpid(), start_time=1, nodes=nodes))
    wrote(ended, "node0", rank0_g1_out="one\n", rank1_g1_out="not\n", rank0_g3_out="three\n")
    wrote(ended, "node1", rank0_g2_out_1="two\n", rank0_g2_out="half\n")
    assert main(["logs", "--rank", "0"]) == 0
    assert output.readouterr().out == "one\ntwo\nhalf\nthree\n"
    assert main(["logs", "--rank", "0", "--node", "1"]) == main(["logs", "--rank", "0", "--node", "node1"]) == 0
    assert output.readouterr().out == "two\nhalf\n" * 2


def test_logs_refuse_what_does_not_exist(ended: JobFolder, output: Output) -> None:
    assert "its nodes: node0" in refused(output, "logs", "--node", "7")
    assert "must be a whole number" in refused(output, "logs", "--rank", "x")
    ended.write_record(record(os.getpid(), start_time=1))
    assert main(["logs"]) == 1
    assert "keeps no log files" in output.readouterr().err


def test_a_rank_that_the_job_never_had_is_said_to_be_none(ended: JobFolder, output: Output) -> None:
    assert "hint: none of its workers has started" in refused(output, "logs", "--rank", "0")
    ended.write_status(RUNNING)
    assert main(["logs", "--rank", "0"]) == 0, "it has written nothing"
    Journal(ended.journal_path, remark=print).write("worker_started", Generation(1, 1), node="node0", rank=1, pid=7)
    assert main(["logs", "--rank", "1"]) == 0, "an earlier generation had it"
    assert "job job-1 has no rank 9\n  hint: its ranks: 0-1\n" in refused(output, "logs", "--rank", "9")
    wrote(ended, "node0", rank9_g1_out="nine\n")
    assert main(["logs", "--rank", "9"]) == 0
    assert output.readouterr().out == "nine\n"


def test_a_rank_that_will_never_come_is_not_waited_for(supervisor: Supervisor, output: Output) -> None:
    supervisor.folder.write_status(RUNNING)
    assert "job job-1 has no rank 9" in refused(output, "logs", "--follow", "--rank", "9")


def test_logs_of_hosts_that_joined_are_shown_where_they_can_be_seen(ended: JobFolder, output: Output) -> None:
    nodes = tuple(NodeStatus(index=n, name=f"node{n}", role="training", state="left", spares=0) for n in range(3))
    ended.write_status(msgspec.structs.replace(RUNNING, state=JobState.FINISHED, nodes=nodes))
    wrote(ended, "node0", rank0_g1_out="here\n")
    wrote(ended, "node1", rank1_g1_out="there\n")
    assert main(["logs"]) == 0
    assert output.readouterr().out == "node0:0| here\nnode1:1| there\n"
    assert "the logs of node2 are on that host" in refused(output, "logs", "--node", "node2")


@pytest.fixture
def ssh(tmp_path: Path) -> Path:
    """A program that takes ssh's words and runs the command here; the host `down` cannot be reached."""
    path = tmp_path / "ssh"
    path.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\n[ "$2" = down ] && exit 255\nexec sh -c "$3"\n')
    path.chmod(0o755)
    return path


def remote_nodes(folder: JobFolder, *hosts: str) -> tuple[JobNode, ...]:
    return tuple(
        JobNode(host, index, host, sys.executable, str(folder.logs_path / host)) for index, host in enumerate(hosts)
    )


def test_logs_of_other_hosts_are_read_by_ssh(ended: JobFolder, output: Output, ssh: Path) -> None:
    settings = settings_document(RunSettings(script="x", ssh=str(ssh)))
    ended.write_record(record(os.getpid(), start_time=1, settings=settings, nodes=remote_nodes(ended, "h1", "h2")))
    wrote(ended, "h1", rank0_g1_out="a b\n\n", rank0_g2_out="c\n")
    wrote(ended, "h2", rank1_g1_out="é\n")
    assert main(["logs"]) == 0
    assert output.readouterr().out == "h1:0| a b\nh1:0| \nh2:1| é\nh1:0| c\n"
    ended.write_record(record(os.getpid(), start_time=1, settings=settings, nodes=remote_nodes(ended, "h1", "down")))
    assert main(["logs", "--rank", "0"]) == 1
    shown = output.readouterr()
    assert shown.out == "a b\n\nc\n"
    assert "the logs of down could not be read" in shown.err


@pytest.mark.parametrize("host", ["", "h1"])
def test_followed_logs_show_what_is_added_until_the_job_ends(
    supervisor: Supervisor, ssh: Path, host: str, phoenix_home: Path, eventually: Callable[..., object]
) -> None:
    settings = settings_document(RunSettings(script="x", ssh=str(ssh)))
    node = JobNode("node0", 0, host, sys.executable, str(supervisor.folder.logs_path / "node0"))
    supervisor.folder.write_record(
        msgspec.structs.replace(supervisor.folder.read_record(), nodes=(node,), settings=settings)
    )
    program = "import sys; from phoenix_launch.cli import main; sys.exit(main())"
    follower = subprocess.Popen(
        [sys.executable, "-c", program, "logs", "--follow"], stdout=subprocess.PIPE, env={**os.environ}
    )
    assert follower.stdout is not None
    try:
        wrote(supervisor.folder, "node0", rank0_g1_out="one\ntw")
        assert follower.stdout.readline() == b"one\n"
        wrote(supervisor.folder, "node0", rank0_g1_out="one\ntwo\n")
        assert follower.stdout.readline() == b"two\n"
        wrote(supervisor.folder, "node0", rank0_g2_out="three\nlast")
        supervisor.end(0)
        assert follower.stdout.read() == b"three\nlast\n"
        assert follower.wait(10) == 0
    finally:
        follower.kill()
        follower.wait()
        follower.stdout.close()


def test_a_follower_loses_no_line_when_a_file_is_rotated(tmp_path: Path) -> None:
    log, older = tmp_path / "0.g1.out", tmp_path / "0.g1.out.1"
    older.write_text("1\n")
    log.write_text("2\n")
    follower = Follower(tmp_path)

    def lines() -> list[bytes]:
        return [line for _, line in follower.poll()]

    assert lines() == [b"1\n", b"2\n"]
    with log.open("a") as file:
        file.write("3\n")
    log.replace(older)
    log.write_text("4\n")
    assert lines() == [b"3\n", b"4\n"]
    assert lines() == []
    log.replace(older)
    assert lines() == []
    log.write_text("5")
    assert lines() == []
    assert [line for _, line in follower.finish()] == [b"5\n"]


def test_nobody_who_reads_is_no_failure_of_ours(ended: JobFolder) -> None:
    wrote(ended, "node0", rank0_g1_out="line\n" * 100_000)
    program = "import sys; from phoenix_launch.cli import main; sys.exit(main())"
    logs = subprocess.Popen(
        [sys.executable, "-c", program, "logs", "--rank", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert logs.stdout is not None and logs.stderr is not None
    logs.stdout.readline()
    logs.stdout.close()
    assert (logs.wait(20), logs.stderr.read()) == (128 + signal.SIGPIPE, b"")
    logs.stderr.close()
