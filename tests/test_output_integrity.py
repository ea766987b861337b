"""What workers write reaches the console whole and in order, however slowly it is read and however the workers end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from phoenix_launch.job.last_output import LastOutput
from phoenix_launch.messages import ExitReport, NodeReport, ProcessState, RankReport
from phoenix_launch.wire import Generation
from tests.jobs_under_test import PHOENIX_RUN, environment
from tests.quick_jobs import Ground, kill
from tests.quick_jobs import ground as ground

Eventually = Callable[..., object]

FLOOD = """
import os, sys
for number in range(int(sys.argv[1])):
    print("rank", os.environ["RANK"], "line", number, "x" * 80)
"""


def numbers(text: str, rank: int) -> list[int]:
    return [int(found) for found in re.findall(rf"^rank {rank} line (\d+) x{{80}}$", text, re.M)]


@contextlib.contextmanager
def piped(ground: Ground, *args: object) -> Iterator[subprocess.Popen[bytes]]:
    """A job whose stdout nobody reads before the test does."""
    process = subprocess.Popen(
        [*PHOENIX_RUN, *map(str, args)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        env=environment(ground.home, ground.environment), cwd=ground.folder,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def until_waiting(process: subprocess.Popen[bytes]) -> bytes:
    """What it says on stderr up to the line that it waits for its reader."""
    assert process.stderr is not None
    said = b""
    while b"is not read: waiting" not in said:
        line = process.stderr.readline()
        assert line, f"it has ended:\n{said.decode()}"
        said += line
    return said


def test_many_lines_of_four_workers_are_all_there_and_in_order(ground: Ground) -> None:
    done = ground.run("--nproc-per-node", 4, ground.script(FLOOD), 5000)
    assert done.code == 0, done.err
    for rank in range(4):
        assert numbers(done.out, rank) == list(range(5000))
        assert numbers((done.job / f"logs/node0/{rank}.g1.out").read_text(), rank) == list(range(5000))


def test_a_reader_who_stands_still_gets_everything_when_he_goes_on(ground: Ground, eventually: Eventually) -> None:
    lines = 30_000  # fills the queues of the supervisor and of the node
    with piped(ground, ground.script(FLOOD), lines) as process:
        assert process.stdout is not None and process.stderr is not None
        said = until_waiting(process)  # longer than the job would wait for output that is on its way
        assert process.poll() is None
        status = ground.run("status", "--json").out
        assert '"state":"running"' in status and '"state":"ready"' in status
        out, err = process.communicate(timeout=20)
    assert numbers(out.decode(), 0) == list(range(lines))
    assert process.returncode == 0, said + err
    ground.check_nothing_is_left(eventually, None)


def test_workers_wait_for_a_reader_who_stands_still_and_their_node_stays_alive(
    ground: Ground, eventually: Eventually
) -> None:
    source = FLOOD + 'open("done", "w").close()\n'
    with piped(ground, "--heartbeat-timeout", 1, ground.script(source), 60_000) as process:
        assert process.stdout is not None
        first = process.stdout.read(100)
        threading.Event().wait(2.5)  # nothing to wait for: this is the time in which nothing may happen
        assert not (ground.folder / "done").exists()
        assert '"state":"lost"' not in ground.run("status", "--json").out
        rest, err = process.communicate(timeout=40)
    assert (process.returncode, b"lost" in err) == (0, False), err
    assert numbers((first + rest).decode(), 0) == list(range(60_000))


def test_a_stop_does_not_wait_for_a_reader_who_stands_still(ground: Ground, eventually: Eventually) -> None:
    source = FLOOD + "import time; time.sleep(60)\n"
    with piped(ground, ground.script(source), 2000) as process:
        assert process.stderr is not None and process.stdout is not None
        eventually(lambda: list(ground.home.glob("jobs/*/logs/node0/0.g1.out")), 20)
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 130
        assert b"SIGINT: stopping" in process.stderr.read()
    ground.check_nothing_is_left(eventually, None)


def test_a_signal_ends_the_waiting_and_what_the_launcher_says_did_not_wait(
    ground: Ground, eventually: Eventually
) -> None:
    source = FLOOD + "import sys; sys.exit('the worker failed')\n"
    with piped(ground, ground.script(source), 2000) as process:
        assert process.stderr is not None
        said = until_waiting(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 1
        said += process.stderr.read()
    assert said.rstrip().endswith(b"the worker failed")
    ground.check_nothing_is_left(eventually, None)


def test_a_reader_who_leaves_costs_the_job_nothing(ground: Ground, eventually: Eventually) -> None:
    with piped(ground, ground.script(FLOOD), 20_000) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 0, process.stderr.read()
        assert b"Traceback" not in process.stderr.read()
    (log,) = ground.home.glob("jobs/*/logs/node0/0.g1.out")
    assert len(numbers(log.read_text(), 0)) == 20_000
    ground.check_nothing_is_left(eventually, log.parents[2])


def test_a_worker_killed_within_a_write_leaves_whole_lines(ground: Ground, eventually: Eventually) -> None:
    source = """
import os, sys, threading
if os.environ["RANK"] == "0":
    for number in range(200):
        print("rank 0 line", number, "x" * 80)
    os.write(1, b"half a li")
    open("written", "w").close()
while not os.path.exists("go"):
    threading.Event().wait(0.01)
print("the other goes on" if os.environ["RANK"] == "1" else "never")
"""
    with ground.started("--nproc-per-node", 2, "--shutdown-timeout", 5, ground.script(source)) as running:
        eventually(lambda: (ground.folder / "written").exists(), 20)
        (victim,) = [e["pid"] for e in running.events("worker_started") if e["rank"] == 0]
        kill(victim)
        done = running.wait()
    assert done.code == 1
    assert numbers(done.out, 0) == list(range(200))
    assert done.out.splitlines()[-1] == "half a li" and done.out.endswith("\n")
    shown = ground.run("logs").out.splitlines()
    assert shown[-1] == "node0:0| half a li"


def test_a_console_on_a_full_disk_is_said_once_and_the_job_goes_on(ground: Ground) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*PHOENIX_RUN, str(ground.script(FLOOD)), "3000"],
            stdout=full, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=30, text=True,
            env=environment(ground.home, ground.environment), cwd=ground.folder,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("stdout cannot be written (No space left on device)") == 1


def test_logs_on_a_full_disk_are_said_once_and_the_job_goes_on(ground: Ground) -> None:
    """A file may not grow over 64 KiB here: to who writes it that is a full disk."""
    limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); "
    limited += "sys.argv = sys.argv[1:]; runpy.run_module('phoenix_launch', run_name='__main__')"
    ended = subprocess.run(
        [sys.executable, "-c", limited, "phoenix-run", "--nproc-per-node", "2", str(ground.script(FLOOD)), "3000"],
        capture_output=True, stdin=subprocess.DEVNULL, timeout=30, text=True,
        env=environment(ground.home, ground.environment), cwd=ground.folder,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("cannot be written (File too large)") == 1
    for rank in range(2):
        assert numbers(ended.stdout, rank) == list(range(3000))


def test_odd_bytes_giant_lines_and_progress_bars_come_through(ground: Ground) -> None:
    source = r"""
import os, sys
os.write(1, b"\xff\xfe no text \x80\n")
os.write(1, b"g" * 300_000 + b"\n")
for step in range(1000):
    sys.stdout.write(f"\r{step}/1000")
sys.stdout.write("\r1000/1000\nthe end\n")
"""
    with piped(ground, ground.script(source)) as process:
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    lines = out.split(b"\n")
    assert lines[0] == b"\xff\xfe no text \x80"
    giant = [line for line in lines if line.startswith(b"g")]
    assert b"".join(giant) == b"g" * 300_000
    assert lines[-3:] == [b"1000/1000", b"the end", b""]
    assert len(lines) < 40


def test_a_console_that_was_made_non_blocking_loses_nothing(ground: Ground) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        process = subprocess.Popen(
            [*PHOENIX_RUN, str(ground.script(FLOOD)), "5000"], stdout=write, stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL, env=environment(ground.home, ground.environment), cwd=ground.folder,
        )  # fmt: skip
    finally:
        os.close(write)
    with open(read, "rb") as stream:
        taken = stream.read()
    assert process.wait(20) == 0
    assert numbers(taken.decode(), 0) == list(range(5000))


# --- the decision -----------------------------------------------------------------------------------------------------


def over(rank: int) -> NodeReport:
    ended = RankReport(rank, Generation(1, 1), 4711, ProcessState.GONE, exit=ExitReport(0, 0.0))
    return NodeReport("x", 1, True, 0, (), Generation(1, 1), Generation(1, 1), (ended,))


def test_only_streams_of_living_nodes_are_waited_for() -> None:
    output = LastOutput(arrival=5, reader=600)
    output.note(0, over(0))
    output.note(1, over(1))
    first = {(0, Generation(1, 1), 1): None, (0, Generation(1, 1), 2): None}
    assert {key[0] for key in output.pending({}, lambda node: True)} == {0, 1}
    assert {key[0] for key in output.pending(first, lambda node: True)} == {1}
    assert not output.pending(first, lambda node: node == 0)
    output.forget(1)
    assert not output.pending(first, lambda node: True)


@pytest.mark.parametrize(
    ("stuck", "stopped", "patience"), [(True, False, 600.0), (True, True, 5.0), (False, False, 5.0)]
)
def test_a_reader_is_waited_for_as_long_as_he_reads_and_a_bounded_time_more(
    stuck: bool, stopped: bool, patience: float
) -> None:
    output = LastOutput(arrival=5, reader=600)
    for turn in range(5):  # something is read every 4 s: no ceiling
        assert not output.complete(turn * 4.0, pending=True, written=turn, stuck=stuck, stopped=stopped)
    last = 16.0
    assert not output.complete(last + patience - 0.1, pending=True, written=4, stuck=stuck, stopped=stopped)
    assert output.complete(last + patience, pending=True, written=4, stuck=stuck, stopped=stopped)
    assert output.complete(last + patience, pending=True, written=5, stuck=stuck, stopped=stopped)


def test_the_waiting_is_said_once() -> None:
    output = LastOutput(arrival=5, reader=600)
    assert not output.complete(0.0, pending=True, written=0, stuck=True, stopped=False)
    assert output.remark(4.9, stuck=True) == ""
    assert "up to 600 s" in output.remark(5.0, stuck=True)
    assert output.remark(6.0, stuck=True) == ""
