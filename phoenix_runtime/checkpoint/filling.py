"""Brings one version of this rank's state into its node's slots, and sees that their replicas are sealed on other nodes.

All of it runs on the copier's thread; others may `interrupt` it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import torch

from phoenix_launch.checkpoint.client import SlotsLink
from phoenix_launch.checkpoint.layout import Layout
from phoenix_launch.checkpoint.pairs import NoRoomError, SlotRefusedError
from phoenix_launch.checkpoint.slots import SlotWriter, slot_size
from phoenix_launch.copies import Stamp
from phoenix_launch.messages import Ground, NoRoom
from phoenix_launch.progress import CopyFigures
from phoenix_launch.timeouts import timeout
from phoenix_launch.wire import Generation
from phoenix_runtime import link
from phoenix_runtime.checkpoint.bundles import Bundle, private_bundle
from phoenix_runtime.checkpoint.copies import OwnCopy, copies_of, nodes_of, slice_of, sound
from phoenix_runtime.checkpoint.memory import SlotTargets, data_sum, entry, local
from phoenix_runtime.checkpoint.private import Private, encoded
from phoenix_runtime.fault_points import FAULT_POINTS

_PAUSE: Final = 0.1  # seconds before a server is asked again
_PARTNER: Final = timeout("partner")
_PARTNER_PAUSE: Final = 30.0  # seconds until a node that took no replica is asked again; doubled each time
_LONGEST_PAUSE: Final = 960.0
SLICED_BYTES: Final = 4096  # of a copy; a smaller one is filled by one rank


@dataclass(frozen=True, slots=True)
class Footing:
    """What a generation's copies stand on. `resume`: the version at which it began, 0 at the script's start."""

    generation: Generation
    ground: Ground
    resume: int
    slots: str  # path of the node's checkpoint server


NO_COPIES: Final = Ground({}, (), (), interval=0)  # of a job without copies in memory, which may write some to disk


class CopyFailedError(RuntimeError):
    """A version could not be copied, so the step after it must not change anything."""


class Left(BaseException):
    """The version under way is void: nobody waits for it any more."""


class _PartnerError(SlotRefusedError):
    """Another node does not take its replica. `node`: which."""

    node = -1


@dataclass(eq=False)
class Order:
    """One version to copy. `left`: it is void; `over`: the thread has done with it; `whole`: the optimizer may step."""

    footing: Footing
    stamp: Stamp
    bundles: Sequence[Bundle]
    private: Private | None
    ready: list[torch.Event]
    withdraw: Callable[[Mapping[str, tuple[str, ...]]], Sequence[Bundle]] | None = None  # what is not equal after all
    odd: frozenset[int] = (
        frozenset()
    )  # ranks that have other bits than most holders: they fill nothing that others hold
    waited_from: float = 0.0  # when the main thread began to wait for it
    left: threading.Event = field(default_factory=threading.Event)
    over: bool = False
    whole: bool = False

    def check(self) -> None:
        if self.left.is_set():
            raise Left


@dataclass(frozen=True, slots=True)
class _Part:
    """A bundle as it goes into a slot."""

    key: str
    layout: Layout
    tensors: Sequence[torch.Tensor]
    extras: bytes = b""
    to_come: int = 0  # bytes that an optimizer is going to add

    @property
    def size(self) -> int:
        return slot_size(self.layout, len(self.extras))


_Plan: TypeAlias = tuple[Footing | None, tuple[str, ...], frozenset[int], frozenset[int], tuple[OwnCopy, ...]]


class Filler:
    """One a process. `seconds`: for how long a server that does not keep a copy is asked again.

    `no_room` is called when a node's memory is too small, which ends the copying; `degraded` when a node takes no replicas,
    with an empty text when it does again.
    """

    def __init__(
        self, job: str, rank: int, seconds: float, no_room: Callable[[NoRoom], None], degraded: Callable[[str], None]
    ) -> None:
        self._job, self._rank, self._seconds = job, rank, seconds
        self._no_room, self._degraded = no_room, degraded
        self._lock = threading.Lock()  # of `_link`, which others interrupt
        self._link: SlotsLink | None = None
        self._plan: _Plan = (None, (), frozenset(), frozenset(), ())
        self._avoided: dict[int, tuple[float, float]] = {}  # by node: until when, and for how long
        self._targets = SlotTargets()
        self._figures = CopyFigures()
        self._announced: tuple[tuple[str, int, int], ...] = ()  # to the server that it is connected to

    def fill(self, order: Order, complete: int) -> None:
        """Until all copies that this rank fills are sealed. A server that was restarted has lost them: then once more.

        Raises Left, CopyFailedError.
        """
        began = time.monotonic()
        for attempt in itertools.count():
            try:
                self._fill(order, self._connected(order), complete, sliced=attempt == 0)
                return
            except _PartnerError as error:
                order.check()
                if time.monotonic() > began + _PARTNER:
                    self._avoid(error)
            except (OSError, SlotRefusedError) as error:
                order.check()
                if isinstance(error, OSError):
                    self.drop()
                if isinstance(error, NoRoomError) or time.monotonic() > began + self._seconds:
                    raise CopyFailedError(f"version {order.stamp.version} could not be copied: {error}") from error
            order.left.wait(_PAUSE)

    def interrupt(self) -> None:
        """From any thread: what is under way fails."""
        with self._lock:
            if self._link is not None:
                self._link.interrupt()

    def drop(self) -> None:
        """Give back what is open at the server."""
        with self._lock:
            slots, self._link = self._link, None
        if slots is not None:
            slots.close()

    def forked(self) -> None:
        """In a child that the script forked: it must not keep the connection open when this process is gone."""
        if self._link is not None:
            self._link.close()

    # --- one try -----------------------------------------------------------------------------------------------------

    def _fill(self, order: Order, slots: SlotsLink, complete: int, *, sliced: bool) -> None:
        """`sliced`: together with other ranks of this node; who tries again writes the whole."""
        slots.complete = complete
        stamp = order.stamp
        node = order.footing.ground.places[self._rank]
        parts = {part.key: part for part in self._parts(order)}
        own = tuple([
            copy if sliced and parts[copy.bundle].size >= SLICED_BYTES else replace(copy, parts=1)
            for copy in self._own_copies(order)
            if copy.part == 0 or not sliced or parts[copy.bundle].size >= SLICED_BYTES
        ])  # fmt: skip
        demands = tuple((c.bundle, parts[c.bundle].size + parts[c.bundle].to_come, len(c.replicas)) for c in own)
        if demands != self._announced:
            slots.announce(demands)
            self._announced = demands
        copied = 0
        for copy in own:
            part = parts[copy.bundle]
            with self._telling(node):
                writer = slots.fill(
                    part.key, stamp, part.size, part.size + part.to_come, copy.part, copy.parts
                )  # fmt: skip
            if writer is not None:
                copied += self._store(order, writer, part, copy)
            slots.sealed(part.key, stamp, copy.replicas)
        FAULT_POINTS.reached("sealed")
        for copy in own:
            for where, error in slots.copied(copy.bundle, stamp, (node, *copy.replicas)).items():
                with self._telling(where):
                    raise _failed(copy.bundle, where, error, own=where == node) from error
        FAULT_POINTS.reached("replicated")
        self._count(parts, own, copied)

    def _store(self, order: Order, writer: SlotWriter, part: _Part, copy: OwnCopy) -> int:
        """The bytes that it has written: all of the copy, sealed; or this rank's slice."""
        sizes = [row.size for row in part.layout.tensors]
        rows = slice_of(sizes, copy.part, copy.parts) if copy.parts > 1 else None
        if copy.part == 0 or copy.parts == 1:
            data = writer.begin(self._job, part.key, order.stamp, part.layout, part.extras)
        else:
            data = writer.join(part.layout)
        self._targets.store(writer, data, part.layout, part.tensors, order.check, order.ready, rows)
        order.check()
        FAULT_POINTS.reached("copying")
        if rows is not None:
            return sum(sizes[rows.start : rows.stop])
        writer.seal(data_sum(data, order.check) if copy.replicas else "")
        return part.size

    def _count(self, parts: dict[str, _Part], own: tuple[OwnCopy, ...], copied: int) -> None:
        self._figures = CopyFigures(
            state=sum(part.size for part in parts.values()),
            copied=self._figures.copied + copied,
            sent=self._figures.sent + sum(len(copy.replicas) * parts[copy.bundle].size for copy in own),
            holders=self._figures.holders,
        )
        page = link.progress_page()
        if page is not None:
            page.write_copies(self._figures)

    def _parts(self, order: Order) -> Iterator[_Part]:
        for bundle in order.bundles:
            yield _Part(bundle.key, *bundle.now(), to_come=bundle.to_come)
        assert order.private is not None
        tensors, extras = encoded(order.private)
        layout = Layout.of(entry(name, tensor) for name, tensor in tensors)
        yield _Part(private_bundle(self._rank).key, layout, [local(tensor) for _, tensor in tensors], extras)

    def _own_copies(self, order: Order) -> tuple[OwnCopy, ...]:
        keys = tuple([bundle.key for bundle in order.bundles])
        avoided = self._avoided_now()
        footing, known, without, odd, copies = self._plan
        if footing is not order.footing or (known, without, odd) != (keys, avoided, order.odd):
            ground = order.footing.ground
            holds = [*sound(self._rank, [bundle.described for bundle in order.bundles], order.odd)]
            holds.append(private_bundle(self._rank))
            copies = copies_of(self._rank, holds, ground, avoided)
            self._plan = (order.footing, keys, avoided, order.odd, copies)
            fewest = min(len(nodes_of(bundle, ground, avoided)) for bundle in holds)
            self._figures = CopyFigures(
                state=self._figures.state, copied=self._figures.copied, sent=self._figures.sent, holders=fewest
            )
            if without and not avoided:
                self._degraded("")
        return copies

    def _connected(self, order: Order) -> SlotsLink:
        if self._link is None:
            node = order.footing.ground.places[self._rank]
            made = SlotsLink(order.footing.slots, self._job, node)
            made.generation = order.footing.generation
            self._announced = ()
            with self._lock:
                self._link = made
        order.check()
        return self._link

    # --- what goes wrong ---------------------------------------------------------------------------------------------

    def _avoid(self, error: _PartnerError) -> None:
        """That node is no partner for a while; the next one in the ring is. Longer each time that it fails again."""
        pause = min(_LONGEST_PAUSE, 2 * self._avoided[error.node][1] if error.node in self._avoided else _PARTNER_PAUSE)
        self._avoided[error.node] = (time.monotonic() + pause, pause)
        self._degraded(f"node {error.node} takes no replicas: {error}")

    def _avoided_now(self) -> frozenset[int]:
        now = time.monotonic()
        return frozenset(node for node, (until, _) in self._avoided.items() if until > now)

    @contextlib.contextmanager
    def _telling(self, node: int) -> Iterator[None]:
        try:
            yield
        except NoRoomError as error:
            short = error.__cause__ if isinstance(error.__cause__, NoRoomError) else error
            self._no_room(NoRoom(short.message, node, short.need, short.limited, short.replicas))
            raise


def _failed(bundle: str, node: int, error: SlotRefusedError, *, own: bool) -> SlotRefusedError:
    words = f"the copy of bundle {bundle!r} on node {node}: {error}"
    if own or isinstance(error, NoRoomError):
        return type(error)(words)
    failed = _PartnerError(words)
    failed.node = node
    return failed
