"""Every host that cannot take part is named, with what is wrong and what to do, in one table."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from phoenix_launch.hosts.preflight import MIN_DISK, MIN_MEMORY, Expected, Problem, failure_line, problems, table
from phoenix_launch.hosts.ssh_failures import Reason
from phoenix_launch.messages import HostFacts, PeerProbe

GOOD = HostFacts(
    hostname="h1",
    address="10.0.0.1",
    interface="eth0",
    python="3.11.7",
    phoenix="0.1.0",
    torch="2.13.0+cpu",
    cores=8,
    gpus=0,
    memory_free=64 << 30,
    disk_free=10 << 30,
    script_digest="abc",
    script_error="",
    cwd_error="",
    log_error="",
    probe_port=4567,
    agent_pid=11,
    guardian_pid=10,
)
OWN = Expected(
    phoenix="0.1.0",
    python="3.11.9",
    torch="2.13.0+cpu",
    script_digest="abc",
)


def fact(**changes: Any) -> HostFacts:
    return msgspec.structs.replace(GOOD, **changes)


def good_hosts(count: int) -> dict[str, HostFacts]:
    return {f"h{i}": fact(hostname=f"h{i}", address=f"10.0.0.{i}") for i in range(1, count + 1)}


def test_hosts_that_are_alike_have_no_problem() -> None:
    assert problems(OWN, good_hosts(3), {}, {"h1": (PeerProbe("h2", "10.0.0.2", 4567),)}) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"phoenix": "0.2.0"}, "phoenix-run 0.2.0 there, 0.1.0 here"),
        ({"torch": "2.12.0"}, "torch 2.12.0 there, 2.13.0+cpu here"),
        ({"torch": ""}, "torch is not installed there"),
        ({"python": "3.12.1"}, "Python 3.12.1 there, 3.11.9 here"),
        ({"script_digest": "xyz"}, "the script there is not the same as here"),
        ({"script_digest": "", "script_error": "/a/t.py: No such file"}, "script /a/t.py: No such file"),
        ({"cwd_error": "/a: No such file", "script_digest": ""}, "folder /a: No such file"),
        ({"log_error": "/l: Permission denied"}, "log folder /l: Permission denied"),
        ({"disk_free": MIN_DISK - 1}, "only 64 MiB of disk free where the logs go"),
        ({"memory_free": MIN_MEMORY - (24 << 20)}, "only 1000 MiB of memory free"),
        ({"address": ""}, "no address that others can dial"),
        ({"address": "127.0.1.1", "hostname": "h2"}, "its address 127.0.1.1 is known to itself alone"),
        ({"address": "10.0.0.1"}, "has the same address as h1: 10.0.0.1"),
    ],
)
def test_a_host_that_differs_is_named_with_what_is_wrong(changes: dict[str, Any], what: str) -> None:
    facts = good_hosts(3) | {"h2": fact(**{"address": "10.0.0.2", **changes})}
    (problem,) = problems(OWN, facts)
    assert (problem.node, problem.what) == ("h2", what)
    assert problem.hint


def test_another_patch_release_of_python_is_no_problem() -> None:
    assert problems(OWN, {"h1": fact(python="3.11.2")}) == []


def test_without_torch_here_the_first_host_is_the_measure() -> None:
    own = Expected(phoenix="0.1.0", python="3.11.9")
    facts = good_hosts(2) | {"h2": fact(address="10.0.0.2", torch="2.13.1")}
    assert [(p.node, p.what) for p in problems(own, facts)] == [
        ("h2", "torch 2.13.1 there, 2.13.0+cpu on the first host")
    ]


def test_simulated_nodes_share_an_address() -> None:
    assert problems(OWN, {"node0": fact(address="127.0.0.1"), "node1": fact(address="127.0.0.1")}) == []


def test_an_interface_without_address_is_named() -> None:
    (problem,) = problems(Expected(phoenix="0.1.0", interface="ib0"), {"h1": fact(address="")})
    assert problem.what == "no address on interface ib0"


def test_neighbours_that_cannot_talk_are_named_as_a_pair() -> None:
    probes = {
        "h1": (PeerProbe("h2", "10.0.0.2", 4567),),
        "h2": (PeerProbe("h3", "10.0.0.3", 4568, "timed out"), PeerProbe("h4", "fe80::1", 4569, "connection refused")),
    }
    assert [(p.node, p.what) for p in problems(OWN, good_hosts(4), {}, probes)] == [
        ("h2", "cannot reach h3 at 10.0.0.3:4568: timed out"),
        ("h2", "cannot reach h4 at [fe80::1]:4569: connection refused"),
    ]


def test_hosts_that_never_said_hello_come_first_with_their_reason() -> None:
    facts = {"h1": fact(torch="2.12.0")}
    found = problems(OWN, facts, {"h3": Reason("connection refused", "is sshd up?"), "h4": "no word came"})
    assert found[:2] == [Problem("h3", "connection refused", "is sshd up?"), Problem("h4", "no word came", "")]
    assert found[2].node == "h1"


def test_all_problems_of_all_hosts_are_found_at_once() -> None:
    facts = good_hosts(2) | {
        "h2": fact(address="10.0.0.2", torch="1.0", memory_free=1, log_error="x", script_error="y")
    }
    assert len(problems(OWN, facts, {"h3": "timed out"})) == 5


def test_the_table_is_aligned_and_says_everything() -> None:
    assert table([Problem("h1", "cannot resolve", "check it"), Problem("gpu17", "timed out", "")]) == (
        "node   problem         what to do\nh1     cannot resolve  check it\ngpu17  timed out"
    )


def test_hosts_with_the_same_problem_share_a_row() -> None:
    lines = table([Problem("h1", "timed out"), Problem("h2", "too old"), Problem("h3", "timed out")]).splitlines()
    assert lines[1:] == ["h1, h3  timed out", "h2      too old"]


@pytest.mark.parametrize("width", [60, 120])
def test_a_wide_table_wraps_and_loses_no_word(width: int) -> None:
    found = [Problem(f"gpu{i:03}", "cannot reach it " * 12, "look at it " * 9) for i in range(40)]
    found.append(Problem("x" * 200, "y" * 300, "z" * 300))
    text = table(found, width)
    assert max(map(len, text.splitlines())) <= width
    for i in range(40):
        assert f"gpu{i:03}" in text
    assert (text.count("reach"), text.count("look")) == (12, 9)
    assert (text.count("x"), text.count("y"), text.count("z")) == (200, 300, 300)


def test_control_characters_of_a_host_do_not_break_the_table() -> None:
    assert table([Problem("h1", "a\nb\tc\x1b[2J")]).splitlines()[1] == "h1    a b c [2J"


def test_the_last_line_counts() -> None:
    assert failure_line([Problem("h1", "a")]) == "the job did not start: 1 problem on h1"
    assert failure_line([Problem("h1", "a"), Problem("h2", "a")]) == "the job did not start: 2 problems on 2 nodes"
