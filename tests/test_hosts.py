"""Counts, host lists and host files become the nodes that were meant, and what cannot be meant is said in one line."""

from __future__ import annotations

import pytest

from phoenix_launch.errors import UsageError
from phoenix_launch.hosts.lists import MAX_NODES, parse_hosts
from phoenix_launch.hosts.specs import NodeSpec, read_hostfile, resolve

HOSTFILE = """
# the training hosts
gpu[01-02] slots=8 rack=a python=/opt/env/bin/python

root@gpu03   slots=4 rack=b   # fewer GPUs here
gpu04 slots=8 rack=b spare
"""


def names(specs: tuple[NodeSpec, ...]) -> tuple[str, str]:
    """The names of those that train and of the spares."""
    return (
        " ".join(spec.name for spec in specs if not spec.spare),
        " ".join(spec.name for spec in specs if spec.spare),
    )


def test_without_any_option_there_is_one_simulated_node() -> None:
    assert resolve() == (NodeSpec(index=0, name="node0"),)


def test_counts_make_simulated_nodes_with_the_spares_last() -> None:
    specs = resolve(nodes="2", spares="1", nproc="gpu")
    assert [(spec.index, spec.name, spec.host, spec.spare) for spec in specs] == [
        (0, "node0", "", False),
        (1, "node1", "", False),
        (2, "node2", "", True),
    ]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h1", "h1"),
        ("h1,user@h2, h3 ", "h1 user@h2 h3"),
        ("gpu[03-05,20]", "gpu03 gpu04 gpu05 gpu20"),
        ("gpu[8-11]", "gpu8 gpu9 gpu10 gpu11"),
        ("gpu[098-101]", "gpu098 gpu099 gpu100 gpu101"),
        ("me@r[1-2]n[0-1].site,h", "me@r1n0.site me@r1n1.site me@r2n0.site me@r2n1.site h"),
        ("10.0.0.1,[2001:db8::1],root@[::2],fe80::3", "10.0.0.1 2001:db8::1 root@::2 fe80::3"),
        ("[1-2]x", "1x 2x"),
    ],
)
def test_a_host_list_is_spelled_out(text: str, hosts: str) -> None:
    assert parse_hosts(text, "--nodes") == hosts.split()


def test_a_name_is_the_host_without_its_user() -> None:
    (spec,) = resolve(nodes="root@[::1]")
    assert (spec.name, spec.host) == ("::1", "root@::1")


@pytest.mark.parametrize(
    ("nodes", "spares", "training", "extra"),
    [
        ("h1,h2,h3", "0", "h1 h2 h3", ""),
        ("h1,h2,h3,h4", "2", "h1 h2", "h3 h4"),
        ("h[1-4]", "h5,h6", "h1 h2 h3 h4", "h5 h6"),
    ],
)
def test_spares_of_a_host_list_are_its_last_or_those_named(nodes: str, spares: str, training: str, extra: str) -> None:
    assert names(resolve(nodes=nodes, spares=spares)) == (training, extra)


def test_a_host_file_gives_slots_racks_interpreters_and_spares() -> None:
    specs = resolve(hostfile_text=HOSTFILE, hostfile="hosts.txt")
    assert specs == (
        NodeSpec(index=0, name="gpu01", host="gpu01", slots=8, rack="a", python="/opt/env/bin/python"),
        NodeSpec(index=1, name="gpu02", host="gpu02", slots=8, rack="a", python="/opt/env/bin/python"),
        NodeSpec(index=2, name="gpu03", host="root@gpu03", slots=4, rack="b"),
        NodeSpec(index=3, name="gpu04", host="gpu04", slots=8, rack="b", spare=True),
    )


@pytest.mark.parametrize(
    ("nodes", "spares", "training", "extra"),
    [
        ("", "0", "h1 h2 h3 h4", "s1 s2"),
        ("2", "0", "h1 h2", "s1 s2"),
        ("", "1", "h1 h2 h3 h4", "s1"),
        ("", "3", "h1 h2 h3", "s1 s2 h4"),
        ("1", "3", "h1", "s1 s2 h2"),
        ("", "h2,s2", "h1 h3 h4", "h2 s2"),
        ("h4,h1", "0", "h4 h1", "s1 s2"),
        ("s1,h2", "h1", "s1 h2", "h1"),
    ],
)
def test_options_choose_among_the_lines_of_a_host_file(nodes: str, spares: str, training: str, extra: str) -> None:
    text = "h1\nh2\ns1 spare\nh3\nh4\ns2 spare\n"
    assert names(resolve(nodes=nodes, spares=spares, hostfile_text=text)) == (training, extra)


def test_windows_line_ends_and_a_byte_order_mark_do_no_harm() -> None:
    assert names(resolve(hostfile_text="\ufeffh1 slots=2\r\nh2 slots=2 spare\r\n")) == ("h1", "h2")


@pytest.mark.parametrize(
    ("nodes", "spares", "message", "hint"),
    [
        ("0", "0", "--nodes 0 is too few", "at least 1"),
        ("-1", "0", "--nodes -1 is too few", "at least 1"),
        ("2", "-1", "--spares -1 is too few", "at least 0"),
        ("2", "h5", "names hosts, but the training nodes are simulated", "never mix"),
        ("", "h5", "names hosts, but the training nodes are simulated", "never mix"),
        ("2,h3", "0", "'2' between host names is a count", "never mix"),
        ("h1,h1", "0", "h1 is named twice (--nodes)", "slots=N"),
        ("h1,a@H1", "0", "H1 is named twice", "slots=N"),
        ("h[1-3],h2", "0", "h2 is named twice", "slots=N"),
        ("h1,h2", "h2", "h2 is named twice (--nodes and --spares)", "slots=N"),
        ("h1,h2", "2", "--spares 2 of 2 hosts leaves none", "last N"),
        ("h1", "3", "--spares 3 of 1 host leaves none", "last N"),
        ("gpu[]", "0", "a range is empty in 'gpu[]'", "gpu[03-16,20]"),
        ("gpu[1,,2]", "0", "a range is empty", "gpu[03-16,20]"),
        ("gpu[16-03]", "0", "runs backwards", "03-16"),
        ("gpu[a-c]", "0", "'a-c' is no number or range", "gpu[03-16,20]"),
        ("gpu[1-2", "0", "brackets in 'gpu[1-2' do not match", "gpu[03-16,20]"),
        ("gpu]1[", "0", "brackets", "gpu[03-16,20]"),
        ("h1,,h2", "0", "a host name is missing", "gpu[03-16,20]"),
        ("h1,", "0", "a host name is missing", "gpu[03-16,20]"),
        ("-oProxyCommand=x", "0", "is no host name", "gpu[03-16,20]"),
        ("h1;reboot", "0", "'h1;reboot' is no host name", "gpu[03-16,20]"),
        ("h1:22", "0", "'h1:22' is no host name", "ssh's configuration"),
        ("-x@h1", "0", "'-x' in '-x@h1' is no user name", "gpu[03-16,20]"),
        ("@h1", "0", "'' in '@h1' is no user name", "gpu[03-16,20]"),
        ("gpu[1-999999999999]", "0", f"more than {MAX_NODES} nodes", "mistyped"),
        ("gpu[1-99999][1-99999]", "0", f"more than {MAX_NODES} nodes", "mistyped"),
        ("99999999", "0", f"more than {MAX_NODES} nodes", "mistyped"),
    ],
)
def test_bad_options_are_told_in_one_line_with_a_hint(nodes: str, spares: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(nodes=nodes, spares=spares)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("h1\nh2 slot=8\n", "hosts.txt line 2: 'slot=8' is not understood", "did you mean slots?"),
        ("h1 spares\n", "hosts.txt line 1: 'spares' is not understood", "did you mean spare?"),
        ("h1 spare=yes\n", "'spare=yes' is not understood", "spare"),
        ("h1 slots\n", "'slots' is not understood", "slots"),
        ("h1 zone=3\n", "'zone=3' is not understood", "a line looks like"),
        ("h1 slots=0\n", "hosts.txt line 1: slots=0 is no number of workers", "from 1 on"),
        ("# c\n\nh1 slots=many\n", "hosts.txt line 3: slots=many", "from 1 on"),
        ("h1 slots=1e9\n", "slots=1e9", "from 1 on"),
        ("h1 slots=\n", "slots= has no value", "a line looks like"),
        ("h1 slots=2 slots=4\n", "slots is given twice", "a line looks like"),
        ("h1 python=bin/python\n", "python=bin/python is no absolute path", "whole path"),
        ("h1 python=~/bin/python\n", "is no absolute path", "whole path"),
        ("h1\nh2\nroot@h1\n", "h1 is named twice (hosts.txt line 1 and hosts.txt line 3)", "slots=N"),
        ("h1\ngpu[3-1]\n", "hosts.txt line 2: the range 3-1", "1-3"),
        ("# nothing\n", "no host stands in hosts.txt", "a line looks like"),
        ("h1 spare\n", "no host is left to train on", "more hosts"),
        ("4\n", "hosts.txt line 1: '4' between host names is a count", "never mix"),
        (
            "h1 slots=8\nh2 slots=4 spare\n",
            "line 2: the spare h2 has 4 slots, h1, which it may replace, has 8",
            "slots=8",
        ),
        ("h1 slots=8\nh2 spare\n", "the spare h2 has 2 slots", "slots=8"),
    ],
)
def test_a_bad_host_file_is_told_with_its_line(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(hostfile_text=text, hostfile="hosts.txt", nproc="2")
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("nodes", "spares", "message"),
    [
        ("3", "0", "--nodes 3, but the host file has only 2 hosts"),
        ("h9", "0", "--nodes names h9, which is not in the host file"),
        ("", "h9", "--spares names h9, which is not in the host file"),
        ("", "5", "--spares 5, but the host file has only 1 host beyond"),
        ("1", "3", "--spares 3, but the host file has only 2 hosts beyond"),
    ],
)
def test_options_that_the_host_file_cannot_serve(nodes: str, spares: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(nodes=nodes, spares=spares, hostfile_text="h1\nh2\ns1 spare\n")


def test_slots_known_only_to_the_hosts_are_not_compared() -> None:
    assert names(resolve(hostfile_text="h1 slots=8\nh2 spare\n", nproc="gpu")) == ("h1", "h2")


def test_a_missing_host_file_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"cannot read the host file /nowhere/hosts: No such file"):
        read_hostfile("/nowhere/hosts")
