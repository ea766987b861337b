"""Nothing outlives its owner, however and whenever that dies: real jobs, real kills, and a look at what is left."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from phoenix_launch.node.runtime_folder import make_runtime_folder
from tests.jobs_under_test import Done, Running
from tests.quick_jobs import Ground, fresh_ground, kill
from tests.quick_jobs import ground as ground

Eventually = Callable[..., object]

# A worker with all that workers have: a child, one in a session of its own, a data loader, a daemon that forked twice.
FAMILY = """
import multiprocessing, os, subprocess, sys, threading

def wait_for_ever():
    threading.Event().wait()

def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "4244"])
        os._exit(0)
    os.wait()

subprocess.Popen(["sleep", "4242"])
subprocess.Popen(["sleep", "4243"], start_new_session=True)
daemon()
multiprocessing.get_context("fork").Process(target=wait_for_ever, daemon=True).start()
open(f"family-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}", "w").close()
while not os.path.exists("finish"):
    threading.Event().wait(0.01)
open(f"over-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}", "w").close()
os._exit(0)  # without a goodbye to its family
"""

OPTIONS = ("--nodes", 2, "--max-restarts", 20, "--max-failures-per-host", 20, "--heartbeat-timeout", 1,
           "--orphan-timeout", 2, "--shutdown-timeout", 2, "--spare-timeout", 30)  # fmt: skip

VICTIMS: dict[str, Callable[[Ground], list[psutil.Process]]] = {
    "agent": Ground.agents,
    "guardian": Ground.guardians,
    "fork server": Ground.fork_servers,
    "store host": Ground.store_hosts,
}


def families(ground: Ground, attempt: str = "*") -> list[Path]:
    return list(ground.folder.glob(f"family-*-{attempt}"))


def workers(ground: Ground, running: Running) -> list[psutil.Process]:
    pids = {event["pid"] for event in running.events("worker_started")}
    return [process for process in ground.processes() if process.pid in pids]


def strike(ground: Ground, running: Running, victim: str, eventually: Eventually) -> None:
    """SIGKILL to one victim of a kind, as soon as there is one."""

    def found() -> list[psutil.Process]:
        if victim == "supervisor":
            return [psutil.Process(running.pid)]
        return workers(ground, running) if victim == "worker" else VICTIMS[victim](ground)

    victims = eventually(lambda: found() or running.process.poll() is not None, 20, f"there is a {victim}")
    try:
        if isinstance(victims, list):
            kill(victims[0])
    except psutil.NoSuchProcess:
        pass  # at the end it may just have left


def reach(ground: Ground, running: Running, moment: str, eventually: Eventually) -> None:
    """Wait until the job is at this moment of its life."""
    if moment == "start":
        return
    eventually(lambda: len(families(ground)) == 2, 30, "both workers run")
    if moment == "restart":
        kill(workers(ground, running)[0])
        eventually(lambda: running.events("fault"), 10, "the fault is found")
    elif moment == "end":
        (ground.folder / "finish").touch()
        eventually(lambda: list(ground.folder.glob("over-*")), 10, "the first one has ended")


def finished(ground: Ground, running: Running) -> Done:
    (ground.folder / "finish").touch()
    return running.wait()


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        ("worker", "running"), ("worker", "restart"), ("worker", "end"),
        ("agent", "start"), ("agent", "running"), ("agent", "restart"), ("agent", "end"),
        ("guardian", "start"), ("guardian", "running"), ("guardian", "restart"), ("guardian", "end"),
        ("fork server", "start"), ("fork server", "running"), ("fork server", "restart"),
        ("store host", "start"), ("store host", "running"),
    ],
)  # fmt: skip
def test_a_job_survives_a_kill_and_leaves_nothing(
    ground: Ground, eventually: Eventually, victim: str, moment: str
) -> None:
    with ground.started(*OPTIONS, ground.script(FAMILY)) as running:
        reach(ground, running, moment, eventually)
        strike(ground, running, victim, eventually)
        if moment == "running":
            again = "1" if victim in ("worker", "agent", "guardian") else "0"
            eventually(lambda: len(families(ground, again)) == 2, 30, "all run (again)")
        done = finished(ground, running)
    refused = "nothing was started: 1 of 2 nodes cannot take part" in done.err
    assert done.code == (1 if moment == "start" and refused else 0), done.err
    assert "Traceback" not in done.err
    ground.check_nothing_is_left(eventually, done.job)


@pytest.mark.parametrize("moment", ["start", "running", "restart", "end"])
def test_without_their_supervisor_all_end(ground: Ground, eventually: Eventually, moment: str) -> None:
    with ground.started(*OPTIONS, ground.script(FAMILY)) as running:
        reach(ground, running, moment, eventually)
        eventually(ground.agents, 20)
        strike(ground, running, "supervisor", eventually)
        assert running.wait().code == -signal.SIGKILL
        job = running.job
        if moment == "running":
            assert job is not None
            assert "is gone: nobody can be asked" in ground.run("stop").err
            assert '"state":"orphaned"' in ground.run("status", "--json").out
        eventually(lambda: not ground.left(), 10, "all have ended")
    ground.run("--no-python", "true")  # what the supervisor could not remove any more, the next one does
    ground.check_nothing_is_left(eventually, job)


def test_a_workers_family_is_gone_before_it_is_started_again(ground: Ground, eventually: Eventually) -> None:
    with ground.started(*OPTIONS, ground.script(FAMILY)) as running:
        eventually(lambda: len(families(ground, "0")) == 2, 30)
        first = {process.pid for process in ground.named("sleep 424")}
        assert len(first) == 6
        strike(ground, running, "worker", eventually)
        eventually(lambda: len(families(ground, "1")) == 2, 30)
        assert not first & {process.pid for process in ground.named("sleep 424")}
        assert finished(ground, running).code == 0
    ground.check_nothing_is_left(eventually, running.job)


def test_agent_and_guardian_killed_at_once_leave_workers_that_die_and_a_folder_that_is_swept(
    ground: Ground, eventually: Eventually
) -> None:
    """The one way to leave something: what a worker started itself survives both, and nobody is left who knows it."""
    source = 'import os, threading\nopen(f"family-{os.environ[\'RANK\']}-0", "w").close()\nthreading.Event().wait()\n'
    with ground.started(*OPTIONS, "--spares", 1, ground.script(source)) as running:
        eventually(lambda: len(families(ground)) == 2, 30)
        agent = next(a for a in ground.agents() if a.pid in {p.ppid() for p in workers(ground, running)})
        children = {child.pid for child in agent.children()}
        for process in (psutil.Process(agent.ppid()), agent):
            kill(process, signal.SIGSTOP)
        for process in (psutil.Process(agent.ppid()), agent):
            kill(process)
        eventually(lambda: not children & {p.pid for p in ground.processes()}, 10, "they died with their agent")
        running.signal(signal.SIGTERM)
        assert running.wait().code == 143
    folders = [path for path in ground.runtime.iterdir() if path.name.startswith("phoenix-")]
    assert len(folders) == 1  # nobody was left to remove it ...
    ground.run("--no-python", "true")
    ground.check_nothing_is_left(eventually, None)  # ... but whoever comes next


def test_folders_of_the_living_and_of_strangers_are_not_swept(tmp_path: Path) -> None:
    place = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", "import os; from phoenix_launch.node.runtime_folder import make_runtime_folder as make; "
         "print(make(os.environ), flush=True); input()"], env={"XDG_RUNTIME_DIR": str(tmp_path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None and other.stdin is not None
        theirs = Path(other.stdout.readline().strip())
        strange = tmp_path / "phoenix-12345678"
        strange.mkdir()
        ours = make_runtime_folder(place)
        assert theirs.exists() and strange.exists() and ours.exists()
        other.communicate("\n", timeout=10)
    make_runtime_folder(place)
    assert (theirs.exists(), strange.exists(), ours.exists()) == (False, True, True)


def test_a_frozen_supervisor_loses_no_node(ground: Ground, eventually: Eventually) -> None:
    with ground.started(*OPTIONS, "--orphan-timeout", 30, ground.script(FAMILY)) as running:
        eventually(lambda: len(families(ground)) == 2, 30)
        running.signal(signal.SIGSTOP)
        time.sleep(3)  # three heartbeat timeouts pass: that is the point
        running.signal(signal.SIGCONT)
        done = finished(ground, running)
    assert done.code == 0, done.err
    assert not done.events("fault"), done.err
    ground.check_nothing_is_left(eventually, done.job)


def test_a_frozen_agent_is_lost_and_when_it_wakes_its_processes_end(ground: Ground, eventually: Eventually) -> None:
    with ground.started(*OPTIONS, "--spares", 1, ground.script(FAMILY)) as running:
        eventually(lambda: len(families(ground)) == 2, 30)
        victim = workers(ground, running)[0]
        agent = psutil.Process(victim.ppid())
        kill(agent, signal.SIGSTOP)
        eventually(lambda: [e for e in running.events("fault") if "not heard of" in e["detail"]], 10)
        eventually(lambda: len(families(ground, "1")) == 2, 20, "the spare node took its rank")
        kill(agent, signal.SIGCONT)
        eventually(lambda: not victim.is_running(), 10, "it was fenced")
        eventually(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE, 10)
        done = finished(ground, running)
    assert done.code == 0, done.err
    ground.check_nothing_is_left(eventually, done.job)


def test_two_nodes_killed_at_once_are_replaced(ground: Ground, eventually: Eventually) -> None:
    with ground.started(*OPTIONS, ground.script(FAMILY)) as running:
        eventually(lambda: len(families(ground)) == 2, 30)
        for agent in ground.agents():
            kill(agent)
        eventually(lambda: families(ground, "1") and len(families(ground)) >= 4, 30)
        done = finished(ground, running)
    assert done.code == 0, done.err
    ground.check_nothing_is_left(eventually, done.job)


@pytest.mark.parametrize("seed", [1])
def test_a_job_outlives_a_series_of_random_kills(tmp_path: Path, eventually: Eventually, seed: int) -> None:
    """Any process but the supervisor, one or two at once, again and again (never a guardian with an agent: see above)."""
    chance = random.Random(seed)
    with fresh_ground(tmp_path) as ground:
        with ground.started(*OPTIONS, "--spares", 1, ground.script(FAMILY)) as running:
            eventually(lambda: len(families(ground)) == 2, 30)
            struck = 0
            while struck < 10:
                owner = chance.choice(["agent", "guardian"])
                kinds = chance.choices(["worker", owner, "fork server", "store host"], k=chance.choice([1, 1, 2]))
                for kind in kinds:
                    found = workers(ground, running) if kind == "worker" else VICTIMS[kind](ground)
                    if found and running.process.poll() is None:
                        try:
                            kill(chance.choice(found))
                            struck += 1
                        except psutil.NoSuchProcess:
                            continue
                before = len(running.events("swap"))
                pause = time.monotonic() + chance.uniform(0.0, 1.5)
                while time.monotonic() < pause and len(running.events("swap")) == before:
                    time.sleep(0.02)
                assert running.process.poll() is None, running.wait().err
            done = finished(ground, running)
        assert done.code == 0, done.err
        assert "Traceback" not in done.err, done.err
        ground.check_nothing_is_left(eventually, done.job)
