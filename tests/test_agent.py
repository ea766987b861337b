"""An agent starts what it is told, sees at once what ends, and ends a worker together with all that came of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_supervisor import G1, FakeSupervisor, Node, command, order, plan

from phoenix_launch.bootstrap import AgentTimeouts, OutputSettings, RunMode
from phoenix_launch.messages import PlanPhase, Prepare, ProcessState, StoreReport

SLEEP = "import time; time.sleep(600)"
DUMP = """
import json, os, sys
with open("dump.tmp", "w") as file:
    json.dump({"environ": dict(os.environ), "argv": sys.argv, "sid": os.getsid(0), "pid": os.getpid(),
               "parent": os.getppid(), "stdin": os.readlink("/proc/self/fd/0"), "cwd": os.getcwd(),
               "fds": sorted(int(n) for n in os.listdir("/proc/self/fd"))}, file)
os.rename("dump.tmp", "dump-" + os.environ["RANK"])
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[FakeSupervisor]:
    supervisor = FakeSupervisor(tmp_path)
    yield supervisor
    supervisor.close()


def start(supervisor: FakeSupervisor, script: str, *args: str, **changes: Any) -> Node:
    return supervisor.start(command(supervisor.script(script), *args), **changes)


# --- how workers are started -----------------------------------------------------------------------------------------


def test_a_worker_gets_its_environment_arguments_and_place(supervisor: FakeSupervisor) -> None:
    environment = {
        "PATH": "/usr/bin:/bin",
        "PHOENIX_JOB_KEY": "secret",
        "ODD": "a 'b'\n\"c\"",
        "NCCL_SOCKET_IFNAME": "eth7",
    }
    node = start(supervisor, DUMP, "--x", "${local_rank}", "", "a b", "--", "$$", environment=environment)
    node.send(Prepare({"PREPARED": "1"}, 0))
    node.send(plan(G1, PlanPhase.RUN, order(1, WORLD_SIZE="2")))
    dump = supervisor.read_json("dump-1")
    environ = dump["environ"]
    assert dump["argv"][1:] == ["--x", "1", "", "a b", "--", "$$"]
    assert environ["ODD"] == environment["ODD"]
    assert (environ["PREPARED"], environ["WORLD_SIZE"], environ["RANK"]) == ("1", "2", "1")
    assert (environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"]) == ("lo", "eth7")
    assert (environ["PHOENIX_NODE"], "PHOENIX_JOB_KEY" in environ) == ("node0", False)
    assert environ["PHOENIX_AGENT"].startswith(str(supervisor.folder / "run"))
    assert environ["TORCHELASTIC_ERROR_FILE"] == str(supervisor.folder / "logs/node0/1.g1.error.json")
    assert (dump["sid"], dump["parent"]) == (dump["pid"], node.agent_pid)
    assert (dump["stdin"], dump["cwd"]) == ("/dev/null", str(supervisor.folder))
    assert [fd for fd in dump["fds"] if fd > 2] == dump["fds"][3:] and len(dump["fds"]) <= 5, "no descriptor of ours"


def test_the_secrets_of_a_node_stand_in_no_argv_and_no_environment(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, DUMP)
    node.run(order(0))
    supervisor.read_json("dump-0")
    secret = node.bootstrap.secret_key.encode()
    for pid in (node.popen.pid, node.agent_pid):
        for name in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{pid}/{name}").read_bytes()
    assert secret.decode() not in json.dumps(supervisor.read_json("dump-0"))


@pytest.mark.parametrize(
    ("mode", "target", "args", "said"),
    [
        (RunMode.MODULE, "mod", ("x",), "__main__ ['x']"),
        (RunMode.RUN_PATH, "mod.py", ("x",), "__main__ ['x']"),
        (RunMode.EXEC, "/bin/echo", ("hello", "${local_rank}"), "hello 0"),
    ],
)
def test_each_mode_starts_what_it_names(
    supervisor: FakeSupervisor, mode: RunMode, target: str, args: tuple[str, ...], said: str
) -> None:
    supervisor.script("import sys; print(__name__, sys.argv[1:])", "mod.py")
    node = supervisor.start(command(target, *args, mode=mode))
    node.run(order(0))
    ended = node.until_exit(0)
    assert ended.exit is not None and ended.exit.code == 0
    supervisor.until(lambda: said in supervisor.text())


def test_a_command_that_is_not_there_is_the_end_of_that_worker(supervisor: FakeSupervisor) -> None:
    node = supervisor.start(command("/no/such/thing", mode=RunMode.EXEC))
    node.run(order(0))
    ended = node.until_exit(0).exit
    assert ended is not None and ended.code == 127
    assert "/no/such/thing cannot be started: No such file" in ended.tail


def test_a_virtual_local_rank_sees_one_device_and_one_without_a_device_ends_with_the_reason(
    supervisor: FakeSupervisor,
) -> None:
    what = command(supervisor.script(DUMP), virtual_local_rank=True)
    node = supervisor.start(what, environment={"PATH": "/usr/bin", "CUDA_VISIBLE_DEVICES": "3, 5"})
    node.run(order(1), order(2))
    environ = supervisor.read_json("dump-1")["environ"]
    assert (environ["LOCAL_RANK"], environ["CUDA_VISIBLE_DEVICES"], environ["RANK"]) == ("0", "5", "1")
    ended = node.until_exit(2).exit
    assert ended is not None and ended.code == 1 and "no device" in ended.tail


def test_torchruns_layout_has_the_error_file_when_it_was_asked_for(supervisor: FakeSupervisor) -> None:
    output = OutputSettings(str(supervisor.folder / "logs"), torchrun_folder=str(supervisor.folder / "elastic"))
    node = start(supervisor, DUMP, output=output)
    node.send(Prepare({}, 0))
    node.send(plan(G1, PlanPhase.RUN, order(1), attempt=2))
    environ = supervisor.read_json("dump-1")["environ"]
    assert environ["TORCHELASTIC_ERROR_FILE"] == str(supervisor.folder / "elastic/attempt_2/1/error.json")


# --- what is seen of them --------------------------------------------------------------------------------------------


def test_an_exit_is_reported_at_once_with_its_last_words_and_its_error_file(supervisor: FakeSupervisor) -> None:
    script = (
        "import os, sys, time\n"
        "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{\"message\": \"boom\"}')\n"
        "print('last words', file=sys.stderr, flush=True)\n"
        "os.write(1, ('%.6f\\n' % time.time()).encode()); os._exit(7)\n"
    )
    slow = AgentTimeouts(heartbeat_interval=8, orphan=30, connect=20, fork_server=60, drain_output=2, reap=5)
    node = start(supervisor, script, timeouts=slow)
    node.run(order(0))
    ended = node.until(lambda: r.exit if (r := node.rank(0)) and r.exit and r.exit.tail else None)
    seen = time.time()
    assert (ended.code, ended.error, ended.tail.strip(), ended.oom_killed) == (
        7,
        '{"message": "boom"}',
        "last words",
        False,
    )
    supervisor.until(supervisor.text)
    assert seen - float(supervisor.text()) < 3, "an exit waits for no heartbeat"


def test_a_signal_is_reported_as_its_negative_and_an_old_error_file_is_not_taken_for_its_own(
    supervisor: FakeSupervisor,
) -> None:
    logs = supervisor.folder / "logs/node0"
    logs.mkdir(parents=True)
    (logs / "0.g1.error.json").write_text('{"message": "of another run"}')
    node = start(supervisor, SLEEP)
    node.run(order(0))
    report = node.until_report(lambda r: r.ranks and r.ranks[0].state is ProcessState.RUNNING)
    os.kill(report.ranks[0].pid, signal.SIGSEGV)
    ended = node.until_exit(0).exit
    assert ended is not None and (ended.code, ended.error) == (-signal.SIGSEGV, "")


@pytest.mark.parametrize(
    "words", ['{"cut": ', "x", "[" * 100_000, '"' + "x" * (65 << 10) + '"'], ids=["cut", "no", "deep", "long"]
)
def test_an_error_file_that_is_no_json_or_too_long_is_left_out(supervisor: FakeSupervisor, words: str) -> None:
    script = f"import os; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({words!r}); os._exit(1)"
    node = start(supervisor, script)
    node.run(order(0))
    ended = node.until_exit(0).exit
    assert ended is not None and ended.error == ""


def test_the_step_is_read_from_the_progress_page(supervisor: FakeSupervisor) -> None:
    script = (
        "import os, time\n"
        "from phoenix_launch.progress import Progress, ProgressPage\n"
        "ProgressPage.attach(os.environ['PHOENIX_PROGRESS']).write(Progress(step=41))\n"
        "time.sleep(600)\n"
    )
    node = start(supervisor, script)
    node.run(order(0))
    node.until(lambda: (r := node.rank(0)) and r.step == 41)


# --- what an agent says of its host ----------------------------------------------------------------------------------


def test_facts_say_what_is_wrong_and_the_agent_lives_to_tell(supervisor: FakeSupervisor) -> None:
    in_the_way = supervisor.folder / "file"
    in_the_way.write_text("")
    node = supervisor.start(
        command("script.py"), cwd=str(supervisor.folder / "missing"), output=OutputSettings(str(in_the_way / "logs"))
    )
    facts = node.facts()
    assert "missing: No such file" in facts.cwd_error
    assert "Not a directory" in facts.log_error
    other = supervisor.start(command("script.py"), name="node1")
    assert "script.py: No such file" in other.facts().script_error


def test_facts_say_what_is_there(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, SLEEP)
    facts = node.facts()
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert (facts.address, facts.interface, facts.guardian_pid) == ("127.0.0.1", "lo", node.popen.pid)
    assert facts.torch and facts.phoenix and facts.hostname
    assert 1 <= facts.cores <= (os.cpu_count() or 1)
    assert facts.memory_free > 0 and facts.disk_free > 0
    assert len(facts.script_digest) == 64
    assert (facts.cwd_error, facts.log_error, facts.script_error) == ("", "", "")
    assert (supervisor.folder / "logs/node0").stat().st_mode & 0o777 == 0o700


def test_a_store_host_is_up_while_workers_are_started_afresh(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, SLEEP)
    node.send(Prepare({}, 0))
    node.send(plan(G1, PlanPhase.QUIESCE, host_store=True))
    store = node.until_report(lambda r: r.store, seconds=60).store
    assert store == StoreReport(G1, "127.0.0.1", store.port if store else 0)
    socket.create_connection((store.address, store.port), timeout=5).close()
    node.leave()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((store.address, store.port), timeout=5)


def test_the_agent_stays_small_quiet_and_without_torch(supervisor: FakeSupervisor) -> None:
    node = start(supervisor, SLEEP)
    node.run(order(0), order(1))
    node.until_report(lambda r: r.applied == G1)
    agent = node.agent_pid
    assert "torch" not in Path(f"/proc/{agent}/maps").read_text()
    resident = int(Path(f"/proc/{agent}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident < 60 << 20
    seen, before, started = len(node.reports), cpu_seconds(agent), time.monotonic()
    node.until(lambda: len(node.reports) >= seen + 6)
    used = (cpu_seconds(agent) - before) / (time.monotonic() - started)
    assert used < 0.02, f"{used:.1%} of a core while nothing happens"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
