"""What an agent says of its host, from texts as kernels write them; and what a worker is started with."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from bootstraps import bootstrap
from fake_supervisor import G1, command, order
from msgspec.structs import replace

from phoenix_launch.bootstrap import OutputSettings, RunMode
from phoenix_launch.hosts import facts
from phoenix_launch.messages import PeerProbe
from phoenix_launch.node import cgroup
from phoenix_launch.node.cgroup import OomWatch
from phoenix_launch.node.poll_loop import PollLoop
from phoenix_launch.node.probes import Dialer, ProbeListener
from phoenix_launch.node.worker_setup import NodePlace, command_line, error_file, node_environment, own_device

GROUPS_V1 = "9:name=systemd:/\n4:memory:/docker/abc\n2:cpuacct,cpu:/docker/abc\n0::/\n"
MOUNTS_V1 = (
    "32 31 0:29 /docker/abc /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpuacct,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "99 1 0:1 / / rw - ext4 /dev/sda rw\n"
)
GROUPS_V2 = "0::/user.slice/user-1000.slice/session.scope\n"
MOUNTS_V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def folders(groups: str, mounts: str, controller: str) -> list[PurePosixPath]:
    return cgroup.folders(cgroup.parse_groups(groups), cgroup.parse_mounts(mounts), controller)


def test_a_group_is_found_where_its_hierarchy_is_mounted() -> None:
    memory = PurePosixPath("/sys/fs/cgroup/memory")
    assert folders(GROUPS_V1, MOUNTS_V1, "memory") == [memory / "docker/abc", memory / "docker", memory]
    assert folders(GROUPS_V1, MOUNTS_V1, "cpu") == [PurePosixPath("/sys/fs/cgroup/cpu,cpuacct")], "a container's view"
    assert folders(GROUPS_V1, MOUNTS_V1, "pids") == []
    unified = folders(GROUPS_V2, MOUNTS_V2, "")
    assert unified[0] == PurePosixPath("/sys/fs/cgroup/user.slice/user-1000.slice/session.scope")
    assert (unified[-1], len(unified)) == (PurePosixPath("/sys/fs/cgroup"), 4)


@pytest.mark.parametrize(("text", "cores"), [("max 100000\n", math.inf), ("150000 100000\n", 1.5), ("50000", 0.5)])
def test_a_cpu_quota_is_read_in_cores(text: str, cores: float) -> None:
    assert cgroup.parse_cpu_max(text) == cores


@pytest.mark.parametrize(
    ("text", "limit"), [("max\n", math.inf), ("9223372036854771712\n", math.inf), ("4096\n", 4096)]
)
def test_no_limit_is_told_from_a_limit(text: str, limit: float) -> None:
    assert cgroup.parse_limit(text) == limit


def test_counters_of_both_versions_are_read() -> None:
    assert cgroup.parse_counter("low 0\nhigh 0\nmax 3\noom 2\noom_kill 5\n", "oom_kill") == 5
    assert cgroup.parse_counter("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", "oom_kill") == 1
    assert cgroup.parse_counter("oom_kill_disable 0\nunder_oom 0\n", "oom_kill") is None


def test_only_a_sigkill_that_the_kernel_counted_was_for_want_of_memory() -> None:
    watch = OomWatch(3)
    assert not watch.killed(-9, 3), "a SIGKILL by anybody"
    assert not watch.killed(-15, 4), "it counted somebody, but this one had another signal"
    assert watch.killed(-9, 4)
    assert not watch.killed(-9, 4), "one count explains one exit"
    assert watch.killed(-9, 6) and watch.killed(-9, 6)


@pytest.mark.parametrize(
    ("devices", "visible", "count"),
    [
        (8, None, 8),
        (8, "0,1", 2),
        (8, "", 0),
        (8, "-1", 0),
        (8, "0,-1,2", 1),
        (2, "0,7,1", 1),
        (8, "GPU-8932f937,GPU-1", 2),
        (1, "0,0", 1),
    ],
)
def test_visible_devices_count_as_cuda_counts_them(devices: int, visible: str | None, count: int) -> None:
    assert facts.visible_gpus(devices, visible) == count


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    dev, nodes = tmp_path / "dev", tmp_path / "nodes"
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        dev.mkdir(exist_ok=True)
        (dev / name).touch()
    for number, simds in enumerate((0, 304, 304, 304)):
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simds}\n")
    assert facts.count_gpus(dev, nodes) == 2
    assert facts.count_gpus(tmp_path / "none", nodes) == 3
    assert facts.count_gpus(tmp_path / "none", tmp_path / "none") == 0


def test_an_endpoint_is_taken_apart() -> None:
    assert facts.endpoint_address("tcp://10.0.0.1:77") == ("10.0.0.1", 77)
    assert facts.endpoint_address("tcp://[fd00::1]:77") == ("fd00::1", 77)


def test_the_place_of_a_node_is_the_interface_it_was_told_or_the_way_to_its_supervisor() -> None:
    node = replace(bootstrap(), control_endpoint="tcp://127.0.0.1:1")
    assert facts.find_place(replace(node, simulated=True, interface="eth9")) == ("127.0.0.1", "lo")
    assert facts.find_place(node) == ("127.0.0.1", "lo")
    assert facts.find_place(replace(node, interface="lo")) == ("127.0.0.1", "lo")
    assert facts.find_place(replace(node, interface="127.0.0.1")) == ("127.0.0.1", "lo")
    assert facts.find_place(replace(node, address="127.0.0.1")) == ("127.0.0.1", "lo")
    assert facts.find_place(replace(node, interface="eth9")) == ("", "")


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert facts.package_version("no-such-package") == ""
    assert facts.package_version("msgspec")


# --- what a worker is started with -----------------------------------------------------------------------------------


def test_the_job_key_reaches_nobody() -> None:
    node = bootstrap(environment={"PHOENIX_JOB_KEY": "x", "A": "1"})
    environment = node_environment(node, {"PHOENIX_JOB_KEY": "y"}, NodePlace("node0", "", "/run/agent.sock"))
    assert environment == {"A": "1", "PHOENIX_NODE": "node0", "PHOENIX_AGENT": "/run/agent.sock"}


def test_a_local_rank_gets_its_device_out_of_those_that_are_visible() -> None:
    assert [own_device(None, 3), own_device("4, 5", 1)] == ["3", "5"]


def test_each_mode_has_its_command_line() -> None:
    what = command("x.py", "${local_rank}", "$$", python="py")
    assert command_line(what, 2) == ["py", "-u", "x.py", "2", "$$"]
    assert command_line(replace(what, mode=RunMode.MODULE), 2) == ["py", "-u", "-m", "x.py", "2", "$$"]
    assert command_line(replace(what, mode=RunMode.EXEC), 2) == ["x.py", "2", "$$"]
    assert command_line(replace(what, mode=RunMode.RUN_PATH), 2)[-3:] == ["x.py", "2", "$$"]


def test_an_error_file_stands_where_logs_stand() -> None:
    run = Path("/run/x")
    assert error_file(OutputSettings("/l"), run, order(3), G1, 0) == Path("/l/3.g1.error.json")
    assert error_file(OutputSettings("/l", files=False), run, order(3), G1, 0) == Path("/run/x/3.g1.error.json")
    elastic = OutputSettings("/l", torchrun_folder="/t")
    assert error_file(elastic, run, order(3), G1, 2) == Path("/t/attempt_2/3/error.json")


# --- probes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def loop() -> Iterator[PollLoop]:
    yield PollLoop()


def test_a_port_of_the_range_is_taken_and_an_exhausted_range_is_an_error(loop: PollLoop) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    listener = ProbeListener(loop, "127.0.0.1", (port, port), "job", "node0")
    assert listener.port == port
    with pytest.raises(OSError, match="in use"):
        ProbeListener(loop, "127.0.0.1", (port, port), "job", "node1")
    listener.close()


@pytest.mark.parametrize(("greeted", "error"), [(True, "connected, but nothing answers"), (False, "")])
def test_a_silent_neighbour_is_told_from_one_that_answers(loop: PollLoop, greeted: bool, error: str) -> None:
    results: list[tuple[PeerProbe, ...]] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = PeerProbe("node1", "127.0.0.1", silent.getsockname()[1])
        dialer = Dialer(loop, (peer,), "job", 1.0, results.append, greeted=greeted)
        loop.dispatch(loop.wait(1.0))
        dialer.advance(0.9)
        dialer.advance(1.0)
        dialer.advance(1.1)
    assert [[peer.error for peer in peers] for peers in results] == [[error]], "reported once"
