"""Checkpoint servers as their agents run them, and copies that tests write and read through them."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil  # type: ignore[import-untyped]

from phoenix_launch import channel
from phoenix_launch.checkpoint import header
from phoenix_launch.checkpoint.client import SlotsLink
from phoenix_launch.checkpoint.layout import Entry, Layout
from phoenix_launch.checkpoint.slots import SlotReader, SlotWriter, slot_size
from phoenix_launch.checkpoint.streams import HeldCopy, StreamReader
from phoenix_launch.copies import SlotPeer, Stamp
from phoenix_launch.local_messages import CheckpointSettings, CheckpointUp, SlotRules, SlotsKept
from phoenix_launch.wire import Generation

JOB = "job-1"
KEY = "ab" * 32
SECONDS = 20.0
G1, G2 = Generation(1, 1), Generation(1, 2)


class HasPeer(Protocol):
    @property
    def peer(self) -> SlotPeer: ...


class CheckpointNode:
    """One node's server; this process is its agent and its worker."""

    def __init__(self, index: int, *, key: str = KEY, job: str = JOB, memory: int = 0) -> None:
        self.index = index
        self.job = job
        self.folder = Path(tempfile.mkdtemp(prefix="slots-"))
        self.path = str(self.folder / "slots.sock")
        self.agent, theirs = socket.socketpair()
        self.agent.settimeout(SECONDS)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phoenix_launch.checkpoint.server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        theirs.close()
        settings = CheckpointSettings(job, index, os.getpid(), key, self.path, "127.0.0.1", memory=memory)
        channel.send(self.agent, settings)
        received = channel.receive(self.agent)
        assert received is not None and isinstance(received[0], CheckpointUp) and not received[0].error
        self.port = received[0].port
        self.links: list[SlotsLink] = []
        self.words = ""
        self.kept = SlotsKept(Generation(0, 0), ())

    @property
    def peer(self) -> SlotPeer:
        return SlotPeer(self.index, "127.0.0.1", self.port)

    def follow(
        self,
        generation: Generation,
        peers: Sequence[HasPeer] = (),
        *,
        resume: int = 0,
        lineage: tuple[Stamp, ...] = (),
        workers: tuple[int, ...] = (),
    ) -> None:
        known = tuple(node.peer for node in peers if node is not self)
        channel.send(self.agent, SlotRules(generation, resume, lineage, workers or (os.getpid(),), known))

    def flip_a_bit(self, bundle: str, stamp: Stamp) -> None:
        """In the data of a copy that it keeps, as a failing memory module would."""
        for descriptor in Path(f"/proc/{self.process.pid}/fd").iterdir():
            if "phoenix-slot" not in os.readlink(descriptor):
                continue
            with open(descriptor, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                view = memoryview(memory)
                found = header.read(view)
                try:
                    if found is not None and (found.label.bundle, found.label.stamp) == (bundle, stamp):
                        view[found.extent.data_offset + found.extent.data // 2] ^= 4
                        return
                finally:
                    view.release()
        raise AssertionError(f"node {self.index} has no slot with {bundle} {stamp}")

    def until_generation(self, generation: Generation) -> None:
        """Until the server has taken in the rules of this generation."""
        while self.kept.generation < generation:
            self.until_told()

    def until_told(self) -> None:
        received = channel.receive(self.agent)
        assert received is not None and isinstance(received[0], SlotsKept)
        self.kept = received[0]

    def until_kept(self, *expected: tuple[str, int]) -> SlotsKept:
        """Until the server has told its agent that it keeps exactly these versions of these bundles."""
        while sorted((kept.bundle, kept.slot.stamp.version) for kept in self.kept.kept) != sorted(expected):
            self.until_told()
        return self.kept

    def link(self, generation: Generation = G1) -> SlotsLink:
        link = SlotsLink(self.path, self.job, self.index, SECONDS)
        link.generation = generation
        self.links.append(link)
        return link

    def end(self) -> None:
        """The agent goes, and with it the server. A second time nothing happens."""
        if not self.folder.exists():
            return
        for link in self.links:
            link.close()
        self.agent.close()
        self.process.wait(SECONDS)
        assert self.process.stderr is not None
        self.words = self.process.stderr.read().decode()
        self.process.stderr.close()
        assert not list(self.folder.iterdir())
        self.folder.rmdir()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def threads(self) -> int:
        return int(psutil.Process(self.process.pid).num_threads())

    def descriptors(self) -> int:
        return int(psutil.Process(self.process.pid).num_fds())


def layout(size: int = 4096) -> Layout:
    return Layout.of([Entry("weight", "float32", (size // 4,), size), Entry("step", "int64", (), 8)])


def content(version: int, size: int) -> bytes:
    return bytes([version % 251]) * size


def begin(
    link: SlotsLink, version: int, *, bundle: str = "b", size: int = 4096, extras: bytes = b"extras"
) -> tuple[Stamp, SlotWriter]:
    """Everything of a copy but its seal."""
    stamp, table = Stamp(link.generation, version), layout(size)
    writer = link.fill(bundle, stamp, slot_size(table, len(extras)))
    assert writer is not None
    data = writer.begin(JOB, bundle, stamp, table, extras)
    for row in table.tensors:
        data[row.offset : row.offset + row.size] = content(version, row.size)
    return stamp, writer


def copy(
    link: SlotsLink, version: int, *, bundle: str = "b", size: int = 4096, replicas: tuple[int, ...] = ()
) -> dict[int, str]:
    """A whole copy; what went wrong, by node."""
    stamp, writer = begin(link, version, bundle=bundle, size=size)
    writer.seal()
    link.sealed(bundle, stamp, replicas)
    return {node: error.message for node, error in link.copied(bundle, stamp, (link._node, *replicas)).items()}


def read(
    link: SlotsLink,
    version: int,
    *,
    bundle: str = "b",
    node: int = -1,
    computed: Generation = G1,
    keep: bool = False,
) -> int:
    """Read a copy, see that it is right in every byte, and give the number of its bytes."""
    with contextlib.closing(link.read(bundle, Stamp(computed, version), node, keep=keep)) as copy:
        if isinstance(copy, StreamReader):
            data = memoryview(bytearray(copy.size))
            copy.fill(data)
            copy.end()
            held: SlotReader | HeldCopy = HeldCopy(copy.layout, copy.extras, data)
        else:
            assert copy.still_sealed()
            held = copy
        assert bytes(held.extras) == b"extras"
        for row in held.layout.tensors:
            assert bytes(held.tensor(row)) == content(version, row.size)
        return held.layout.size
