"""Fixtures for tests that need several hosts: one cluster a session, healed after each test; it dies with pytest."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from cluster import missing
from jobs_on_hosts import Head, lives
from namespaces import slay
from testhosts import Cluster

REQUIRED: Final = os.environ.get("PHOENIX_REQUIRE_HOSTS") == "1"  # read here: tests see no PHOENIX_* of ours


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that this machine and all hosts see at the same path, as over NFS; /tmp itself is each one's own."""
    return tmp_path_factory.mktemp("shared")


def hidden() -> list[str]:
    """What hosts need of ours that stands where each has a folder of its own (a clone in /tmp): it is shared with them."""
    ours = {str(Path(__file__).parents[2]), sys.prefix, sys.base_prefix}
    return sorted(path for path in ours if path.startswith(("/tmp/", "/run/", "/dev/shm/")))


@pytest.fixture(scope="session")
def cluster(shared_folder: Path) -> Iterator[Cluster]:
    """head and host1..host4. Skipped where it cannot be had, unless PHOENIX_REQUIRE_HOSTS=1 asks for a failure."""
    if lacking := missing():
        reason = f"test hosts need root and openssh-server, iproute2, nftables (missing: {lacking})"
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)
    tether, held = os.pipe()  # `held` lives in this process only: the kernel sees it close, however pytest dies
    try:
        made = Cluster(f"pytest{os.getpid()}").up(4, tether=tether, share=[*hidden(), str(shared_folder)])
        os.close(tether)
        yield made
        made.down()
    finally:
        os.close(held)


@pytest.fixture
def hosts(cluster: Cluster, eventually: Callable[..., object]) -> Iterator[Cluster]:
    """The cluster. When the test ends all faults are undone, and a host on which anything still runs fails it."""
    yield cluster
    cluster.heal()
    for host in cluster.state["hosts"]:
        if not cluster.pid(host):
            cluster.boot(host)
    left: dict[str, list[str]] = {}

    def clean() -> bool:
        left.clear()
        left.update({host: lines for host in cluster.state["hosts"] if (lines := _foreign(cluster, host))})
        return not left

    try:
        eventually(clean, 10, "every host runs nothing but its sshd")
    except BaseException:
        print(f"still running: {left}")
        raise
    finally:
        for host in left:
            for pid in cluster.processes(host):
                if not cluster.is_own(pid):
                    slay(pid)


@pytest.fixture
def head(hosts: Cluster, shared_folder: Path, eventually: Callable[..., object]) -> Iterator[Head]:
    """The host where jobs are started, with a fresh folder that all hosts see."""
    with tempfile.TemporaryDirectory(dir=shared_folder) as folder:
        yield Head(hosts, Path(folder), eventually)


def _foreign(cluster: Cluster, host: str) -> list[str]:
    """What lives there; of a dead command whose `testhosts exec` was killed nobody reads the exit code until we end."""
    return [cluster.command_line(pid) for pid in cluster.processes(host) if not cluster.is_own(pid) and lives(pid)]
