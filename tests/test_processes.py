"""A signal hits exactly whom it is meant for, and a kill loop leaves nobody; who belongs to whom is found without signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_supervisor import Witness

from phoenix_launch import process_table, processes
from phoenix_launch.clock import OwnClock
from phoenix_launch.node import endings
from phoenix_launch.node.endings import Endings
from phoenix_launch.node.trees import Claim, living, owners
from phoenix_launch.process_table import ProcessStat, Table

FORK_AND_SAY = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session={apart})
print(os.getpid(), child.pid, flush=True)
{then}
"""


def entry(pid: int, parent: int, session: int = 0, state: str = "S") -> ProcessStat:
    return ProcessStat(pid, f"p{pid}", state, parent, session or pid, session or pid, 1000 + pid)


def table(*entries: ProcessStat) -> Table:
    return {each.pid: each for each in entries}


@pytest.fixture
def repo_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as popen:
        yield popen
        popen.kill()


def test_a_name_with_blanks_and_brackets_is_read() -> None:
    text = "12 (a) b (c) S 1 12 12 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 4711 9 9"
    found = process_table.parse_stat(text)
    assert (found.pid, found.name, found.state, found.parent, found.start_time) == (12, "a) b (c", "S", 1, 4711)


@pytest.mark.parametrize("text", ["", "12 (x)", "12 (x) S 1", "garbage"])
def test_what_is_no_line_of_the_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no line|invalid literal"):
        process_table.parse_stat(text)


def test_this_process_finds_itself() -> None:
    me = process_table.look_up(os.getpid())
    assert me is not None and me.parent == os.getppid() and me.alive
    assert process_table.is_running(os.getpid(), me.start_time)
    assert not process_table.is_running(os.getpid(), me.start_time + 1)


def test_a_signal_reaches_the_process_it_names(sleeper: subprocess.Popen[bytes]) -> None:
    named = process_table.look_up(sleeper.pid)
    assert named is not None
    assert process_table.send_signal(named, signal.SIGTERM)
    assert sleeper.wait(10) == -signal.SIGTERM


def test_a_signal_spares_whoever_got_the_number_later(sleeper: subprocess.Popen[bytes]) -> None:
    named = process_table.look_up(sleeper.pid)
    assert named is not None
    assert not process_table.send_signal(named._replace(start_time=named.start_time - 1), signal.SIGKILL)
    assert sleeper.poll() is None


def test_a_zombie_does_not_run() -> None:
    popen = subprocess.Popen(["true"])
    started = process_table.start_time(popen.pid)
    assert started is not None
    os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
    assert not process_table.is_running(popen.pid, started)
    popen.wait(10)


def test_descendants_are_found_at_any_depth_and_nobody_else() -> None:
    everybody = table(entry(1, 0), entry(10, 1), entry(11, 10), entry(12, 11), entry(20, 1))
    assert process_table.descendants(everybody, 10) == {11, 12}
    assert process_table.descendants(everybody, 12) == set()


KILLER = """
import sys
from phoenix_launch import processes
from phoenix_launch.node import endings
import subprocess, time
processes.become_subreaper()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), flush=True)
start = time.monotonic()
left = processes.kill_descendants(5.0)
print(len(left), time.monotonic() - start, flush=True)
child.returncode = -9
"""


@pytest.mark.parametrize(
    ("apart", "then"),
    [
        ("False", "import time; time.sleep(600)"),
        ("True", "import time; time.sleep(600)"),
        ("True", "os._exit(0)"),
        ("True", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"),
        ("False", "while True: subprocess.Popen(['sleep', '0.01'], start_new_session=True)"),
    ],
    ids=["child", "own session", "orphan", "stubborn", "forking all the time"],
)
def test_nothing_below_outlives_the_kill_loop(
    apart: str, then: str, eventually: Callable[..., bool], repo_environment: dict[str, str]
) -> None:
    program = FORK_AND_SAY.format(apart=apart, then=then)
    with subprocess.Popen(
        [sys.executable, "-c", KILLER, program], stdout=subprocess.PIPE, text=True, env=repo_environment
    ) as killer:
        assert killer.stdout is not None
        pids = [int(text) for text in killer.stdout.readline().split()]
        killer.stdout.readline()
        left, seconds = killer.stdout.readline().split()
        assert int(left) == 0
        assert float(seconds) < 5
        assert killer.wait(10) == 0
    assert not any(entry.alive for pid in pids if (entry := process_table.look_up(pid)))


def test_a_process_that_does_not_die_is_named_in_time(sleeper: subprocess.Popen[bytes]) -> None:
    stuck = process_table.look_up(sleeper.pid)
    assert stuck is not None
    immortal = stuck._replace(start_time=stuck.start_time + 1, state="D")  # no signal ever reaches this one
    assert processes.kill_until_gone(lambda: [immortal], 0.2) == [immortal]
    assert processes.described([immortal]) == f"pid {sleeper.pid} (sleep, state D)"


def test_a_child_dies_with_its_parent(eventually: Callable[..., bool], repo_environment: dict[str, str]) -> None:
    program = (
        "import os, subprocess, time\n"
        "from phoenix_launch.processes import child_setup\n"
        "child = subprocess.Popen(['sleep', '600'], preexec_fn=child_setup(os.getpid()), start_new_session=True)\n"
        "print(child.pid, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=repo_environment) as parent:
        assert parent.stdout is not None
        child = Witness(int(parent.stdout.readline()))
        parent.kill()
        parent.wait(10)
        eventually(child.gone, what="the child dies")


def test_exit_codes_of_children_are_collected_by_pid() -> None:
    one, two = os.fork() or os._exit(7), os.fork() or os._exit(0)
    for pid in (one, two):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    codes = processes.reap()
    assert (codes[one], codes[two]) == (7, 0)


# --- who belongs to whom ---------------------------------------------------------------------------------------------

AGENT, FORK_SERVER, WORKER, OTHER = 100, 110, 120, 130
CLAIMS = (Claim(-1, FORK_SERVER), Claim(1, WORKER, b"P=/1"), Claim(2, OTHER, b"P=/2"))
NODE = (entry(AGENT, 1), entry(FORK_SERVER, AGENT), entry(WORKER, AGENT), entry(OTHER, AGENT))


def owner(pid: int, *more: ProcessStat, environ: bytes = b"") -> int | None:
    return owners(table(*NODE, *more), AGENT, CLAIMS, lambda asked: environ if asked == pid else b"")[pid]


def test_a_process_belongs_to_the_worker_above_it_whatever_its_session() -> None:
    assert owner(200, entry(200, WORKER, 200)) == 1


def test_an_orphan_belongs_to_the_worker_whose_session_it_is_in() -> None:
    assert owner(200, entry(200, AGENT, OTHER)) == 2


def test_an_orphan_in_a_session_of_its_own_is_known_by_its_environment() -> None:
    assert owner(200, entry(200, AGENT), environ=b"A=1\0P=/2\0") == 2
    assert owner(200, entry(200, AGENT), environ=b"A=1\0P=/22\0XP=/2\0") is None


def test_the_children_of_an_orphan_belong_where_it_does() -> None:
    assert owner(201, entry(200, AGENT, WORKER), entry(201, 200)) == 1


def test_what_carries_no_trace_is_nobodys() -> None:
    assert owner(200, entry(200, AGENT)) is None


def test_a_worker_that_is_dead_still_owns_its_session() -> None:
    left = owners(table(entry(AGENT, 1), entry(200, AGENT, WORKER)), AGENT, CLAIMS, lambda _: b"")
    assert left == {200: 1}


def test_what_is_not_below_the_agent_is_never_looked_at() -> None:
    everybody = table(*NODE, entry(300, 1, WORKER))
    assert 300 not in owners(everybody, AGENT, CLAIMS, lambda _: b"P=/1\0")


def test_only_what_lives_has_to_be_ended() -> None:
    everybody = table(*NODE[:3], entry(200, WORKER), entry(201, WORKER, state="Z"))
    owned = owners(everybody, AGENT, CLAIMS, lambda _: b"")
    assert {process.pid for process in living(everybody, owned, 1)} == {WORKER, 200}


# --- ending trees, round by round -------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel({})
    monkeypatch.setattr(endings, "process_table", lambda: kernel.table)
    monkeypatch.setattr(endings, "send_signal", lambda process, _: kernel.killed.append(process.pid))
    monkeypatch.setattr(endings, "environment_bytes", lambda _: b"")
    return kernel


@dataclass
class Kernel:
    """A process table that a test writes, and who was killed."""

    table: Table
    killed: list[int] = field(default_factory=list)

    def holds(self, *entries: ProcessStat) -> None:
        self.table = table(entry(os.getpid(), 1), *entries)
        self.killed.clear()


def test_a_tree_is_cleared_when_nothing_of_it_lives_and_its_exit_is_known(kernel: Kernel) -> None:
    trees, claims = Endings(5.0, pytest.fail), [Claim(1, WORKER)]
    trees.end(1, 0.0)
    kernel.holds(entry(WORKER, os.getpid()), entry(200, WORKER))
    assert trees.round(claims, 0.0, True, lambda _: False).cleared == ()
    assert sorted(kernel.killed) == [WORKER, 200]
    kernel.holds(entry(WORKER, os.getpid(), state="Z"))
    assert trees.round(claims, 0.1, True, lambda _: False).cleared == ()
    assert trees.round(claims, 0.2, True, lambda _: True).cleared == (1,)
    assert not trees.pending


def test_a_process_that_does_not_die_is_named_to_the_user_and_waited_for_no_longer(kernel: Kernel) -> None:
    said: list[str] = []
    trees = Endings(5.0, said.append)
    trees.end(1, 0.0)
    kernel.holds(entry(WORKER, os.getpid(), state="D"))
    assert trees.round([Claim(1, WORKER)], 4.9, True, lambda _: False).cleared == ()
    assert trees.round([Claim(1, WORKER)], 5.0, True, lambda _: False).cleared == (1,)
    assert said == [f"these processes do not die: pid {WORKER} (p{WORKER}, state D)"]


def test_a_sweep_spares_whoever_may_not_have_said_yet_that_it_is_ours(kernel: Kernel) -> None:
    trees = Endings(5.0, pytest.fail)
    trees.sweep(0.0)
    kernel.holds(entry(200, os.getpid()))
    assert not trees.round([], 0.0, False, lambda _: True).swept
    assert kernel.killed == []
    assert not trees.round([], 0.1, True, lambda _: True).swept
    assert kernel.killed == [200]
    kernel.holds()
    assert trees.round([], 0.2, False, lambda _: True).swept, "nobody is there, whoever may come"


# --- the agent's clock -----------------------------------------------------------------------------------------------


def test_time_that_was_slept_through_does_not_count() -> None:
    times = iter([0.0, 0.5, 30.5, 31.0])
    clock = OwnClock(lambda: next(times))
    assert clock.tick(0.5) == 0.0
    assert clock.now == 0.5
    assert clock.tick(0.5) == 29.5
    assert clock.now == pytest.approx(1.0)
    assert clock.tick(0.5) == 0.0
    assert clock.now == pytest.approx(1.5)


def test_nothing_is_overdue_before_a_tick_has_seen_that_its_owner_was_stopped() -> None:
    times = iter([0.0, 30.0])
    clock = OwnClock(lambda: next(times))
    assert clock.now == 0.0
    clock.tick(0.5)
    assert clock.now == pytest.approx(0.5)


def test_a_tick_that_is_a_little_late_counts_in_full() -> None:
    times = iter([0.0, 1.4])
    clock = OwnClock(lambda: next(times))
    assert clock.tick(0.5) == 0.0
    assert clock.now == 1.4
