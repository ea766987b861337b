"""torchrun's contract: what workers find in their environment, and what torch makes of it."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from phoenix_launch.node.cgroup import ControlGroup
from tests.contract import NO_TORCH, Call, Called, call_all, free_port, witness_script
from tests.jobs_under_test import Done, run, script

OURS = {"PHOENIX_JOB", "PHOENIX_GENERATION", "PHOENIX_NODE", "PHOENIX_AGENT", "PHOENIX_PROGRESS"}
JOB_KEY = "a key that is long enough to protect a job, and that nobody is told"
DIFFERENT = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS", "_"}
# What torchrun itself reads. All of it goes on to the workers; "": that is all, else what is said once when it is set.
LAUNCHERS = {
    "LOGLEVEL": ("INFO", ""),
    "USE_LIBUV": ("0", ""),
    "TORCH_ELASTIC_WORKER_IDENTICAL": ("1", ""),
    "TORCHELASTIC_ENABLE_FILE_TIMER": ("1", "TORCHELASTIC_ENABLE_FILE_TIMER has no effect: no timer watches"),
    "TORCHELASTIC_HEALTH_CHECK_PORT": ("1", "TORCHELASTIC_HEALTH_CHECK_PORT has no effect: nobody listens there"),
}
UNSET = ("OMP_NUM_THREADS", "PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Called]:
    """All jobs of this file that need no torch, and torchrun beside them."""
    folder = tmp_path_factory.mktemp("environment")
    witness = witness_script(folder)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nTHROUGH_PYTHON_EXEC=yes exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    two = ["--nproc-per-node", 2, "--role", "trainer", "--max-restarts", 4]
    with pytest.MonkeyPatch.context() as patch:
        for name in UNSET:
            patch.delenv(name, raising=False)
        return call_all(
            folder,
            {
                "torchrun": Call([*two, witness], torchrun=True),
                "spawned": Call(["--start-method", "spawn", *two, witness], {**NO_TORCH, "PHOENIX_JOB_KEY": JOB_KEY}),
                "forked": Call([*two, "--rdzv-id", "mine", witness], {**NO_TORCH, "PHOENIX_JOB_KEY": JOB_KEY}),
                "one": Call(
                    ["--standalone", "--master-port", 1, "--start-method", "spawn", witness],
                    {**NO_TORCH, "PYTHON_EXEC": str(python), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
                ),
                "torchrun told": Call([*two, witness], {name: value for name, (value, _) in LAUNCHERS.items()}, True),
                "told": Call(
                    ["--start-method", "spawn", *two, witness],
                    {**NO_TORCH, **{name: value for name, (value, _) in LAUNCHERS.items()}},
                ),
                "virtual": Call(
                    ["--virtual-local-rank", "--nproc-per-node", 2, "--signals-to-handle", "SIGTERM,SIGUSR1", witness],
                    {**NO_TORCH, "CUDA_VISIBLE_DEVICES": "4,5", "OMP_NUM_THREADS": "3"},
                ),
            },
        )


def test_all_jobs_end_well(calls: dict[str, Called]) -> None:
    assert {name: (call.done.code, call.done.err) for name, call in calls.items() if call.done.code} == {}


@pytest.mark.parametrize("start", ["spawned", "forked"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_gets_what_torchrun_gives(calls: dict[str, Called], start: str, rank: int) -> None:
    theirs, ours = calls["torchrun"].environment(rank), calls[start].environment(rank)
    given = {name for name, value in theirs.items() if os.environ.get(name) != value} - {"PHOENIX_HOME", "WITNESS"}
    assert {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE"} <= given
    assert given - set(ours) == set()
    assert {name: ours[name] for name in given - DIFFERENT} == {name: theirs[name] for name in given - DIFFERENT}
    assert ours["MASTER_ADDR"] == "127.0.0.1"
    assert int(ours["MASTER_PORT"]) > 1024
    assert Path(ours["TORCHELASTIC_ERROR_FILE"]).name == f"{rank}.g1.error.json"


def test_beyond_that_there_are_only_variables_that_the_readme_names(calls: dict[str, Called]) -> None:
    new = set(calls["spawned"].environment()) - set(calls["torchrun"].environment())
    assert new == OURS | {
        "PYTHONHASHSEED",
        "PYTHONPATH",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "TP_SOCKET_IFNAME",
    } - set(os.environ)


def test_our_own_variables_say_where_a_worker_is(calls: dict[str, Called]) -> None:
    environment = calls["forked"].environment(1)
    assert environment["PHOENIX_JOB"] == calls["forked"].done.job.name
    assert environment["PHOENIX_GENERATION"] == "g1"
    assert environment["PHOENIX_NODE"] == "node0"
    assert environment["PHOENIX_AGENT"].endswith("/agent.sock")
    assert re.fullmatch(r"/proc/\d+/fd/\d+", environment["PHOENIX_PROGRESS"])


@pytest.mark.parametrize("start", ["spawned", "forked"])
def test_the_jobs_key_is_seen_by_nobody_below_the_command_itself(calls: dict[str, Called], start: str) -> None:
    seen = calls[start].witness()
    assert "PHOENIX_JOB_KEY" not in seen["environment"]
    *between, (command, has_key) = seen["owners"]
    assert "phoenix_launch" in command and has_key
    assert len(between) >= 2  # agent and guardian
    assert not any(has for _, has in between)
    assert JOB_KEY not in "".join(p.read_text() for p in calls[start].done.home.rglob("*") if p.is_file())


def test_the_run_id_is_the_users_else_the_jobs(calls: dict[str, Called]) -> None:
    assert calls["forked"].environment()["TORCHELASTIC_RUN_ID"] == "mine"
    assert calls["spawned"].environment()["TORCHELASTIC_RUN_ID"] == calls["spawned"].done.job.name


@pytest.mark.parametrize("start", ["spawned", "forked"])
def test_threads_are_shared_out_when_several_workers_run_and_the_user_said_nothing(
    calls: dict[str, Called], start: str
) -> None:
    threads = max(1, ControlGroup().cores() // 2)
    assert calls[start].environment(1)["OMP_NUM_THREADS"] == str(threads)
    said = [line for line in calls[start].done.err.splitlines() if "OMP_NUM_THREADS" in line]
    assert len(said) == 1
    assert f"OMP_NUM_THREADS={threads} for each worker" in said[0]


def test_a_single_worker_keeps_all_threads(calls: dict[str, Called]) -> None:
    assert "OMP_NUM_THREADS" not in calls["one"].environment()
    assert "OMP_NUM_THREADS" not in calls["one"].done.err


def test_what_the_user_set_stays(calls: dict[str, Called]) -> None:
    assert calls["virtual"].environment()["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in calls["virtual"].done.err
    assert calls["one"].environment()["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert calls["virtual"].environment()["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGUSR1"


def test_virtual_local_ranks_see_one_device_each_and_local_rank_0(calls: dict[str, Called]) -> None:
    seen = [calls["virtual"].environment(rank) for rank in (0, 1)]
    assert [s["LOCAL_RANK"] for s in seen] == ["0", "0"]
    assert [s["CUDA_VISIBLE_DEVICES"] for s in seen] == ["4", "5"]
    assert [s["RANK"] for s in seen] == ["0", "1"]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_variable_for_the_launcher_reaches_the_workers_and_is_remarked_upon_when_it_does_nothing_here(
    calls: dict[str, Called], name: str
) -> None:
    value, remark = LAUNCHERS[name]
    assert calls["told"].environment(1)[name] == calls["torchrun told"].environment(1)[name] == value
    said = [line for line in calls["told"].done.err.splitlines() if name in line]
    assert [line.startswith(f"phoenix-run: {remark}") for line in said] == ([True] if remark else [])
    assert name not in calls["spawned"].done.err


def test_only_torchrun_has_a_timer_for_its_workers(calls: dict[str, Called]) -> None:
    more = set(calls["torchrun told"].environment()) - set(calls["torchrun"].environment()) - set(LAUNCHERS)
    assert more == {"TORCHELASTIC_TIMER_FILE"}
    assert "TORCHELASTIC_TIMER_FILE" not in calls["told"].environment()


def test_python_exec_is_the_interpreter_of_the_workers(calls: dict[str, Called]) -> None:
    assert calls["one"].environment()["THROUGH_PYTHON_EXEC"] == "yes"


def test_standalone_ignores_master_port_as_torchrun_does(calls: dict[str, Called]) -> None:
    assert calls["one"].environment()["MASTER_PORT"] != "1"


# --- with torch ------------------------------------------------------------------------------------------------------

# In the first attempt rank 1 uses the store before rank 0 has touched it, so that rank 0 cannot be the host of it.
STORE = """
import json, os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist

rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
port, early = int(os.environ["MASTER_PORT"]), sys.argv[1] + "/early-" + attempt
if rank == 1:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=timedelta(seconds=20))
    fresh = not store.check(["mark"])
    store.set("mark", attempt)
    open(early + ".new", "w").close()
    os.rename(early + ".new", early)
else:
    end = time.monotonic() + 20
    while not os.path.exists(early) and time.monotonic() < end:
        time.sleep(0.01)
    fresh = None
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(json.dumps({
    "rank": rank, "attempt": attempt, "port": port, "fresh": fresh, "sum": total.item(),
    "elastic": dist.is_torchelastic_launched(), "use": os.environ["TORCHELASTIC_USE_AGENT_STORE"],
    "generation": os.environ["PHOENIX_GENERATION"], "maximum": os.environ["TORCHELASTIC_MAX_RESTARTS"],
    "omp": torch.get_num_threads(), "error_file": os.environ["TORCHELASTIC_ERROR_FILE"],
}), flush=True)
dist.barrier()
if rank == 1 and attempt == "0":
    sys.exit(3)
dist.barrier()
"""


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, int, dict[tuple[int, int], dict[str, object]]]:
    """A job of two ranks that restarts once: how it ended, its --master-port, what (rank, attempt) saw."""
    folder = tmp_path_factory.mktemp("store")
    port = free_port()
    done = run(
        folder / "home", "--nproc-per-node", 2, "--max-restarts", 1, "--master-port", port,
        script(folder, STORE), folder,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    return done, port, {(line["rank"], int(line["attempt"])): line for line in lines}


Restarted = tuple[Done, int, dict[tuple[int, int], dict[str, object]]]


def test_torch_finds_a_store_that_no_worker_hosts(restarted: Restarted) -> None:
    done, _, seen = restarted
    assert done.code == 0, done.err
    assert set(seen) == {(0, 0), (1, 0), (0, 1), (1, 1)}
    assert {line["sum"] for line in seen.values()} == {2.0}
    assert {(line["elastic"], line["use"], line["maximum"]) for line in seen.values()} == {(True, "True", "1")}


def test_each_generation_has_a_fresh_store_and_master_port_holds_for_the_first(restarted: Restarted) -> None:
    done, port, seen = restarted
    assert [seen[1, attempt]["fresh"] for attempt in (0, 1)] == [True, True], done.err
    assert [seen[rank, 0]["port"] for rank in (0, 1)] == [port, port]
    assert seen[0, 1]["port"] == seen[1, 1]["port"] != port
    assert [seen[0, attempt]["generation"] for attempt in (0, 1)] == ["g1", "g2"]


def test_a_restarted_worker_computes_with_as_many_threads_and_has_an_error_file_of_its_own(
    restarted: Restarted,
) -> None:
    _, _, seen = restarted
    assert len({line["omp"] for line in seen.values()}) == 1
    assert len({line["error_file"] for line in seen.values()}) == 4


def test_a_master_port_that_is_taken_ends_the_start_with_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(tmp_path / "home", "--master-port", port, "--no-python", "true", env=NO_TORCH)
    assert done.code == 1
    assert f"port {port}" in done.err and "--master-port" in done.err
    assert "Traceback" not in done.err
