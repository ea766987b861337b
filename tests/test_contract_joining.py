"""torchrun's contract: the same command on every host. Here the hosts are one machine, and the first command supervises."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from phoenix_launch.node.cgroup import ControlGroup
from tests.contract import NO_TORCH, WITNESS, free_port
from tests.jobs_under_test import Done, Running, events, run, script, started

Eventually = Callable[..., Any]
KEY = "a key for all the hosts of the tests, long enough"

# Takes note, and waits in the attempts before the one that its first argument names.
PATIENT = f"""{WITNESS}
import signal
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(sys.argv[1]):
    signal.pause()
while not os.path.exists(os.path.join(os.environ["WITNESS"], "go")):
    pass
sys.exit(int(sys.argv[2]) if os.environ["RANK"] == sys.argv[3] else 0)
"""


class Hosts:
    """Commands of one job, each as if on a host of its own."""

    def __init__(self, folder: Path, eventually: Eventually) -> None:
        self.folder = folder
        self.port = free_port()
        self.witness = folder / "witness"
        self.witness.mkdir()
        self.script = script(folder, PATIENT)
        self.running: list[Running] = []
        self.eventually = eventually
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(
        self, nnodes: str, *options: object, attempts: int = 0, code: int = 0, rank: int = 0,
        env: Mapping[str, str] | None = None, endpoint: bool = True, supervises: bool = True,
    ) -> Running:  # fmt: skip
        number = len(self.running)
        meet = ["--rdzv-endpoint", f"127.0.0.1:{self.port}"] if endpoint else []
        args = ["--nnodes", nnodes, *meet, "--start-method", "spawn", *options, self.script, attempts, code, rank]
        mine = {**NO_TORCH, "WITNESS": str(self.witness), "PHOENIX_JOB_KEY": KEY, "HOST_NUMBER": str(number)}
        self.running.append(
            self._stack.enter_context(started(self.folder / f"home{number}", args, env={**mine, **(env or {})}))
        )
        if number == 0 and supervises:
            self.eventually(lambda: self.running[0].job, 40, "the first one supervises")
        return self.running[-1]

    def go(self) -> None:
        (self.witness / "go").touch()

    def saw(self, rank: int, attempt: int = 0) -> dict[str, Any] | None:
        path = self.witness / f"{rank}-{attempt}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def seen(self, rank: int, attempt: int = 0) -> dict[str, str]:
        """The environment of a worker that has started, or starts soon."""
        found: dict[str, Any] = self.eventually(lambda: self.saw(rank, attempt), 40, f"rank {rank}, attempt {attempt}")
        environment: dict[str, str] = found["environment"]
        return environment

    def nodes(self) -> dict[str, str]:
        """Name -> role, as the supervisor has them."""
        asked = run(self.folder / "home0", "status", "--json")
        return {node["name"]: node["role"] for node in json.loads(asked.out)["nodes"]} if asked.code == 0 else {}

    def there_are(self, count: int) -> None:
        self.eventually(lambda: len(self.nodes()) == count, 40, f"{count} nodes")

    def events(self, kind: str) -> list[dict[str, Any]]:
        job = self.running[0].job
        return events(job, kind) if job else []

    def ended(self) -> list[Done]:
        return [running.wait(40) for running in self.running]


@pytest.fixture
def hosts(tmp_path: Path, eventually: Eventually) -> Iterator[Hosts]:
    with Hosts(tmp_path, eventually) as hosts:
        yield hosts


def test_hosts_that_start_the_same_command_become_one_job_as_soon_as_the_last_one_has_come(hosts: Hosts) -> None:
    hosts.start("1:2", "--nproc-per-node", 2)
    hosts.start("1:2", "--nproc-per-node", 2)
    seen = [hosts.seen(rank) for rank in range(4)]
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "HOST_NUMBER")
    assert [tuple(environment[name] for name in names) for environment in seen] == [
        ("0", "0", "0", "4", "2", "2", "0"),
        ("1", "1", "0", "4", "2", "2", "0"),
        ("2", "0", "1", "4", "2", "2", "1"),
        ("3", "1", "1", "4", "2", "2", "1"),
    ]
    for rank in range(4):
        *between, (command, has_key) = (hosts.saw(rank) or {})["owners"]
        assert "phoenix_launch" in command and has_key
        assert between and not any(has for _, has in between)
    assert len({(environment["MASTER_ADDR"], environment["MASTER_PORT"]) for environment in seen}) == 1
    assert seen[0]["MASTER_PORT"] != str(hosts.port)
    hosts.go()
    done = hosts.ended()
    assert [d.code for d in done] == [0, 0], [d.err for d in done]
    assert "is taken on this machine: joining" in done[1].err
    job = done[0].job
    assert f"joined job {job.name} as {socket.gethostname()}-2; logs in {job}/logs/" in done[1].err
    threads = str(max(1, ControlGroup().cores() // 4))
    assert {environment["OMP_NUM_THREADS"] for environment in seen} == {threads}, "two hosts on one machine share it"


def test_node_rank_is_group_rank_and_the_exit_code_is_everybodys(hosts: Hosts) -> None:
    meet = ["--master-addr", "127.0.0.1", "--master-port", hosts.port, "--exit-code", "worker"]
    hosts.start("2", *meet, "--node-rank", 1, endpoint=False, code=7, rank=1)
    hosts.start("2", *meet, "--node-rank", 0, endpoint=False, code=7, rank=1)
    assert [(hosts.seen(rank)["GROUP_RANK"], hosts.seen(rank)["HOST_NUMBER"]) for rank in (0, 1)] == [
        ("0", "1"),
        ("1", "0"),
    ]
    hosts.go()
    done = hosts.ended()
    assert [d.code for d in done] == [7, 7], [d.err for d in done]
    assert all("the job ends with exit code 7: rank 1 on" in d.err for d in done)


def test_an_elastic_job_starts_with_whom_it_has_after_a_while_and_who_comes_late_is_a_spare(hosts: Hosts) -> None:
    elastic = ["1:2", "--rdzv-conf", "join_timeout=1", "--rdzv-backend", "c10d"]
    hosts.start(*elastic)
    assert hosts.seen(0)["WORLD_SIZE"] == "1"
    hosts.start(*elastic)
    hosts.there_are(2)
    assert sorted(hosts.nodes().values()) == ["spare", "training"]
    hosts.go()
    assert [done.code for done in hosts.ended()] == [0, 0]
    assert hosts.saw(0, 1) is None and not hosts.events("fault")


def test_a_job_of_too_few_hosts_ends_and_says_who_is_there(hosts: Hosts) -> None:
    hosts.start("2:3", "--join-timeout", 3)
    (done,) = hosts.ended()
    assert done.code == 1
    assert f"1 of 2 nodes came within 3 s (here: {socket.gethostname()})" in done.err
    assert done.err.count(f"1 of 3 hosts here (node {socket.gethostname()}); waiting up to ") == 1, done.err
    assert "Traceback" not in done.err


def test_a_host_that_is_gone_loses_its_rank_to_a_surplus_one(hosts: Hosts) -> None:
    """First one that is killed, then one that is told to go."""
    hosts.start("2", attempts=2)
    killed = hosts.start("2", attempts=2)
    assert hosts.seen(1)["HOST_NUMBER"] == "1"
    told = hosts.start("2", attempts=2)
    hosts.there_are(3)
    killed.signal(signal.SIGKILL)
    assert hosts.seen(1, 1)["HOST_NUMBER"] == "2"
    hosts.start("2", attempts=2)
    hosts.eventually(lambda: "spare" in hosts.nodes().values(), 40)
    told.signal(signal.SIGTERM)
    assert hosts.seen(1, 2)["HOST_NUMBER"] == "3"
    assert told.wait(20).code == 128 + signal.SIGTERM
    hosts.go()
    done = [running.wait(20) for running in (hosts.running[0], hosts.running[3])]
    assert [d.code for d in done] == [0, 0], [d.err for d in done]
    assert [event["kind"] for event in hosts.events("fault")] == ["node", "node"]


def test_a_host_that_is_started_again_gets_its_node_rank_back(hosts: Hosts) -> None:
    """As Kubernetes does it: at once, before anybody can have missed it."""
    hosts.start("2", "--node-rank", 0, "--heartbeat-timeout", 1.5, attempts=1)
    hosts.start("2", "--node-rank", 1, attempts=1)
    hosts.seen(1)
    hosts.running[1].signal(signal.SIGKILL)
    hosts.start("2", "--node-rank", 1, attempts=1)
    again = hosts.seen(1, 1)
    assert (again["HOST_NUMBER"], again["GROUP_RANK"]) == ("2", "1")
    refused = hosts.start("2", "--node-rank", 1, attempts=1).wait(20)
    assert refused.code == 1
    assert "there is a node of rank 1 already" in refused.err
    hosts.go()
    assert [hosts.running[number].wait(20).code for number in (0, 2)] == [0, 0]


def test_a_signal_to_all_hosts_ends_them_in_order(hosts: Hosts) -> None:
    hosts.start("2", attempts=1)
    hosts.start("2", attempts=1)
    hosts.seen(1)
    for running in reversed(hosts.running):
        running.signal(signal.SIGTERM)
    done = hosts.ended()
    assert [d.code for d in done] == [128 + signal.SIGTERM] * 2, [d.err for d in done]
    assert not hosts.events("fault")


def test_when_the_supervisor_is_killed_the_other_hosts_end(hosts: Hosts) -> None:
    hosts.start("2", "--orphan-timeout", 3, attempts=1)
    joined = hosts.start("2", "--orphan-timeout", 3, attempts=1)
    hosts.seen(1)
    hosts.running[0].signal(signal.SIGKILL)
    done = joined.wait(30)
    assert done.code == 1
    assert "no word from the supervisor" in done.err


def test_a_host_with_another_key_is_not_heard(hosts: Hosts) -> None:
    hosts.start("2", attempts=1)
    done = hosts.start("2", "--join-timeout", 2, env={"PHOENIX_JOB_KEY": KEY + "!"}).wait(30)
    assert done.code == 1
    assert "somebody listens at" in done.err and "is PHOENIX_JOB_KEY the same on every host?" in done.err
    hosts.running[0].signal(signal.SIGTERM)
    assert hosts.running[0].wait(20).code == 128 + signal.SIGTERM


def test_each_host_chooses_where_its_logs_go(hosts: Hosts) -> None:
    hosts.start("2")
    hosts.start("2", "--log-dir", hosts.folder / "mine")
    hosts.seen(1)
    hosts.go()
    done = hosts.ended()
    assert [d.code for d in done] == [0, 0], [d.err for d in done]
    first, second = socket.gethostname(), f"{socket.gethostname()}-2"
    assert [path.name for path in (done[0].job / "logs").iterdir()] == [first]
    assert [path.name for path in (hosts.folder / "mine").iterdir()] == [second]
    assert f"logs in {hosts.folder}/mine/{second}" in done[1].err


def test_a_start_that_is_refused_is_told_to_the_hosts_that_still_ask(hosts: Hosts) -> None:
    """The first one asks where nobody supervises yet, as the hosts of a job do that are up before the one they need."""
    meet = ["--join-timeout", 50, "--rdzv-conf", "is_host=0"]
    hosts.start("2", *meet, supervises=False)
    hosts.start("2", "--log-dir", "/proc/nowhere")
    for done in hosts.ended():
        assert done.code == 1
        assert "nothing was started: " in done.err and "log folder /proc/nowhere" in done.err, done.err
        assert "Traceback" not in done.err


def test_without_a_key_nothing_starts(tmp_path: Path) -> None:
    done = run(tmp_path / "home", "--nnodes", 2, "--rdzv-endpoint", "127.0.0.1:1", script(tmp_path, PATIENT), 0, 0, 0)
    assert done.code == 2
    assert "PHOENIX_JOB_KEY" in done.err and "phoenix-run keygen" in done.err


def test_two_commands_that_start_at_the_same_moment_agree_who_supervises(tmp_path: Path) -> None:
    witness, port = tmp_path / "witness", free_port()
    witness.mkdir()
    (witness / "go").touch()
    meet = ["--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{port}"]
    args = [*meet, "--start-method", "spawn", script(tmp_path, PATIENT), 0, 0, 0]
    env = {**NO_TORCH, "WITNESS": str(witness), "PHOENIX_JOB_KEY": KEY}
    with started(tmp_path / "home0", args, env=env) as one, started(tmp_path / "home1", args, env=env) as other:
        assert [one.wait(40).code, other.wait(40).code] == [0, 0]
    jobs = [len(list((tmp_path / home).glob("jobs/*"))) for home in ("home0", "home1")]
    assert sorted(jobs) == [0, 1]
