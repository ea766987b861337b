"""What users get wrong, and what strangers send, as real commands: the exit code, one clear line, one hint, nothing left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import zmq

from tests.jobs_under_test import PHOENIX_RUN, Done, environment
from tests.quick_jobs import Ground
from tests.quick_jobs import ground as ground

Eventually = Callable[..., object]

SCRIPT = 'print("hello", flush=True)\n'
PATIENT = """
import os, threading
print("hello", flush=True)
while not os.path.exists("finish"):
    threading.Event().wait(0.01)
"""


def check(done: Done, code: int, line: str, hint: str) -> None:
    """One line of what is wrong and one of what to do, last on the screen; never a traceback."""
    assert done.code == code, done.err
    assert done.out == ""
    said = done.err.splitlines()
    assert "Traceback" not in done.err and len(said) <= 8, done.err
    assert said[-2].startswith("phoenix-run: ") and line in said[-2], done.err
    assert said[-1].startswith("  hint: ") and hint in said[-1], done.err


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("args", "line", "hint"),
    [
        (["--nodez", "2", "train.py"], "there is no option --nodez", "did you mean --nodes?"),
        (["trane.py"], "there is no script trane.py", "looked in"),
        (["wrong.py"], "wrong.py:1: '(' was never closed", "the line is: x = ("),
        (["."], "the script . is a folder", "-m"),
        (["--nodes", "a,b,a", "train.py"], "the host a is named twice", "slots=N"),
        (["--nodes", "a,b", "--spares", "3", "train.py"], "--spares 3 of 2 hosts leaves none", "name more hosts"),
        (["--nproc-per-node", "0", "train.py"], "must be a number from 1", "--nproc-per-node"),
        (["--nproc-per-node", "-1", "train.py"], "must be a number from 1", "--nproc-per-node"),
        (["--port-range", "9-7", "train.py"], "--port-range '9-7'", "--port-range"),
        (["--interface", "eth77", "train.py"], "this machine has no interface eth77", "lo"),
        (["--drill", "kill-moon --node 0", "train.py"], "no such drill: kill-moon", "did you mean kill-node?"),
        (["--drill", "kill-node --node 0 --after soon", "train.py"], "must be numbers", "for example"),
        (["--drill", "kill-node", "train.py"], "kill-node needs one target", "--node N"),
        (["--drill", "kill-node --node 7", "train.py"], "there is no node 7", "nodes: node0"),
        (["--drill", "kill-worker --rank 1", "train.py"], "there is no rank 1", "ranks: 0 to 0"),
        (["--hostfile", "no-file", "train.py"], "cannot read the host file no-file", "slots=8"),
        (["--hostfile", "hosts", "train.py"], "hosts line 2: slots=many is no number", "whole number"),
        (["--hostfile", "empty", "train.py"], "no host stands in empty", "gpu07"),
        (["--heartbeat-timeout", "20", "--orphan-timeout", "3", "train.py"], "is too short", "at least"),
        (["status", "train-0000"], "there is no job train-0000", "there are no jobs in"),
        (["stop"], "there are no jobs yet", "phoenix-run SCRIPT"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_command_is_said_before_anything_starts(
    ground: Ground, args: list[str], line: str, hint: str
) -> None:
    ground.script(SCRIPT)
    ground.script("x = (\n", "wrong.py")
    ground.script("host1\nhost2 slots=many\n", "hosts")
    ground.script("# nobody\n", "empty")
    check(ground.run(*args), 2, line, hint)
    assert not list(ground.home.glob("jobs/*")) and not ground.left()


def test_a_script_that_may_not_be_read_is_named(ground: Ground) -> None:
    ground.script(SCRIPT).chmod(0)
    ended = subprocess.run(
        [*PHOENIX_RUN, "train.py"], capture_output=True, text=True, cwd=ground.folder, stdin=subprocess.DEVNULL,
        timeout=20, env=environment(ground.home, ground.environment), preexec_fn=_give_up_privileges,
    )  # fmt: skip
    check(Done(ended.returncode, ended.stdout, ended.stderr, ground.home), 2, "train.py cannot be read", "permissions")


def _give_up_privileges() -> None:
    """Root may read everything: keep its name, drop its powers (securebits are not needed for a capability drop)."""
    import ctypes

    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE
        ctypes.CDLL(None).prctl(24, 2, 0, 0, 0)  # CAP_DAC_READ_SEARCH


def test_hosts_that_do_not_resolve_stand_in_one_table(ground: Ground, eventually: Eventually) -> None:
    done = ground.run("--nodes", "nowhere1.invalid,nowhere2.invalid", ground.script(SCRIPT))
    check(done, 1, "nothing was started: 2 of 2 nodes cannot take part", "leave those hosts out")
    assert done.err.count("cannot resolve the host name") == 2
    ground.check_nothing_is_left(eventually, done.job)


def test_gpu_without_a_gpu_is_said_by_the_node(ground: Ground, eventually: Eventually) -> None:
    done = ground.run("--nproc-per-node", "gpu", ground.script(SCRIPT), env={"CUDA_VISIBLE_DEVICES": ""})
    check(done, 1, "nothing was started: 1 of 1 node cannot", "mend what the table names")
    assert "node0 has no GPU" in done.err
    ground.check_nothing_is_left(eventually, done.job)


def test_a_store_port_in_use_is_named(ground: Ground, eventually: Eventually, taken: int) -> None:
    done = ground.run("--master-port", taken, ground.script(SCRIPT))
    check(done, 1, f"address already in use: 127.0.0.1 port {taken}", "choose another --master-port")
    ground.check_nothing_is_left(eventually, done.job)


def test_a_range_without_a_free_port_is_named(ground: Ground, taken: int) -> None:
    done = ground.run("--port-range", f"{taken}-{taken}", ground.script(SCRIPT))
    check(done, 1, f"no free port between {taken} and {taken}", "wider --port-range")
    assert not list(ground.home.glob("jobs/*")) and not ground.left()


def test_an_endpoint_that_somebody_else_holds_is_not_waited_for_for_ever(ground: Ground, taken: int) -> None:
    key = ground.run("keygen").out.strip()
    done = ground.run(
        "--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{taken}", "--join-timeout", 1, ground.script(SCRIPT),
        env={"PHOENIX_JOB_KEY": key},
    )  # fmt: skip
    check(
        done, 1, f"somebody listens at tcp://127.0.0.1:{taken} but does not know this key", "or another job or program"
    )
    assert not ground.left()


def test_a_home_that_cannot_be_written_is_named(ground: Ground) -> None:
    done = ground.run(ground.script(SCRIPT), env={"PHOENIX_HOME": "/proc/nowhere"})
    check(done, 2, "cannot write /proc/nowhere/jobs/train-", "PHOENIX_HOME")
    assert not ground.left()


@pytest.mark.skipif(os.geteuid() != 0, reason="a full disk of our own needs root")
@pytest.mark.parametrize("free", [0, 12])
def test_a_home_on_a_full_disk_is_said_whatever_still_fits(ground: Ground, free: int) -> None:
    disk = ground.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a container without the right to mount")
    try:
        (disk / "fill").write_bytes(b"x" * (64 - free) * 1024)
        done = ground.run(ground.script(SCRIPT), env={"PHOENIX_HOME": str(disk)})
        assert done.code in (1, 2) and "No space left on device" in done.err, done.err
        assert "  hint: " in done.err.splitlines()[-1] and "Traceback" not in done.err
        assert not ground.left()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("place", ["long", "missing"])
def test_a_socket_folder_that_does_not_fit_is_not_used(ground: Ground, eventually: Eventually, place: str) -> None:
    folder = ground.folder / ("x" * 120 if place == "long" else "missing")
    if place == "long":
        folder.mkdir()
    done = ground.run("--nodes", 2, ground.script(SCRIPT), env={"XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)})
    assert (done.code, done.out) == (0, "hello\nhello\n"), done.err
    assert place == "missing" or not list(folder.iterdir())
    ground.check_nothing_is_left(eventually, done.job)


def test_strangers_on_the_bus_are_dropped_counted_and_said_once(ground: Ground, eventually: Eventually) -> None:
    with ground.started("--nodes", 2, ground.script(PATIENT)) as running:
        eventually(lambda: len(running.events("worker_started")) == 2, 20)
        assert running.job is not None
        record = json.loads((running.job / "job.json").read_text())
        host, port = record["control_endpoint"].removeprefix("tcp://").split(":")
        for _ in range(5):
            with socket.create_connection((host, int(port))) as sock:
                sock.sendall(os.urandom(4096))
        _knock(record["control_endpoint"], record["server_key"], zmq.curve_keypair(), eventually)

        def counts() -> tuple[int, int]:
            status = json.loads(ground.run("status", "--json").out)
            assert {node["state"] for node in status["nodes"]} == {"ready"}
            return status["strangers"], status["dropped_messages"]

        eventually(lambda: counts()[0] >= 6, 10, "each of them is counted")
        keys = json.loads((running.job / "keys/status.json").read_text())
        _knock(record["control_endpoint"], record["server_key"], (keys["public"], keys["secret"]), eventually)
        eventually(lambda: counts()[1] >= 1, 10, "a malformed message is counted")
        (ground.folder / "finish").touch()
        done = running.wait()
    assert (done.code, done.out) == (0, "hello\nhello\n"), done.err
    assert done.err.count("on the control bus") == 1, done.err
    assert "Traceback" not in done.err
    ground.check_nothing_is_left(eventually, done.job)


def test_the_users_own_commands_raise_no_alarm(ground: Ground, eventually: Eventually) -> None:
    with ground.started(ground.script(PATIENT)) as running:
        eventually(lambda: running.events("worker_started"), 20)
        for _ in range(6):
            assert json.loads(ground.run("status", "--json").out)["strangers"] == 0
        (ground.folder / "finish").touch()
        done = running.wait()
    assert "control bus" not in done.err


def _knock(endpoint: str, server: str, keys: tuple[bytes | str, bytes | str], eventually: Eventually) -> None:
    """A client of the bus that says something which is no message."""
    with zmq.Context() as context, closing(context.socket(zmq.DEALER)) as client:
        public, secret = (key.encode() if isinstance(key, str) else key for key in keys)
        client.curve_publickey, client.curve_secretkey, client.curve_serverkey = public, secret, server.encode()
        client.linger = 500
        client.connect(endpoint)
        client.send(b"not a message")


def test_a_job_without_drills_refuses_to_be_harmed(ground: Ground, eventually: Eventually) -> None:
    with ground.started(ground.script(PATIENT)) as running:
        eventually(lambda: running.events("worker_started"), 20)
        asked = ground.run("inject-fault", "kill-worker", "--rank", 0)
        assert (asked.code, asked.out) == (1, "")
        assert "not started with --allow-drills" in asked.err and len(asked.err.splitlines()) <= 2
        unknown = ground.run("logs", "train-0000")
        assert running.job is not None
        check(unknown, 2, "there is no job train-0000", f"jobs: {running.job.name}")
        wrong = ground.run("inject-fault", "kill-worker", "--rank", 7, "--dry-run")
        assert wrong.code == 1 and "7" in wrong.err and len(wrong.err.splitlines()) <= 2
        (ground.folder / "finish").touch()
        assert running.wait().code == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_harm_nobody(ground: Ground, eventually: Eventually, closed: str) -> None:
    command = f"{' '.join(PHOENIX_RUN)} {ground.script(SCRIPT)} {closed}"
    ended = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=20, cwd=ground.folder,
        env=environment(ground.home, ground.environment),
    )  # fmt: skip
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert ended.stdout == ("" if ">&- " in closed + " " and not closed.startswith("2") else "hello\n")
    (log,) = ground.home.glob("jobs/*/logs/node0/0.g1.out")
    assert log.read_text() == "hello\n"
    ground.check_nothing_is_left(eventually, log.parents[2])


def test_a_variable_that_is_no_text_is_left_out_and_an_argument_is_refused(ground: Ground) -> None:
    done = ground.run(ground.script(SCRIPT), env={"ODD": "\udcff", "EVEN": "ä"})
    assert (done.code, done.out) == (0, "hello\n"), done.err
    assert "the environment variable ODD is no UTF-8 and is not passed on" in done.err
    check(ground.run(ground.script(SCRIPT), "\udcff"), 2, "is no UTF-8", "rename it")


def test_a_folder_that_is_gone_is_said_to_be_gone(ground: Ground) -> None:
    script, gone = ground.script(SCRIPT), ground.folder / "gone"
    gone.mkdir()
    ended = subprocess.run(
        ["sh", "-c", f"cd {gone}; rmdir {gone}; exec {' '.join(PHOENIX_RUN)} {script}"], capture_output=True,
        text=True, timeout=20, env=environment(ground.home, ground.environment),
    )  # fmt: skip
    check(Done(ended.returncode, ended.stdout, ended.stderr, ground.home), 2, "the folder you are in is gone", "exists")
