"""Hosts that are added to a running job: what the command hears, by where its host stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from test_membership import PAIR
from test_membership_swaps import Swaps

from phoenix_launch.command_messages import HostStage
from phoenix_launch.errors import UsageError
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.job import events as job_events
from phoenix_launch.supervision.additions import Additions


@dataclass
class Launches:
    """As much of a Muster as is asked for."""

    specs: dict[int, NodeSpec]
    waiting: list[NodeSpec] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    forgotten: list[int] = field(default_factory=list)

    def wants(self, index: int) -> bool:
        return any(spec.index == index for spec in self.waiting)

    def forget(self, index: int) -> None:
        self.failures.pop(index, None)
        self.forgotten.append(index)


class Asked:
    def __init__(self, *, hosts: bool) -> None:
        self.job = Swaps(PAIR)
        self.launches = Launches(
            {i: NodeSpec(index=i, name=f"node{i}", host=f"me@node{i}" if hosts else "") for i in range(2)}
        )
        self.named: list[NodeSpec] = []
        self.additions = Additions(cast(Any, self.launches), hosts, self.named.append)

    def ask(self, word: str) -> tuple[HostStage, int | None]:
        reply, wanted = self.additions.ask(word, self.job.state)
        if wanted is not None:
            self.job.tell(job_events.HostAdded(wanted))
        return reply.stage, wanted


def test_a_new_host_is_launched_once_as_a_spare_node_and_asked_about_until_it_is_there() -> None:
    asked = Asked(hosts=True)
    assert asked.ask("root@gpu7") == (HostStage.COMING, 2)
    assert asked.ask("root@gpu7") == (HostStage.COMING, None)
    (spec,) = asked.launches.waiting
    assert (spec.index, spec.name, spec.host, spec.spare) == (2, "gpu7", "root@gpu7", True)
    assert asked.named == [spec]
    asked.job.admit(2, 1, spare=True)
    assert asked.ask("root@gpu7") == (HostStage.COMING, None), "it loads"
    asked.job.report(2)
    assert asked.ask("root@gpu7") == (HostStage.READY, None)


def test_a_host_that_is_not_fit_is_told_why_and_not_tried_again() -> None:
    asked = Asked(hosts=True)
    asked.ask("gpu7")
    asked.launches.waiting.clear()
    asked.launches.failures[2] = "no route to host"
    reply, _ = asked.additions.ask("gpu7", asked.job.state)
    assert (reply.stage, reply.text) == (HostStage.REFUSED, "gpu7 cannot take part: no route to host")
    assert asked.ask("gpu7") == (HostStage.COMING, 2), "but when it is asked for anew"


def test_a_node_that_was_given_up_comes_back_under_its_own_index() -> None:
    asked = Asked(hosts=False)
    for _ in range(PAIR.max_failures_per_host + 1):
        asked.job.lose(1)
        asked.job.state = asked.job.state
    assert asked.ask("node1") == (HostStage.COMING, 1)
    assert asked.job.state.members[1].failures == 0
    assert asked.launches.waiting[0].index == 1 and asked.launches.waiting[0].spare


def test_a_node_that_takes_part_is_not_launched_twice() -> None:
    asked = Asked(hosts=False)
    assert asked.ask("node0") == (HostStage.READY, None)
    assert not asked.launches.waiting


@pytest.mark.parametrize(
    ("hosts", "word", "words"),
    [
        (False, "gpu7", "simulated on this machine"),
        (False, "node5", "simulated on this machine"),
        (True, "gpu[1-2]", "not one host"),
        (True, "3", "not one host"),
    ],
)
def test_what_cannot_be_a_host_of_this_job_is_refused(hosts: bool, word: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        Asked(hosts=hosts).ask(word)
    assert refused.value.hint
