"""The environment of a worker says where it stands in the job."""

from __future__ import annotations

import pytest

from phoenix_launch.job.environment import JobIdentity, job_wide_environment, worker_environment
from phoenix_launch.job.placement import Seat, places
from phoenix_launch.job.state import Endpoint
from phoenix_launch.wire import Generation

IDENTITY = JobIdentity(job="gpt-1", run_id="run", role="trainer", max_restarts=3, signals=("SIGTERM", "SIGINT"))


def test_uneven_nodes_number_their_ranks_one_after_the_other() -> None:
    lineup = (Seat(4, 1), Seat(2, 2))
    environments = [
        worker_environment(
            IDENTITY,
            place,
            generation=Generation(1, 2),
            attempt=1,
            store=Endpoint("10.0.0.7", 4000),
            world_size=3,
            nodes=2,
        )
        for place in places(lineup)
    ]
    keys = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE")
    assert [tuple(e[key] for key in keys) for e in environments] == [
        ("0", "0", "0", "1"),
        ("1", "0", "1", "2"),
        ("2", "1", "1", "2"),
    ]
    assert (
        environments[2]
        | {
            "WORLD_SIZE": "3",
            "GROUP_WORLD_SIZE": "2",
            "ROLE_NAME": "trainer",
            "MASTER_ADDR": "10.0.0.7",
            "MASTER_PORT": "4000",
            "TORCHELASTIC_RESTART_COUNT": "1",
            "TORCHELASTIC_MAX_RESTARTS": "3",
            "TORCHELASTIC_RUN_ID": "run",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",
            "PHOENIX_JOB": "gpt-1",
            "PHOENIX_GENERATION": "g2",
        }
        == environments[2]
    )


@pytest.mark.parametrize(("cores", "workers", "threads"), [(2, 4, "1"), (64, 8, "8"), (9, 4, "2")])
def test_cores_are_shared_out_among_the_workers_of_a_machine(cores: int, workers: int, threads: str) -> None:
    added, remark = job_wide_environment({}, cores=cores, workers_on_machine=workers, workers_per_node=workers)
    assert added["OMP_NUM_THREADS"] == threads
    assert f"OMP_NUM_THREADS={threads}" in remark


def test_what_the_user_set_and_a_lone_worker_are_left_alone() -> None:
    added, remark = job_wide_environment({"OMP_NUM_THREADS": "7"}, cores=8, workers_on_machine=2, workers_per_node=2)
    assert "OMP_NUM_THREADS" not in added and not remark
    added, remark = job_wide_environment({}, cores=8, workers_on_machine=1, workers_per_node=1)
    assert "OMP_NUM_THREADS" not in added and not remark
    kept, _ = job_wide_environment(
        {"PYTHONHASHSEED": "5", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
        cores=8,
        workers_on_machine=1,
        workers_per_node=1,
    )
    assert kept == {}


def test_hashes_are_the_same_in_a_process_that_is_swapped_in() -> None:
    added, _ = job_wide_environment({}, cores=8, workers_on_machine=1, workers_per_node=1)
    assert added == {"PYTHONHASHSEED": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
