"""What keeps a job from starting on hosts is said of all of them in one table, and nothing is left running."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs_on_hosts import Head
from testhosts import Cluster

from tests.jobs_under_test import PHOENIX_RUN, Done, environment

pytestmark = pytest.mark.hosts


def row(done: Done, node: str) -> str:
    """What the table says of a node, in one line."""
    lines = done.err.splitlines()
    (start,) = [number for number, line in enumerate(lines) if re.match(rf"{node}\b", line)]
    end = next((n for n in range(start + 1, len(lines)) if not lines[n].startswith("  ")), len(lines))
    return " ".join(" ".join(lines[start:end]).split())


def refused(done: Done, nodes: int, of: int) -> bool:
    assert done.out == ""
    assert "Traceback" not in done.err
    return done.code == 1 and f"nothing was started: {nodes} of {of} node{'s' * (of != 1)} cannot take part" in done.err


def other_torch(folder: Path) -> Path:
    """An interpreter that has another torch than ours, as far as its metadata go."""
    packages = folder / "packages"
    info = packages / "torch-2.7.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.7.1\n")
    program = folder / "python-other"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def test_four_hosts_with_four_problems_are_all_named_in_one_table(head: Head, hosts: Cluster) -> None:
    hosts.link("host1", "down")
    hosts.sshd("host3", "hang")
    hosts.fill("host4", "/")
    (head.folder / "hosts").write_text(f"host1\nhost2 python={other_torch(head.folder)}\nhost3\nhost4\n")
    own_home = {"PHOENIX_HOME": "", "HOME": "/root"}
    done = head.run("--hostfile", "hosts", head.script(), env=own_home)
    hosts.run("head", ["rm", "-r", "/root/.local/state/phoenix"], check=True)
    assert refused(done, 4, of=4), done.err
    assert re.search("timed out|there is no route to it", row(done, "host1"))
    assert re.search(r"torch 2\.7\.1 there, 2\.\d+", row(done, "host2"))
    assert "sshd accepts connections but says nothing" in row(done, "host3")
    assert "No space left on device" in row(done, "host4")
    assert "hint:" in done.err


def test_a_script_that_is_missing_on_one_host_and_another_on_the_next_is_named(head: Head, hosts: Cluster) -> None:
    place = "/srv/job"  # on each host's own disk
    for host, text in {"head": "print(1)\n", "host1": "print(1)\n", "host2": "print(2)\n", "host3": ""}.items():
        write = f"mkdir -p {place}; test -z '{text}' || printf '%s' '{text}' > {place}/train.py"
        hosts.run(host, ["sh", "-c", write], check=True)
    argv = ["env", "-C", place, *PHOENIX_RUN, "--nodes", "host[1-4]", "train.py"]
    ended = hosts.run("head", argv, capture_output=True, text=True, timeout=60, env=environment(head.home))
    done = Done(ended.returncode, ended.stdout, ended.stderr, head.home)
    assert refused(done, 3, of=4), done.err
    assert "the script there is not the same as here" in row(done, "host2")
    assert "No such file" in row(done, "host3")
    assert f"folder {place}: No such file" in row(done, "host4")
    for host in ("head", "host1", "host2", "host3"):
        hosts.run(host, ["rm", "-r", place], check=True)


def test_a_neighbour_that_cannot_be_dialled_is_named_by_the_one_that_tried(head: Head, hosts: Cluster) -> None:
    hosts.partition("host1", ["host2"])
    done = head.run("--nodes", "host1,host2,host3", head.script())
    assert refused(done, 1, of=3), done.err
    assert re.search(r"cannot reach host2 at 10\.77\.0\.12:\d+: (no answer|No route to host)", row(done, "host1"))


@pytest.fixture
def firewall(hosts: Cluster) -> Iterator[None]:
    """The head takes no connection to these ports."""
    rules = "table inet fw { chain c { type filter hook input priority 0; tcp dport 29500-29510 drop; }; }"
    hosts.run("head", ["nft", rules], check=True)
    yield
    hosts.run("head", ["nft", "delete table inet fw"], check=True)


@pytest.mark.usefixtures("firewall")
def test_a_host_that_cannot_dial_back_says_where_it_tried(head: Head) -> None:
    done = head.run("--nodes", "host1", "--port-range", "29500-29510", head.script())
    assert refused(done, 1, of=1), done.err
    assert re.search(r"cannot reach the supervisor at tcp://10\.77\.0\.1:295\d\d: no answer", row(done, "host1"))
    assert "--interface" in row(done, "host1")
