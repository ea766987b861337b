"""Guardians are started here and behind an ssh client without anybody waiting, and every failure has a reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from bootstraps import bootstrap

from phoenix_launch.errors import StartError, UsageError
from phoenix_launch.hosts.remote import NodeHandle, reason, ssh_command, start_local, start_ssh
from phoenix_launch.hosts.ssh_failures import explain

Eventually = Callable[..., object]

READER = """
import hashlib, json, os, select, sys
line = sys.stdin.buffer.readline()
still_open = not select.select([0], [], [], 0)[0]
digest = hashlib.sha256(line).hexdigest()
print(json.dumps([sys.argv[1:], len(line), digest, still_open, sorted(os.environ)]), flush=True)
sys.stdin.buffer.read()
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Something that stands in for an interpreter or an ssh client: the path of a program with this source."""

    def make(source: str) -> str:
        path = tmp_path / f"program{len(list(tmp_path.iterdir()))}"
        path.write_text(f"#!{sys.executable} -S\n{source}")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def started() -> Iterator[list[NodeHandle]]:
    handles: list[NodeHandle] = []
    yield handles
    for handle in handles:
        handle.close()


def read_until_end(handle: NodeHandle, eventually: Eventually) -> list[str]:
    lines: list[str] = []

    def at_end() -> bool:
        lines.extend(handle.read_lines())
        return handle.at_end

    eventually(at_end)
    return lines


def first_line(handle: NodeHandle, eventually: Eventually) -> str:
    lines = eventually(handle.read_lines)
    assert isinstance(lines, list)
    return str(lines[0])


@pytest.mark.parametrize("size", [10, 5 << 20])
def test_a_guardian_gets_its_bootstrap_whole_and_its_stdin_stays_open(
    size: int, program: Callable[[str], str], started: list[NodeHandle], eventually: Eventually
) -> None:
    import hashlib

    import msgspec

    sent = bootstrap(environment={"QUOTED": 'it\'s "so"\nor $HOME so', "BIG": "ä" * (size // 2)})
    started.append(start_local(sent, program(READER)))
    argv, length, digest, still_open, _ = json.loads(first_line(started[0], eventually))
    line = msgspec.json.encode(sent) + b"\n"
    assert (length, digest) == (len(line), hashlib.sha256(line).hexdigest())
    assert still_open
    assert argv == ["-P", "-m", "phoenix_launch.node.guardian"]


def test_a_guardian_that_never_reads_keeps_nobody_waiting(
    program: Callable[[str], str], started: list[NodeHandle], eventually: Eventually
) -> None:
    began = time.monotonic()
    handle = start_local(bootstrap(environment={"BIG": "x" * (5 << 20)}), program("import signal; signal.pause()"))
    started.append(handle)
    assert handle.read_lines() == []
    assert handle.poll() is None
    handle.close()
    assert handle.poll() == -signal.SIGKILL
    assert time.monotonic() - began < 5
    assert not [thread for thread in threading.enumerate() if thread.name == "bootstrap node0"]


def test_the_job_key_is_not_in_a_guardians_environment(
    program: Callable[[str], str],
    started: list[NodeHandle],
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PHOENIX_JOB_KEY", "secret")
    monkeypatch.setenv("PHOENIX_OTHER", "open")
    started.append(start_local(bootstrap(), program(READER)))
    names = json.loads(first_line(started[0], eventually))[4]
    assert "PHOENIX_OTHER" in names
    assert "PHOENIX_JOB_KEY" not in names


def test_lines_come_whole_the_last_one_too(
    program: Callable[[str], str], started: list[NodeHandle], eventually: Eventually
) -> None:
    source = (
        "import os\nos.write(1, b'one\\ntw'); os.write(2, b'o\\n\\xff\\r\\n' + b'x' * 9000 + b'\\nrest'); os._exit(7)"
    )
    handle = start_local(bootstrap(), program(source))
    started.append(handle)
    lines = read_until_end(handle, eventually)
    assert lines[:3] == ["one", "two", "\ufffd"]
    assert "".join(lines[3:-1]) == "x" * len("".join(lines[3:-1]))
    assert max(map(len, lines)) <= 4096
    assert lines[-1] == "rest"
    assert eventually(lambda: handle.poll() == 7)
    assert reason(handle) == "its agent ended with exit code 7: rest"


def test_an_interpreter_that_is_not_there_is_a_start_error() -> None:
    with pytest.raises(StartError, match="there is no /nowhere/python"):
        start_local(bootstrap(), "/nowhere/python")


def test_a_missing_ssh_client_is_a_start_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(StartError) as caught:
        start_ssh(bootstrap(), "h1", "/nowhere/ssh -v", "/usr/bin/python", str(tmp_path), 10)
    assert caught.value.message == "there is no /nowhere/ssh"
    assert "--ssh" in caught.value.hint


@pytest.mark.parametrize(("ssh", "message"), [("ssh 'x", "No closing quotation"), ("", "--ssh is empty")])
def test_an_ssh_option_that_no_shell_would_take_is_a_usage_error(ssh: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ssh_command("h1", "true", ssh, "/run/c/0", 10)


def test_the_ssh_client_never_asks_and_leaves_the_users_configuration_alone() -> None:
    argv = ssh_command("me@h1", "exec true", "ssh -F 'my file' -v", "/run/c/0%", 2.6)
    assert argv[:4] == ["ssh", "-F", "my file", "-v"]
    assert argv[-3:] == ["--", "me@h1", "exec true"]
    options = argv[argv.index("-T") + 1 : -3]
    assert options[::2] == ["-o"] * (len(options) // 2)
    assert set(options[1::2]) >= {
        "BatchMode=yes",
        "ConnectTimeout=3",
        "ControlMaster=auto",
        'ControlPath="/run/c/0%%"',
        "ControlPersist=no",
    }
    assert not [option for option in options if "StrictHostKeyChecking" in option]


def test_a_path_too_long_for_a_socket_means_no_shared_connection() -> None:
    argv = ssh_command("h1", "true", "ssh", "/run/" + "x" * 100, 10)
    assert "ControlMaster=no" in argv
    assert "ControlPath=none" in argv


def test_nothing_of_a_bootstrap_is_on_the_ssh_clients_command_line(
    program: Callable[[str], str], started: list[NodeHandle], eventually: Eventually, tmp_path: Path
) -> None:
    client = program(READER)
    sent = bootstrap(environment={"TOKEN": "hidden value"}, index=3)
    started.append(start_ssh(sent, "h1", client, "/my env/python", str(tmp_path), 10))
    argv = json.loads(first_line(started[0], eventually))[0]
    assert argv[-2:] == ["h1", "exec '/my env/python' -P -m phoenix_launch.node.guardian"]
    assert "hidden" not in " ".join(argv)
    assert "secret" not in " ".join(argv)


def test_an_ssh_client_dies_with_the_one_who_started_it(
    program: Callable[[str], str], eventually: Eventually, tmp_path: Path
) -> None:
    client = program("import signal; print('up', flush=True); signal.pause()")
    source = (
        "import sys, signal; sys.path.insert(0, sys.argv[3])\n"
        "from bootstraps import bootstrap\n"
        "from phoenix_launch.hosts.remote import start_ssh\n"
        "handle = start_ssh(bootstrap(), 'h1', sys.argv[1], 'python', sys.argv[2], 10)\n"
        "print(handle.pid, flush=True)\n"
        "signal.pause()\n"
    )
    argv = [sys.executable, "-c", source, client, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert psutil.pid_exists(pid)
        owner.kill()
    assert eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    try:
        os.waitpid(pid, 0)  # it came to us, if orphans do
    except ChildProcessError:
        pass


def test_an_ssh_client_is_not_started_by_a_thread_that_it_would_die_with(tmp_path: Path) -> None:
    caught: list[BaseException] = []

    def start() -> None:
        try:
            start_ssh(bootstrap(), "h1", "ssh", "python", str(tmp_path), 10)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(10)
    assert "main thread" in str(caught[0])


@pytest.mark.parametrize(
    ("code", "line", "what"),
    [
        (255, "ssh: Could not resolve hostname h1: Name or service not known", "cannot resolve the host name"),
        (255, "ssh: connect to host h1 port 22: Connection refused", "connection refused"),
        (255, "ssh: connect to host h1 port 22: Connection timed out", "timed out"),
        (255, "ssh: connect to host h1 port 22: Operation timed out", "timed out"),
        (255, "Timeout, server h1 not responding.", "timed out"),
        (
            255,
            "Connection timed out during banner exchange",
            "timed out: sshd accepts connections but says nothing",
        ),
        (255, "ssh: connect to host h1 port 22: No route to host", "there is no route to it"),
        (255, "Host key verification failed.", "host key verification failed"),
        (255, "me@h1: Permission denied (publickey).", "permission denied (publickey)"),
        (255, "command-line: line 0: Bad configuration option: foo", "ssh: Bad configuration option: foo"),
        (
            255,
            "kex_exchange_identification: read: Connection reset by peer",
            "the connection was closed before the login",
        ),
        (255, "something new", "ssh failed: something new"),
        (255, "", "ssh failed and said nothing"),
        (127, "bash: line 1: /x/python: No such file or directory", "there is no interpreter /x/python"),
        (126, "bash: line 1: /x/python: Permission denied", "the interpreter /x/python cannot be executed"),
        (2, "Unknown option: -P", "/x/python is older than Python 3.11"),
        (
            1,
            "/x/python: Error while finding module specification for 'phoenix_launch.node.guardian' "
            "(ModuleNotFoundError: No module named 'phoenix_launch')",
            "phoenix-run is not installed in /x/python",
        ),
        (
            1,
            "ModuleNotFoundError: No module named 'zmq'",
            "zmq, which phoenix-run needs, is not installed in /x/python",
        ),
        (
            1,
            "This account is currently not available.",
            "no login is possible: This account is currently not available.",
        ),
        (1, "ValueError: 3", "its agent ended with exit code 1: ValueError: 3"),
        (1, "", "its agent ended with exit code 1 and said nothing"),
        (-9, "", "its agent was killed by SIGKILL and said nothing"),
        (
            1,
            "cannot reach the supervisor at tcp://10.0.0.1:7: no answer",
            "cannot reach the supervisor at tcp://10.0.0.1:7: no answer",
        ),
        (None, "", "no word came from its agent"),
        (None, "hm", "no word came from its agent; its last words: hm"),
        (None, "ssh: connect to host h1 port 22: Connection timed out", "timed out"),
    ],
)
def test_a_reason_is_one_clear_sentence(code: int | None, line: str, what: str) -> None:
    found = explain(code, ["Welcome to h1", line], host="h1", python="/x/python")
    if not line:
        found = explain(code, [], host="h1", python="/x/python")
    assert found == what
    assert "\n" not in found + found.hint


def test_what_a_local_guardian_says_is_not_taken_for_words_of_ssh() -> None:
    assert explain(255, ["Connection refused"], host="", python="/x/python").startswith(
        "its agent ended with exit code 255"
    )
