"""A store host binds before it promises, says what is wrong in one line, and lives as long as its owner."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from phoenix_launch import channel
from phoenix_launch.local_messages import BecomeStore, StoreUp
from phoenix_runtime import store_host

LOCAL = "127.0.0.1"
DEADLINE = 60.0


class Host:
    """`python -m phoenix_runtime.store_host`, as an agent without a fork server starts it."""

    def __init__(self, request: BecomeStore) -> None:
        self.control, theirs = socket.socketpair()
        self.control.settimeout(DEADLINE)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phoenix_runtime.store_host", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        channel.send(self.control, request)

    def answer(self) -> StoreUp:
        received = channel.receive(self.control)
        assert received is not None and isinstance(received[0], StoreUp)
        return received[0]

    def end(self) -> int:
        self.control.close()
        return self.process.wait(DEADLINE)


def taken_port() -> socket.socket:
    return socket.create_server((LOCAL, 0))


def test_a_store_answers_clients_until_its_owner_closes_the_socket() -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host = Host(BecomeStore(address=LOCAL, port=0))
    up = host.answer()
    assert up.error == "" and up.port > 0
    first = TCPStore(LOCAL, up.port, is_master=False, wait_for_workers=False)
    second = TCPStore(LOCAL, up.port, world_size=2, is_master=False, wait_for_workers=False)
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert second.add("ranks", 1) == 1
    del first, second
    assert host.end() == 0
    socket.create_server((LOCAL, up.port)).close()  # the port is free again at once


def test_a_port_in_use_is_named() -> None:
    with taken_port() as taken:
        port = taken.getsockname()[1]
        host = Host(BecomeStore(address=LOCAL, port=port))
        assert host.answer() == StoreUp(port=0, error=f"address already in use: {LOCAL} port {port}")
        assert host.end() == 1


def test_an_owner_that_goes_before_it_asks_ends_the_host() -> None:
    control, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "phoenix_runtime.store_host", str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    control.close()
    assert process.wait(DEADLINE) == 0


def test_the_first_free_port_of_a_range_is_taken() -> None:
    with taken_port() as taken:
        low = taken.getsockname()[1]
        with store_host.listen(BecomeStore(address=LOCAL, port=0, port_low=low, port_high=low + 50)) as listener:
            assert low < listener.getsockname()[1] <= low + 50


def test_a_range_without_a_free_port_is_refused() -> None:
    with taken_port() as taken:
        low = taken.getsockname()[1]
        request = BecomeStore(address=LOCAL, port=0, port_low=low, port_high=low)
        with pytest.raises(OSError) as caught:
            store_host.listen(request)
        assert store_host.explain(caught.value, request) == f"address already in use: {LOCAL} port {low}-{low}"


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_this_hosts_is_named(address: str) -> None:
    request = BecomeStore(address=address, port=0)
    with pytest.raises(OSError) as caught:
        store_host.listen(request)
    assert f"{address} port 0" in store_host.explain(caught.value, request)


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 on this machine")
def test_an_address_of_the_newer_internet_works_too() -> None:
    with store_host.listen(BecomeStore(address="::1", port=0)) as listener:
        socket.create_connection(("::1", listener.getsockname()[1]), timeout=5).close()
