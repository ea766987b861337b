"""Guardians are started on real hosts by the system's ssh: what they are given arrives whole, failures are named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from testhosts import Cluster

from phoenix_launch.bootstrap import AgentBootstrap

pytestmark = pytest.mark.hosts

STARTER = str(Path(__file__).with_name("start_over_ssh.py"))
STAND_IN = """
import os, sys
from pathlib import Path
line = sys.stdin.buffer.readline()
here = Path(__file__).parent
(here / "line").write_bytes(line)
(here / "argv").write_text(repr(sys.argv[1:]))
print("ready", flush=True)
sys.stdin.buffer.read()
(here / "end").write_text("of stdin")
"""

WATCH = """
import sys
from phoenix_launch.hosts.remote import start_watch
handle = start_watch("host1", 0, "host1", int(sys.stdin.readline()), "ssh", "/run", 10)
print(handle._process.wait(20), flush=True)
handle.close()
"""


@pytest.fixture
def stand_in(shared_folder: Path) -> Path:
    """A program in place of the interpreter, in a folder with a name that needs quotes; it keeps what it was given."""
    folder = shared_folder / "it's my env"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    program = folder / "python"
    program.write_text(f"#!{sys.executable}\n{STAND_IN}")
    program.chmod(0o755)
    return program


def written(shared_folder: Path, task: dict[str, Any]) -> str:
    path = shared_folder / "task.json"
    path.write_text(json.dumps({"connect_timeout": 2, "patience": 20} | task))
    return str(path)


def start(hosts: Cluster, shared_folder: Path, **task: Any) -> dict[str, Any]:
    argv = [sys.executable, STARTER, written(shared_folder, task)]
    done = hosts.run("head", argv, stdout=subprocess.PIPE, timeout=60, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_bootstrap_arrives_to_the_letter_whatever_is_in_it(
    hosts: Cluster, shared_folder: Path, stand_in: Path
) -> None:
    environment = {"QUOTED": 'it\'s "so"\nor $HOME `so` \\ ! ü', "EMPTY": "", "BIG": "x" * (1 << 20)}
    starts = [{"name": "host1", "host": "host1", "python": str(stand_in), "environment": environment}]
    report = start(hosts, shared_folder, starts=starts)
    assert report["host1"]["lines"] == ["ready"]
    given = msgspec.json.decode((stand_in.parent / "line").read_bytes(), type=AgentBootstrap)
    assert given.environment == environment
    assert given.command.args == ("--name", "a b")
    assert (stand_in.parent / "argv").read_text() == "['-P', '-m', 'phoenix_launch.node.guardian']"
    assert report["sockets"] == ["0"]


def test_every_host_that_cannot_be_started_is_named_with_its_reason(hosts: Cluster, shared_folder: Path) -> None:
    hosts.sshd("host1", "stop")
    hosts.sshd("host2", "hang")
    hosts.link("host3", "down")
    no_key = "ssh -o PubkeyAuthentication=no"
    starts = [
        {"name": "unknown", "host": "nosuch.invalid"},
        {"name": "stopped", "host": "host1"},
        {"name": "hung", "host": "host2"},
        {"name": "unplugged", "host": "host3"},
        {"name": "no-key", "host": "host4", "ssh": no_key},
        {"name": "other-key", "host": "host4", "ssh": "ssh -o UserKnownHostsFile=/dev/null"},
        {"name": "no-python", "host": "host4", "python": "/no such/python"},
        {"name": "no-program", "host": "host4", "python": "/etc/passwd"},
        {"name": "not-installed", "host": "host4", "python": "/usr/bin/python3"},
    ]
    report = start(hosts, shared_folder, starts=starts)
    reasons = {start["name"]: report[str(start["name"])]["reason"] for start in starts}
    assert reasons == {
        "unknown": "cannot resolve the host name",
        "stopped": "connection refused",
        "hung": "timed out: sshd accepts connections but says nothing",
        "unplugged": "timed out",
        "no-key": "permission denied (publickey,keyboard-interactive)",
        "other-key": "host key verification failed",
        "no-python": "there is no interpreter /no such/python",
        "no-program": "the interpreter /etc/passwd cannot be executed",
        "not-installed": "phoenix-run is not installed in /usr/bin/python3",
    }
    assert all(report[str(start["name"])]["hint"] for start in starts)
    assert report["hung"]["seconds"] < 2 + 4
    assert report["unplugged"]["seconds"] < 2 + 4


def test_the_ssh_client_dies_with_a_killed_supervisor_and_the_guardian_sees_the_end_of_its_stdin(
    hosts: Cluster, shared_folder: Path, stand_in: Path, eventually: Callable[..., object]
) -> None:
    starts = [{"name": "host1", "host": "host1", "python": str(stand_in)}]
    argv = [sys.executable, STARTER, written(shared_folder, {"starts": starts, "stay": True})]
    with hosts.popen("head", argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        assert json.loads(supervisor.stdout.readline())["host1"]["lines"] == ["ready"]
        assert any("ControlMaster=auto" in line for line in hosts.command_lines("head"))
        assert hosts.kill("head", match="^[^ ]*python[^ ]* [^ ]*start_over_ssh")
        assert supervisor.wait(10) == 128 + 9
    assert eventually(lambda: (stand_in.parent / "end").exists(), 10)
    assert eventually(lambda: not any("ControlMaster" in line for line in hosts.command_lines("head")), 10)


def test_a_channel_opened_again_ends_when_the_guardian_does(hosts: Cluster, eventually: Callable[..., object]) -> None:
    with (
        hosts.popen("host1", ["sh", "-c", "echo $$; exec sleep 44"], stdout=subprocess.PIPE) as guardian,
        hosts.popen("head", [sys.executable, "-c", WATCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as watch,
    ):
        assert guardian.stdout is not None and watch.stdin is not None and watch.stdout is not None
        watch.stdin.write(guardian.stdout.readline())
        watch.stdin.flush()
        assert eventually(lambda: any(line.startswith("tail --pid") for line in hosts.command_lines("host1")))
        assert watch.poll() is None
        hosts.kill("host1", match="^sleep 44")
        assert watch.stdout.readline() == b"0\n"
