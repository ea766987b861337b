"""The workers of a node get the environment that they need, and no secret."""

from __future__ import annotations

import pytest

from phoenix_launch.errors import UsageError
from phoenix_launch.hosts.environment import job_environment

HERE = {
    "PATH": "/opt/env/bin:/usr/bin",
    "HOME": "/home/me",
    "SSH_AUTH_SOCK": "/tmp/agent",
    "PYTHONPATH": "/work dir",
    "NCCL_DEBUG": "INFO",
    "OMP_NUM_THREADS": "4",
    "LC_ALL": "C",
    "CUDA_VISIBLE_DEVICES": "0",
    "CUDA_LAUNCH_BLOCKING": "1",
    "PHOENIX_JOB_KEY": "secret",
    "PHOENIX_NODES": "h1,h2",
    "EMPTY": "",
    "QUOTED": 'it\'s "so"\nor $HOME so',
}


def test_simulated_nodes_inherit_everything_but_the_key() -> None:
    expected = {name: value for name, value in HERE.items() if name != "PHOENIX_JOB_KEY"}
    assert job_environment(HERE, (), simulated=True) == expected


def test_real_hosts_get_what_loading_and_computing_need() -> None:
    sent = job_environment(HERE, (), simulated=False)
    assert set(sent) == {
        "PATH",
        "PYTHONPATH",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "LC_ALL",
        "CUDA_LAUNCH_BLOCKING",
        "PHOENIX_NODES",
    }
    assert sent["PYTHONPATH"] == "/work dir"


@pytest.mark.parametrize("simulated", [True, False])
def test_env_adds_values_to_the_letter(simulated: bool) -> None:
    options = ("QUOTED", "EMPTY", "A=1=2", "B=", "PATH=/elsewhere", "CUDA_VISIBLE_DEVICES")
    sent = job_environment(HERE, options, simulated=simulated)
    assert {name: sent[name] for name in ("QUOTED", "EMPTY", "A", "B", "PATH", "CUDA_VISIBLE_DEVICES")} == {
        "QUOTED": HERE["QUOTED"],
        "EMPTY": "",
        "A": "1=2",
        "B": "",
        "PATH": "/elsewhere",
        "CUDA_VISIBLE_DEVICES": "0",
    }


@pytest.mark.parametrize(
    ("option", "message", "hint"),
    [
        ("NCCL_DEBUGS", "--env NCCL_DEBUGS: it is not set here", "did you mean NCCL_DEBUG?"),
        ("QQ", "--env QQ: it is not set here", "--env QQ=VALUE"),
        ("=3", "has no name", "NAME=VALUE"),
        ("", "has no name", "NAME=VALUE"),
        ("PHOENIX_JOB_KEY", "never given to workers", "leave it out"),
        ("PHOENIX_JOB_KEY=x", "never given to workers", "leave it out"),
    ],
)
def test_a_bad_env_option_is_a_usage_error(option: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        job_environment(HERE, (option,), simulated=False)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_what_torch_reads_under_a_name_of_its_own_goes_along() -> None:
    assert job_environment({"USE_LIBUV": "0", "LOGLEVEL": "INFO", "USER": "me"}, (), simulated=False) == {
        "USE_LIBUV": "0",
        "LOGLEVEL": "INFO",
    }
