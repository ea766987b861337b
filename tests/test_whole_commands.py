"""A user's evening: start in the background, look, read, stop; and Ctrl-C in a real terminal."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pexpect
import psutil
import pytest

from tests.jobs_under_test import PHOENIX_RUN, environment
from tests.quick_jobs import STUB, Ground, kill
from tests.quick_jobs import ground as ground

Eventually = Callable[..., object]

PATIENT = """
import os, sys, threading
print("rank", os.environ["RANK"], "works", flush=True)
print("a warning of rank", os.environ["RANK"], file=sys.stderr, flush=True)
while not os.path.exists("finish"):
    threading.Event().wait(0.01)
print("rank", os.environ["RANK"], "ends", flush=True)
"""
QUIET = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_DFL)  # without Python's own traceback
print("rank", os.environ["RANK"], "works", flush=True)
signal.pause()
"""
STUBBORN = PATIENT.replace("import os,", "import signal; signal.signal(2, signal.SIG_IGN); import os,")


def test_a_detached_job_is_watched_read_and_stopped(ground: Ground, eventually: Eventually) -> None:
    begun = ground.run("--detach", "--nodes", 2, ground.script(PATIENT))
    name = begun.out.strip()
    assert begun.code == 0 and re.fullmatch(r"train-[0-9a-f]{4}", name), begun.err
    own = ground.home / "jobs" / name / "logs/supervisor.err"
    assert begun.err.splitlines() == [
        f"phoenix-run: it goes on in the background, and says what it has to say in {own}"
    ]

    def states() -> list[str]:
        return [rank["state"] for rank in json.loads(ground.run("status", "--json").out)["ranks"]]

    eventually(lambda: states() == ["running", "running"], 20)
    shown = ground.run("status", name)
    assert shown.code == 0 and f"job {name}, running" in shown.out and "node1" in shown.out
    assert re.search(rf"^{name} +running ", ground.run("jobs").out, re.M)
    logs = ground.run("logs")
    assert logs.out.splitlines() == ["node0:0| rank 0 works", "node1:1| rank 1 works"]
    assert logs.err.splitlines() == ["node0:0| a warning of rank 0", "node1:1| a warning of rank 1"]
    assert ground.run("logs", name, "--rank", 1).out == "rank 1 works\n"
    stopped = ground.run("stop")
    assert (stopped.code, stopped.out) == (0, f"job {name} stopped, exit code 143\n"), stopped.err
    status = json.loads(ground.run("status", "--json").out)
    assert (status["state"], status["exit_code"]) == ("failed", 143)
    again = ground.run("stop", name)
    assert (again.code, again.out) == (0, f"job {name} has ended already, exit code 143\n")
    folder = ground.home / "jobs" / name
    assert "SIGTERM: stopping" in own.read_text()
    ground.check_nothing_is_left(eventually, folder)


def test_a_torch_that_takes_long_to_load_is_said_to(ground: Ground, eventually: Eventually) -> None:
    slow = ground.folder / "slow"
    shutil.copytree(STUB, slow)
    with (slow / "torch/__init__.py").open("a") as file:
        file.write("import os, threading\nwhile not os.path.exists('go'):\n    threading.Event().wait(0.01)\n")
    begun = ground.run("--detach", "--nodes", 2, ground.script(PATIENT), env={"PYTHONPATH": str(slow)})
    own = ground.home / "jobs" / begun.out.strip() / "logs/supervisor.err"
    eventually(lambda: "phoenix-run: loading torch and the script's imports on 2 nodes ..." in own.read_text(), 20)
    for name in ("go", "finish"):
        (ground.folder / name).touch()
    eventually(lambda: json.loads(ground.run("status", "--json").out)["exit_code"] == 0, 30)
    assert own.read_text().count("loading torch") == 1
    ground.check_nothing_is_left(eventually, own.parent.parent)


def test_a_detached_job_outlives_the_terminal_it_came_from(ground: Ground, eventually: Eventually) -> None:
    command = [*PHOENIX_RUN, "--detach", str(ground.script(PATIENT))]
    terminal = pexpect.spawn(
        "/bin/sh", ["-c", " ".join(command)], env=environment(ground.home, ground.environment),
        cwd=str(ground.folder), timeout=20, encoding="utf-8",
    )  # fmt: skip
    terminal.expect(r"(train-\w+)\r\n")
    terminal.close(force=True)  # hangs up
    eventually(lambda: "works" in ground.run("logs").out, 20)
    follower = subprocess.Popen(
        [*PHOENIX_RUN, "logs", "--follow"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment(ground.home, ground.environment), cwd=ground.folder,
    )  # fmt: skip
    assert follower.stdout is not None
    assert follower.stdout.readline() == "rank 0 works\n"
    (ground.folder / "finish").touch()
    out, _ = follower.communicate(timeout=20)
    assert (follower.returncode, out) == (0, "rank 0 ends\n")
    assert json.loads(ground.run("status", "--json").out)["exit_code"] == 0
    ground.check_nothing_is_left(eventually, next((ground.home / "jobs").iterdir()))


def test_a_detached_start_that_fails_says_so_in_the_terminal(ground: Ground) -> None:
    done = ground.run("--detach", "--master-port", 1, "--interface", "203.0.113.77", ground.script(PATIENT))
    assert done.code == 2 and "no interface 203.0.113.77" in done.err
    done = ground.run("--detach", "--nodes", "nowhere.invalid", ground.script(PATIENT))
    assert (done.code, done.out) == (1, "")
    assert "cannot resolve the host name" in done.err and "Traceback" not in done.err
    assert not ground.left()


# --- a real terminal --------------------------------------------------------------------------------------------------


@contextmanager
def terminal(ground: Ground, *args: object) -> Iterator[pexpect.spawn[str]]:
    """The command as the foreground job of a terminal of its own."""
    child = pexpect.spawn(
        sys.executable, [*PHOENIX_RUN[1:], *map(str, args)], env=environment(ground.home, ground.environment),
        cwd=str(ground.folder), timeout=20, encoding="utf-8", dimensions=(40, 200),
    )  # fmt: skip
    try:
        yield child
    finally:
        child.close(force=True)


def ended(screen: pexpect.spawn[str]) -> int:
    """The exit code of a command that ends by itself: `close` would send it signals, SIGKILL too, after 0.1 to 0.4 s."""
    screen.expect(pexpect.EOF)
    return int(screen.wait())


def test_ctrl_c_is_one_line_130_and_nothing_left(ground: Ground, eventually: Eventually) -> None:
    with terminal(ground, "--nodes", 2, ground.script(QUIET)) as screen:
        for _ in range(2):
            screen.expect(r"node\d:\d\| rank \d works")
        screen.sendintr()
        code = ended(screen)
        said = [line for line in str(screen.before).splitlines() if line.strip("^C \r")]
        assert code == 130
        assert len(said) == 1 and "SIGINT: stopping" in said[0], said
    ground.check_nothing_is_left(eventually, next((ground.home / "jobs").iterdir()))


def test_a_second_ctrl_c_shortens_the_wait_and_a_third_ends_it(ground: Ground, eventually: Eventually) -> None:
    with terminal(ground, ground.script(STUBBORN)) as screen:
        screen.expect("rank 0 works")
        screen.sendintr()
        screen.expect("workers have up to 30 s")
        asked = time.monotonic()
        screen.sendintr()
        screen.expect("SIGINT again: workers have 3 s\r\n")
        screen.sendintr()
        screen.expect("SIGINT again: killing at once\r\n")
        assert ended(screen) == 130
        assert time.monotonic() - asked < 10
    ground.check_nothing_is_left(eventually, next((ground.home / "jobs").iterdir()))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM])
def test_every_polite_signal_ends_the_job_with_its_own_code(
    ground: Ground, eventually: Eventually, number: signal.Signals
) -> None:
    with ground.started(ground.script(PATIENT)) as running:
        eventually(lambda: running.events("worker_started"), 20)
        running.signal(number)
        done = running.wait()
    assert done.code == 128 + number
    assert done.err.count("stopping") == 1 and "Traceback" not in done.err
    ground.check_nothing_is_left(eventually, done.job)


def test_a_terminal_that_is_closed_ends_its_job(ground: Ground, eventually: Eventually) -> None:
    with terminal(ground, ground.script(PATIENT)) as screen:
        screen.expect("rank 0 works")
        screen.ptyproc.fileobj.close()  # the kernel's hang-up, and nothing else
        eventually(lambda: not screen.isalive(), 20, "the command ended by itself")
        assert screen.exitstatus == 128 + signal.SIGHUP
    ground.check_nothing_is_left(eventually, next((ground.home / "jobs").iterdir()))


@pytest.mark.parametrize("after", [0.0, 0.15, 0.4, 0.7])
def test_ctrl_c_at_any_moment_of_the_start_leaves_nothing(ground: Ground, eventually: Eventually, after: float) -> None:
    with ground.started("--nodes", 2, ground.script(PATIENT)) as running:
        moment = time.monotonic() + after
        while time.monotonic() < moment or psutil.Process(running.pid).cmdline()[:1] != [sys.executable]:
            time.sleep(0.005)
        kill(running.pid, signal.SIGINT)
        done = running.wait(20)
    if "init_import_site" not in done.err:  # python itself was not up yet
        assert done.code in (130, -signal.SIGINT), done.err
        assert "Traceback" not in done.err or "phoenix_launch/" not in done.err, done.err
    ground.check_nothing_is_left(eventually, None)
