"""A node's checkpoint server: who may write what, what outlives a worker, and that nothing outlives the agent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from checkpoint_nodes import G1, G2, JOB, KEY, SECONDS, CheckpointNode, begin, copy, read

from phoenix_launch import channel
from phoenix_launch.checkpoint.client import SlotsLink
from phoenix_launch.checkpoint.pairs import SlotRefusedError
from phoenix_launch.copies import Stamp
from phoenix_launch.local_messages import CheckpointSettings, CheckpointUp, Park


def test_a_sealed_copy_is_kept_told_to_the_agent_and_read_again(node: CheckpointNode) -> None:
    link = node.link()
    assert copy(link, 0) == {}
    kept = node.until_kept(("b", 0))
    assert kept.generation == G1 and kept.kept[0].slot.sealed
    assert read(link, 0) > 4096


def test_two_versions_of_a_bundle_are_kept_and_the_older_one_goes_when_a_later_is_complete(
    node: CheckpointNode,
) -> None:
    link = node.link()
    for version in (0, 1):
        assert copy(link, version) == {}
    with pytest.raises(SlotRefusedError, match="still needed"):
        begin(link, 2)
    link.complete = 1
    assert copy(link, 2) == {}
    node.until_kept(("b", 1), ("b", 2))
    assert read(link, 1) and read(link, 2)
    with pytest.raises(SlotRefusedError, match="does not keep"):
        read(link, 0)


def test_a_copy_that_is_kept_already_is_not_written_again(node: CheckpointNode) -> None:
    link = node.link()
    copy(link, 0)
    assert link.fill("b", Stamp(G1, 0), 8192) is None
    link.sealed("b", Stamp(G1, 0))
    assert link.copied("b", Stamp(G1, 0), [0]) == {}


def test_memory_is_mapped_once_and_made_anew_only_when_a_copy_grows(node: CheckpointNode) -> None:
    link = node.link()
    serials = []
    for version, size in enumerate((4096, 4096, 4096, 4096, 1 << 20, 1 << 20)):
        copy(link, version, size=size)
        link.complete = version
        serials.append(sorted(serial for serial, _ in link._writers.values()))
    assert serials[1] == serials[2] == serials[3]
    assert len(set(serials[3]) & set(serials[4])) == 1, "only the slot that is about to be overwritten"
    assert read(link, 4) and read(link, 5)


def test_a_worker_of_an_older_generation_writes_nothing_any_more_but_reads(node: CheckpointNode) -> None:
    old = node.link()
    copy(old, 0)
    stamp, writer = begin(old, 1)
    node.follow(G2, resume=0, lineage=(Stamp(G2, 0),))
    node.until_generation(G2)
    assert node.until_kept(("b", 0)).generation == G2
    writer.seal()
    old.sealed("b", stamp)
    assert "may not write" in old.copied("b", stamp, [0])[0].message
    with pytest.raises(SlotRefusedError, match="may not write"):
        begin(old, 1)
    assert read(old, 0)


def test_a_late_writer_of_an_older_generation_does_not_reach_the_new_ones_copy(node: CheckpointNode) -> None:
    old, new = node.link(), node.link(G2)
    _, writer = begin(old, 0)
    late = writer._view
    node.follow(G2)
    node.until_generation(G2)
    assert copy(new, 0) == {}
    for place in range(0, len(late), 8):
        late[place : place + 8] = b"garbage!"
    assert read(new, 0, computed=G2)


def test_what_lies_beyond_the_resumed_version_is_void(node: CheckpointNode) -> None:
    old = node.link()
    copy(old, 4)
    copy(old, 5)
    node.until_kept(("b", 4), ("b", 5))
    node.follow(G2, resume=4, lineage=(Stamp(G2, 4),))
    node.until_kept(("b", 4))
    with pytest.raises(SlotRefusedError, match="does not keep"):
        read(old, 5)
    assert read(old, 4)


def test_bundles_of_several_workers_do_not_mix(node: CheckpointNode) -> None:
    one, other = node.link(), node.link()
    stamp, writer = begin(one, 1, bundle="b")
    assert copy(other, 7, bundle="c") == {}
    writer.seal()
    one.sealed("b", stamp)
    assert one.copied("b", stamp, [0]) == {}
    assert read(one, 7, bundle="c") and read(other, 1, bundle="b")


WORKER = """
import sys
from checkpoint_nodes import *
link = SlotsLink(sys.argv[1], JOB, 0, SECONDS)
link.generation = G1
copy(link, 0)
stamp, writer = begin(link, 1)
if sys.argv[2] == "sealed":
    writer.seal()
print("there", flush=True)
sys.stdin.readline()
"""


def worker(node: CheckpointNode, moment: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, node.path, moment],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    node.follow(G1, workers=(os.getpid(), process.pid))
    return process


@pytest.mark.parametrize(("moment", "kept"), [("open", [("b", 0)]), ("sealed", [("b", 0), ("b", 1)])])
def test_a_killed_workers_copies_stay_and_only_its_open_slot_is_void(
    node: CheckpointNode, moment: str, kept: list[tuple[str, int]]
) -> None:
    with worker(node, moment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        process.send_signal(signal.SIGKILL)
    node.until_kept(*kept)
    link = node.link()
    assert read(link, 0)
    link.complete = len(kept) - 1
    assert copy(link, 2) == {}, "its successor writes on"


def test_a_process_that_the_agent_did_not_announce_gets_nothing(
    start_node: Callable[[int], CheckpointNode],
) -> None:
    node = start_node(0)
    node.follow(G1, workers=(1,))
    link = node.link()
    with pytest.raises(OSError):
        link.fill("b", Stamp(G1, 0), 4096)
    node.end()
    assert node.words.count("which is none of the job's workers") == 1


def is_closed(sock: socket.socket) -> bool:
    """Waits for the other end to close it."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:  # with something of ours unread
        return True


def test_garbage_from_a_worker_ends_its_connection_and_nothing_else(node: CheckpointNode) -> None:
    link = node.link()
    copy(link, 0)
    for garbage in (b"\xff" * 64, b"\0\0\0\1\xc1", b"\0\0\0\5"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(SECONDS)
            sock.connect(node.path)
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            assert is_closed(sock)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(SECONDS)
        sock.connect(node.path)
        channel.send(sock, Park(0), (sock.fileno(), sock.fileno()))
        assert is_closed(sock)
    assert read(link, 0)
    node.end()
    assert node.words.count("said once") == 1


def test_an_impossible_amount_of_memory_is_refused_and_the_older_copy_stays(node: CheckpointNode) -> None:
    link = node.link()
    copy(link, 0)
    with pytest.raises(SlotRefusedError, match="copies in memory need"):
        link.fill("b", Stamp(G1, 1), 1 << 60)
    assert read(link, 0)
    assert copy(link, 1) == {}


def test_nothing_is_left_when_the_agent_goes_while_a_copy_is_written(node: CheckpointNode) -> None:
    link = node.link()
    begin(link, 0)
    pid = node.process.pid
    node.end()
    assert not psutil.pid_exists(pid) and node.process.returncode == 0
    with pytest.raises(OSError, match=r"refused|No such file"):
        SlotsLink(node.path, JOB, 0, SECONDS)


def test_a_worker_notices_that_its_server_was_killed(node: CheckpointNode) -> None:
    link = node.link()
    copy(link, 0)
    node.kill()
    with pytest.raises(OSError):
        link.fill("b", Stamp(G1, 1), 4096)


def test_a_server_that_cannot_listen_says_why(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(SECONDS)
    with subprocess.Popen(
        [sys.executable, "-m", "phoenix_launch.checkpoint.server", str(theirs.fileno())], pass_fds=[theirs.fileno()]
    ) as process:
        theirs.close()
        channel.send(ours, CheckpointSettings(JOB, 0, os.getpid(), KEY, str(tmp_path / "none" / "s"), "127.0.0.1"))
        received = channel.receive(ours)
        assert received is not None and isinstance(received[0], CheckpointUp) and "No such file" in received[0].error
        assert process.wait(SECONDS) == 1
    ours.close()
