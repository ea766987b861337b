"""Addresses of a rebuild: they travel in one message a rank, and nobody waits for a peer that is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from torch._C._distributed_c10d import PrefixStore

from phoenix_runtime.communicators.store import AddressStore, RebuildAbandoned

SCRIPT: Final = Path(__file__).parent / "store_ranks.py"
LET_GO: Final = 50.0  # milliseconds that an abandoned construction may take
SOON: Final = timedelta(milliseconds=20)
LONG: Final = timedelta(seconds=30)


JOBS: Final = ("compare:2:1:2", "compare:4:3:2", "compare:8:3:2", "absent:4:3", "absent:8:3", "published:4:3")


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    """All jobs are forked from one process, in which torch is loaded."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH_", "GLOO_"))}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *JOBS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {job: [line for line in lines if line["job"] == job] for job in JOBS}


def ignore(addresses: Mapping[str, bytes]) -> None:
    return None


# --- whole ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (4, 3), (8, 3)])
def test_groups_find_each_other_by_one_message_a_rank(
    found: dict[str, list[dict[str, Any]]], ranks: int, groups: int
) -> None:
    by_bus = [line for line in found[f"compare:{ranks}:{groups}:2"] if line["way"] == "by_bus"]
    assert len(by_bus) == 2
    for line in by_bus:
        assert line["messages"] == 1
        assert line["sums"] == [[sum(range(ranks))] * groups] * ranks


@pytest.mark.parametrize("ranks", [4, 8])
def test_who_waits_for_a_missing_peer_is_let_go_at_once_and_can_build_again(
    found: dict[str, list[dict[str, Any]]], ranks: int
) -> None:
    (line,) = found[f"absent:{ranks}:3"]
    assert line["errors"] == []
    assert line["milliseconds"] < LET_GO
    assert line["sums"] == [[sum(range(ranks))] * 3] * ranks


def test_who_connects_to_a_peer_that_published_and_died_is_let_go_at_once(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    (line,) = found["published:4:3"]
    assert line["errors"] == []
    assert line["milliseconds"] < LET_GO


# --- the store itself ------------------------------------------------------------------------------------------------


def test_addresses_are_told_together_and_late_ones_alone() -> None:
    told: list[dict[str, bytes]] = []
    store = AddressStore(lambda addresses: told.append(dict(addresses)), expected=2)
    store.set("a", "1")
    assert told == []
    store.set("b", b"2")
    assert told == [{"a": b"1", "b": b"2"}]
    store.set("c", b"3")
    assert told[1:] == [{"c": b"3"}]


def test_a_wait_ends_when_the_address_comes() -> None:
    store = AddressStore(ignore, expected=1)
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(store.get("peer")))
    waiting.start()
    store.deliver({"other": b"0"})
    assert not store.check(["peer", "other"])
    store.deliver({"peer": b"\x00\xff"})
    waiting.join(10)
    assert found == [b"\x00\xff"]
    assert store.multi_get(["other", "peer"]) == [b"0", b"\x00\xff"]


def test_a_wait_without_an_answer_ends_with_its_limit_and_names_what_is_missing() -> None:
    store = AddressStore(ignore, expected=1)
    store.deliver({"a": b""})
    with pytest.raises(TimeoutError, match=r"no address b within 0\.02 s"):
        store.wait(["a", "b"], SOON)
    store.set_timeout(SOON)
    assert store.timeout == SOON
    with pytest.raises(TimeoutError):
        store.get("b")


def test_an_abandoned_store_lets_all_waits_go_now_and_later(eventually: Callable[..., object]) -> None:
    store = AddressStore(ignore, expected=1)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            store.wait(["never"], LONG)
        except RebuildAbandoned as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    store.abandon()
    eventually(lambda: len(errors) == 3)
    assert time.monotonic() - begun < LONG.total_seconds()
    store.deliver({"never": b"now"})
    with pytest.raises(RebuildAbandoned):
        store.get("never")
    for thread in threads:
        thread.join(10)


def test_an_abandoned_store_tells_nothing_any_more() -> None:
    told: list[Mapping[str, bytes]] = []
    store = AddressStore(told.append, expected=1)
    store.abandon()
    store.set("a", b"1")
    assert told == []


def test_what_cannot_go_over_the_bus_is_refused_by_name() -> None:
    store = AddressStore(ignore, expected=1)
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: store.add("a", 1),
        "compare_set": lambda: store.compare_set("a", "", "b"),
        "append": lambda: store.append("a", "b"),
    }
    for operation, call in calls.items():
        with pytest.raises(NotImplementedError, match=operation):
            call()


def test_torch_reaches_the_store_through_its_prefixes() -> None:
    told: list[Mapping[str, bytes]] = []
    store = AddressStore(told.append, expected=1)
    inner = PrefixStore("group/", store)
    inner.set("0", "here")
    ((key, value),) = told[0].items()
    assert value == b"here" and key.startswith("group/")
    store.deliver({key[:-1] + "1": b"there"})
    assert inner.get("1") == b"there"
    with pytest.raises(TimeoutError):
        inner.wait(["2"], SOON)
