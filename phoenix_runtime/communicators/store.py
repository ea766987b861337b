"""Where groups find each other in a rebuild: a store that connects to nothing, since addresses come and go over the job's bus.

At many ranks some clients of a new TCPStore stall for seconds, and a constructor that waits for a peer that died can be let
go here at once. What gloo really asks of a store (traced, torch 2.13): one `set` a group, then `wait` and `get` for each rank.

Threads: one a group, which builds its communicators; whoever brings messages calls `deliver` or `abandon`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final, NoReturn, cast

from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store

from phoenix_runtime.communicators.group import PhoenixGroup
from phoenix_runtime.communicators.inner import Devices, Identity, connect

_DEFAULT: Final = timedelta(seconds=300)  # torch's own, for a `get` without a limit


class RebuildAbandoned(RuntimeError):
    """Nobody waits for these communicators any more: another failure made them useless before they were whole."""


class AddressStore(Store):
    """The addresses of one rebuild.

    Keep a reference as long as a group is built with it: C++ does not, and then finds no methods.

    Args:
        publish: takes what this rank has to tell the others; called by the thread that completes it.
        expected: so many addresses are told together, in one message; one that comes later is told by itself.
    """

    def __init__(self, publish: Callable[[Mapping[str, bytes]], None], expected: int) -> None:
        super().__init__()
        self._publish, self._missing = publish, expected
        self._known: dict[str, bytes] = {}
        self._own: dict[str, bytes] = {}  # not told yet
        self._changed = threading.Condition()
        self._abandoned = False
        self._limit = _DEFAULT

    # --- the bus's side ----------------------------------------------------------------------------------------------

    def deliver(self, addresses: Mapping[str, bytes]) -> None:
        """What others (and perhaps this rank) have published. May come in pieces, and twice."""
        with self._changed:
            self._known.update(addresses)
            self._changed.notify_all()

    def abandon(self) -> None:
        """Every wait, now and later, raises RebuildAbandoned at once."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    @property
    def abandoned(self) -> bool:
        return self._abandoned

    # --- what the constructors of communicators call -----------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        address = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._known[key] = address
            self._own[key] = address
            self._missing -= 1
            complete = {} if self._missing > 0 or self._abandoned else self._own
            if complete:
                self._own = {}
            self._changed.notify_all()
        if complete:
            self._publish(complete)

    def get(self, key: str) -> bytes:
        self._await([key], self._limit)
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._await(keys, timeout or self._limit)

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._known for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._await(keys, self._limit)
        return [self._known[key] for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        """Here only: what was published stays published."""
        with self._changed:
            return self._known.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._known)

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        return self._limit

    def has_extended_api(self) -> bool:
        return False

    def add(self, key: str, value: int) -> NoReturn:
        _refuse("add")

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> NoReturn:
        _refuse("compare_set")

    def append(self, key: str, value: str) -> NoReturn:
        _refuse("append")

    def _await(self, keys: Sequence[str], limit: timedelta) -> None:
        until = time.monotonic() + limit.total_seconds()
        with self._changed:
            while not self._abandoned and any(key not in self._known for key in keys):
                if not self._changed.wait(until - time.monotonic()) and time.monotonic() >= until:
                    missing = [key for key in keys if key not in self._known]
                    raise TimeoutError(f"no address {', '.join(missing)} within {limit.total_seconds():g} s")
            if self._abandoned:
                raise RebuildAbandoned("the communicators under construction are not needed any more")


def _refuse(operation: str) -> NoReturn:
    raise NotImplementedError(f"a rebuild's addresses are sent once, they cannot carry the store's {operation}")


class Construction:
    """The communicators of several groups, built all at once, so that each rank tells all its addresses in one message.

    Args:
        groups: which; all ranks of each of them build it now.
        publish: as AddressStore's.
    """

    def __init__(self, groups: Sequence[PhoenixGroup], publish: Callable[[Mapping[str, bytes]], None]) -> None:
        self.groups = groups
        expected = sum("gloo" in group.devices.backends.values() for group in groups)
        self.store = AddressStore(publish, expected)
        self._built: list[ProcessGroup | BaseException | None] = [None] * len(groups)
        self._left = len(groups)
        self._over = threading.Condition()

    def start(self) -> None:
        for number, group in enumerate(self.groups):
            arguments = (number, group.identity, group.devices)
            threading.Thread(target=self._build, args=arguments, name="phoenix-connect", daemon=True).start()

    def deliver(self, addresses: Mapping[str, bytes]) -> None:
        self.store.deliver(addresses)

    def abandon(self) -> None:
        """Let `wait` go at once. A thread that is in the middle of connecting to a dead peer is left behind, with its store."""
        self.store.abandon()
        with self._over:
            self._over.notify_all()

    def wait(self, seconds: float) -> list[ProcessGroup]:
        """The communicators, in the order of the groups.

        Raises RebuildAbandoned, TimeoutError, or the first error of a constructor.
        """
        with self._over:
            finished = self._over.wait_for(lambda: self._left == 0 or self._failed() or self.store.abandoned, seconds)
        if self.store.abandoned:
            raise RebuildAbandoned("the communicators under construction are not needed any more")
        failure = self._failed()
        if failure is not None:
            self.abandon()  # the others would wait for what is not going to be used
            try:
                raise failure
            finally:
                del failure
        if not finished:
            waiting = [
                str(group.identity.name) for group, built in zip(self.groups, self._built, strict=True) if not built
            ]
            raise TimeoutError(f"not connected within {seconds:g} s: {', '.join(waiting)}")
        return cast(list[ProcessGroup], self._built)

    def _failed(self) -> BaseException | None:
        return next((built for built in self._built if isinstance(built, BaseException)), None)

    def _build(self, number: int, identity: Identity, devices: Devices) -> None:
        # Groups of the same name exist side by side on different ranks (the parts of a mesh).
        name = f"{identity.name}@{identity.global_ranks[0]}/"
        built: ProcessGroup | BaseException
        try:
            built = connect(identity, devices, PrefixStore(name, self.store))
        except BaseException as error:
            built = error.with_traceback(None)
        with self._over:
            if not self.store.abandoned:  # else it goes here, on this thread: the end of a communicator takes long
                self._built[number] = built
            self._left -= 1
            self._over.notify_all()
