"""What the environment of a worker says about its place in the job: torchrun's names and ours. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phoenix_launch.job.placement import RankPlace
from phoenix_launch.job.state import Endpoint
from phoenix_launch.wire import Generation
from phoenix_launch.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """What all workers of all generations are told alike."""

    job: str
    run_id: str  # TORCHELASTIC_RUN_ID
    role: str
    max_restarts: int
    signals: tuple[str, ...]


def worker_environment(
    identity: JobIdentity,
    place: RankPlace,
    *,
    generation: Generation,
    attempt: int,
    store: Endpoint,
    world_size: int,
    nodes: int,
) -> dict[str, str]:
    """The part of a worker's environment that differs between ranks or generations.

    GROUP_RANK is the position of the node in the line-up, so that a script that splits work by node sees 0..nodes-1
    after a spare node has taken a seat too.
    """
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "GROUP_RANK": str(place.group_rank),
        "ROLE_RANK": str(place.rank),
        "ROLE_NAME": identity.role,
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": store.address,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(identity.max_restarts),
        "TORCHELASTIC_RUN_ID": identity.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(identity.signals),
        "PHOENIX_JOB": identity.job,
        "PHOENIX_GENERATION": str(generation),
    }


def job_wide_environment(
    inherited: Mapping[str, str], *, cores: int, workers_on_machine: int, workers_per_node: int
) -> tuple[dict[str, str], str]:
    """Additions for all workers of a job, fixed at its start, so that a swapped-in process computes the same bits.

    Returns them and one quiet line for the user ("" when nothing was decided for them).
    """
    added: dict[str, str] = {}
    remark = ""
    if "OMP_NUM_THREADS" not in inherited and workers_per_node > 1:
        threads = max(1, cores // max(1, workers_on_machine))
        added["OMP_NUM_THREADS"] = str(threads)
        remark = (
            f"OMP_NUM_THREADS={threads} for each worker "
            f"({counted(cores, 'core')} for {counted(workers_on_machine, 'worker')}); "
            "set it yourself to change it"
        )
    if "PYTHONHASHSEED" not in inherited:
        added["PYTHONHASHSEED"] = "0"  # sets of strings iterate alike in a swapped-in process
    if "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in inherited:
        added["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    return added, remark
