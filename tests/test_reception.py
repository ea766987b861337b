"""Hosts that come by themselves get an index and a name of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from phoenix_launch.bootstrap import AgentBootstrap
from phoenix_launch.bus.keys import KeyPair
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.messages import JoinRequest
from phoenix_launch.supervision.muster import Muster
from phoenix_launch.supervision.reception import Reception
from tests.bootstraps import bootstrap


@dataclass
class Enlisted:
    spec: NodeSpec
    incarnation: str = "i"
    keys: KeyPair = field(default_factory=lambda: KeyPair("p", "s"))


class FakeMuster:
    def __init__(self) -> None:
        self.specs: list[NodeSpec] = []

    def enlist(self, spec: NodeSpec, now: float) -> Enlisted:
        self.specs.append(spec)
        return Enlisted(spec)


def bootstrap_for(spec: NodeSpec, *_: Any) -> AgentBootstrap:
    return bootstrap(spec.name, index=spec.index)


def request(who: str, hostname: str = "gpu1", node_rank: int = -1) -> JoinRequest:
    return JoinRequest(hostname, node_rank, who, 8, "/opt/python", "/work dir", {"A": "b c"}, "")


@pytest.fixture
def reception() -> Iterator[Reception]:
    yield Reception(cast(Muster, FakeMuster()), bootstrap_for, [NodeSpec(index=0, name="gpu1")])


def test_each_host_gets_the_next_index_and_a_name_that_is_free(reception: Reception) -> None:
    given = [reception.answer(request(who, host), 0.0).bootstrap for who, host in (("a", "gpu2"), ("b", "gpu1"))]
    assert [(b.index, b.node) for b in given if b] == [(1, "gpu2"), (2, "gpu1-2")]


def test_a_repeated_request_gets_the_same_answer(reception: Reception) -> None:
    first = reception.answer(request("a"), 0.0)
    assert reception.answer(request("a"), 1.0) is first
    assert len(reception.enlisted) == 2


def test_a_node_rank_is_kept_and_a_second_one_refused(reception: Reception) -> None:
    answer = reception.answer(request("a", node_rank=3), 0.0)
    assert answer.bootstrap and answer.bootstrap.index == 3
    assert reception.enlisted[-1].group_rank == 3
    assert "rank 3 already" in reception.answer(request("b", node_rank=3), 0.0).refusal
    following = reception.answer(request("c"), 0.0).bootstrap
    assert following and following.index == 1


def test_the_environment_and_folder_are_those_of_the_host_that_asks(reception: Reception) -> None:
    given = reception.answer(request("a"), 0.0).bootstrap
    assert given and (given.environment, given.cwd) == ({"A": "b c"}, "/work dir")
