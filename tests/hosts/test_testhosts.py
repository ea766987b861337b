"""The test hosts themselves do what the tests of everything else lean on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from testhosts import Cluster

pytestmark = pytest.mark.hosts


def output(hosts: Cluster, *argv: str) -> str:
    return str(hosts.run("head", argv, capture_output=True, text=True, timeout=20).stdout)


def test_a_host_is_reached_by_ssh_from_the_head(hosts: Cluster) -> None:
    assert output(hosts, "ssh", "host1", "hostname") == "host1\n"


def test_a_host_is_reached_by_ssh_from_outside(hosts: Cluster) -> None:
    done = subprocess.run(["ssh", "-F", hosts.ssh_config, "host2", "hostname"], capture_output=True, timeout=20)
    assert done.stdout == b"host2\n"


def test_the_shared_folder_is_one_and_everything_else_is_private(hosts: Cluster, shared_folder: Path) -> None:
    (shared_folder / "note").write_text("seen")
    assert output(hosts, "ssh", "host1", f"cat {shared_folder}/note; touch /private; ls /private") == "seen/private\n"
    assert not Path("/private").exists()
    assert hosts.run("host2", ["test", "-e", "/private"]).returncode == 1
    hosts.run("host1", ["rm", "/private"], check=True)


def test_power_loss_is_silence_until_ssh_gives_up_and_boot_brings_the_host_back(hosts: Cluster) -> None:
    alive = ["-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=1"]
    command = ["ssh", *alive, "host2", "echo up; exec sleep 60"]
    with hosts.popen("head", command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"up\n"
        hosts.kill("host2")
        assert hosts.pid("host2") is None
        assert client.wait(15) == 255
    hosts.boot("host2")
    assert output(hosts, "ssh", "host2", "hostname") == "host2\n"


def test_one_process_of_a_host_is_killed_by_its_command_line(hosts: Cluster, eventually: Callable[..., object]) -> None:
    with hosts.popen("host3", ["sleep", "43"]) as sleeper:
        assert eventually(lambda: "sleep 43" in hosts.command_lines("host3"))
        assert len(hosts.kill("host3", match="^sleep 43")) == 1
        assert sleeper.wait(10) == 128 + 9


def test_a_partition_cuts_one_pair_and_no_other(hosts: Cluster) -> None:
    dial = "import socket, sys; socket.create_connection((sys.argv[1], 22), 0.4).close()"
    hosts.partition("host1", ["host2"])

    def reaches(host: str, peer: str) -> bool:
        argv = ["python3", "-c", dial, peer]
        return hosts.run(host, argv, stderr=subprocess.DEVNULL, timeout=20).returncode == 0

    assert not reaches("host1", "host2")
    assert reaches("host1", "host3")
    hosts.heal()
    assert reaches("host1", "host2")


def test_a_full_disk_is_full_and_can_be_freed(hosts: Cluster) -> None:
    hosts.fill("host4", "/")
    assert hosts.run("host4", ["sh", "-c", "echo much > /file"], stderr=subprocess.DEVNULL).returncode != 0
    hosts.fill("host4", "/", leave=-1)
    assert hosts.run("host4", ["sh", "-c", "echo much > /file && rm /file"]).returncode == 0
