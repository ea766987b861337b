"""Jobs on several hosts, as people start and stop them: host lists, host files, environment, logs, Ctrl-C."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs_on_hosts import STUB, Head
from testhosts import Cluster

from tests.jobs_under_test import PHOENIX_RUN, environment

pytestmark = pytest.mark.hosts

# Says as JSON who it is and what it was given.
REPORT = """
import json, os, socket, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GIVEN", "FORWARDED", "EMPTY", "MARK"]
print(json.dumps({name: os.environ.get(name) for name in names}
                 | {"host": socket.gethostname(), "argv": sys.argv[1:], "executable": sys.executable}))
"""

# A collective over gloo between all ranks.
SUM = """
import os, torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(total)
print("sum", int(total), "of rank", dist.get_rank(), "on", os.environ["PHOENIX_NODE"], flush=True)
dist.destroy_process_group()
"""

AWKWARD = 'it\'s "so"\nor $HOME `so` \\ ! ü;\t*'


def reports(out: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = [json.loads(line) for line in out.splitlines()]
    return sorted(found, key=lambda report: int(str(report["RANK"])))


def test_ranks_on_all_hosts_of_a_list_meet_and_compute_together(head: Head) -> None:
    done = head.run("--nodes", "host[1-4]", "--nproc-per-node", 1, head.script(SUM), torch=True)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [f"sum 15 of rank {i} on host{i + 1}" for i in range(4)]


def test_a_hostfile_gives_slots_racks_interpreters_and_spares(head: Head) -> None:
    other = head.folder / "python-own"
    other.write_text(f'#!/bin/sh\nMARK="its own" exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    hostfile = head.folder / "hosts"
    hostfile.write_text(
        f"# uneven\nhost1 slots=3 rack=a\nhost2 slots=1 rack=b python={other}\nhost3 slots=3 rack=b spare\n"
    )
    done = head.run("--hostfile", hostfile, head.script(REPORT))
    assert done.code == 0, done.err
    found = reports(done.out)
    assert [(r["host"], r["LOCAL_RANK"], r["LOCAL_WORLD_SIZE"], r["GROUP_RANK"]) for r in found] == [
        ("host1", "0", "3", "0"),
        ("host1", "1", "3", "0"),
        ("host1", "2", "3", "0"),
        ("host2", "0", "1", "1"),
    ]
    assert {r["WORLD_SIZE"] for r in found} == {"4"}
    assert [r["MARK"] for r in found] == [None, None, None, "its own"]


def test_environment_and_arguments_arrive_to_the_letter(head: Head) -> None:
    done = head.run(
        "--nodes", "host1,host2", "--env", f"GIVEN={AWKWARD}", "--env", "FORWARDED", "--env", "EMPTY=",
        head.script(REPORT), AWKWARD, "", "--nodes", "a b", "*",
        env={"FORWARDED": AWKWARD, "MARK": "stays on the head"},
    )  # fmt: skip
    assert done.code == 0, done.err
    for report in reports(done.out):
        assert [report[name] for name in ("GIVEN", "FORWARDED", "EMPTY", "MARK")] == [AWKWARD, AWKWARD, "", None]
        assert report["argv"] == [AWKWARD, "", "--nodes", "a b", "*"]
        assert report["executable"] == sys.executable


def test_logs_stay_on_each_host_and_the_head_fetches_them(head: Head, hosts: Cluster) -> None:
    own = {"PHOENIX_HOME": "", "HOME": "/root"}  # every host keeps jobs in a home of its own
    source = 'import os; print("out of", os.environ["RANK"]); raise SystemExit(open("/nowhere"))'
    done = head.run("--nodes", "host1,host2", "--job-name", "fetched", head.script(source), env=own)
    assert done.code == 1
    kept = "/root/.local/state/phoenix/jobs"
    listing = hosts.run("host2", ["sh", "-c", f"cd {kept}/fetched-*/logs && ls -A *"], capture_output=True, text=True)
    assert listing.stdout == "1.g1.err\n1.g1.out\n"
    every = head.run("logs", env=own)
    assert every.code == 0, every.err
    assert every.out == "host1:0| out of 0\nhost2:1| out of 1\n"
    one = head.run("logs", "--node", "host2", "--rank", "1", env=own)
    assert one.out == "out of 1\n"
    assert "No such file or directory: '/nowhere'" in one.err
    for host in ("head", "host1", "host2"):
        hosts.run(host, ["rm", "-r", kept], check=True)


def pressed(head: Head, wait_for: str, *args: object) -> dict[str, object]:
    keys = str(Path(__file__).with_name("press_keys.py"))
    argv = [sys.executable, keys, wait_for, "c", *PHOENIX_RUN, *map(str, args)]
    done = head.hosts.run(
        "head", argv, stdout=subprocess.PIPE, text=True, timeout=90, check=True, cwd=head.folder,
        env=environment(head.home, {"PYTHONPATH": str(STUB), "PET_START_METHOD": "spawn", "TERM": "xterm"}),
    )  # fmt: skip
    shown: dict[str, object] = json.loads(done.stdout)
    return shown


def test_ctrl_c_in_a_terminal_ends_all_hosts_with_one_line(head: Head, eventually: Callable[..., object]) -> None:
    report = pressed(head, "rank 1 attempt 0 on host2", "--nodes", "host1,host2", "--spares", "host3", head.script())
    assert report["code"] == 130
    own = [line for line in str(report["shown"]).splitlines() if "phoenix-run" in line]
    assert len(own) == 1, own
    assert "SIGINT" in own[0]
    assert eventually(lambda: not any(head.tree(host) for host in ("head", "host1", "host2", "host3")), 5)


def test_ctrl_c_while_the_hosts_are_still_starting_leaves_nothing_there(
    head: Head, hosts: Cluster, eventually: Callable[..., object]
) -> None:
    hosts.sshd("host2", "hang")
    report = pressed(head, "phoenix-run: job", "--nodes", "host1,host2", head.script())
    assert report["code"] == 130, report
    hosts.sshd("host2", "cont")
    assert eventually(lambda: not any(head.tree(host) for host in ("head", "host1", "host2")), 5)


KEY = {"PHOENIX_JOB_KEY": "k" * 40}
TOGETHER = ("--nnodes", 2, "--rdzv-endpoint", "host1:29400", "--nproc-per-node", 2)


def test_the_same_command_on_two_hosts_becomes_one_job(head: Head) -> None:
    script = head.script(REPORT)
    with head.started(*TOGETHER, script, "a b", host="host2", env=KEY) as other:
        with head.started(*TOGETHER, script, "a b", host="host1", env=KEY) as first:
            done = first.wait()
        assert other.wait().code == 0
    assert done.code == 0, done.err
    found = reports(done.out)
    assert [(r["host"], r["LOCAL_RANK"]) for r in found] == [
        ("host1", "0"),
        ("host1", "1"),
        ("host2", "0"),
        ("host2", "1"),
    ]
    assert all(r["argv"] == ["a b"] for r in found)


def test_a_joined_host_ends_when_the_supervisors_host_lost_power(head: Head, hosts: Cluster) -> None:
    limits = ("--heartbeat-timeout", 1, "--orphan-timeout", 2)
    script = head.script()
    with head.started(*TOGETHER, *limits, script, host="host2", env=KEY) as other:
        with head.started(*TOGETHER, *limits, script, host="host1", env=KEY) as first:
            head.await_workers(first, 4)
            tree = head.tree("host2")
            hosts.kill("host1")
            head.await_end(tree)
        done = other.wait()
    assert done.code == 1
    assert "its supervisor is gone" in done.err


def test_a_joined_host_that_lost_power_is_missed_and_its_seat_is_given_up_when_fewer_are_allowed(
    head: Head, hosts: Cluster
) -> None:
    elastic = ("--nnodes", "1:2", "--rdzv-endpoint", "host1:29400", "--nproc-per-node", 2)
    script = head.script()
    with (
        head.started(*elastic, script, host="host2", env=KEY),
        head.started(*elastic, script, host="host1", env=KEY) as first,
    ):
        head.await_workers(first, 4)
        hosts.kill("host2")
        head.await_workers(first, 2, generation=2)
        head.go()
        done = first.wait()
    assert done.code == 0, done.err
    assert "rank 1 attempt 1 on host1" in done.out
