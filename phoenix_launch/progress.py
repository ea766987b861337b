"""The progress page: a small mapping through which a worker says where it is, readable even when the worker hangs."""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Final

PAGE_BYTES: Final = 4096
LAYOUT: Final = 6  # at offset 0, so that two versions of us never misread each other

# 64-bit words, each stored by one aligned store. The table of counts takes the rest of the page: key, count, key, count ...
_LAYOUT, _SEQUENCE, _STEP, _PHASE, _LOSS, _TOKENS, _COMPLETE, _INSIDE = range(8)
_COPIES = range(8, 12)
_OPERATIONS, _WAIT_KEY, _WAIT_COUNT, _TYPICAL, _ALLOWED = range(12, 17)
_COMPUTE, _ROLE = 17, 18
_TABLE = range(32, PAGE_BYTES // 8, 2)
_READ_TRIES: Final = 100

COMPUTE_STEPS: Final = 10  # over which a rank's own time in a step is taken


class Phase(enum.IntEnum):
    """What a worker is doing, as far as it says so."""

    STARTING = 0
    TRAINING = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFigures:
    """What a rank's copies in memory come to."""

    state: int = 0  # bytes of all that the rank holds, as in its newest copy
    copied: int = 0  # bytes that it has written into slots of its node, since it was started
    sent: int = 0  # bytes of them that other nodes have sealed as replicas
    holders: int = 0  # nodes that keep each of its bundles, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceFigures:
    """What a rank takes for a step by itself. Only ranks of an equal role are to be compared."""

    compute: float = (
        0.0  # seconds of a step in which it did not wait for others, the median of the last ones; 0: not known
    )
    role: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a page says. `reports` counts how often it was written: a count that stands still is a worker that hangs."""

    step: int = -1  # -1: never said
    phase: int = Phase.STARTING
    loss: float = float("nan")
    tokens: int = 0
    reports: int = 0
    complete: int = -1  # the newest version all copies of which are sealed, -1: unknown; of another thread's making
    inside: int = -1  # the step that run_step is in, counted from 1, -1: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a rank is in what it exchanges with others. A key is a group (even) or a way between two ranks of it (odd)."""

    operations: int = 0  # that it has begun, of all groups
    waits_for: tuple[int, int] = (0, 0)  # the key and number of the operation that its main thread waits for; 0: none
    typical: float = 0.0  # seconds of a step, the median of the last ones; 0: none is over
    allowed: float = 0.0  # seconds that the section it is in may take; 0: nothing was said


class ProgressPage:
    """One page with one writer and any number of readers.

    The writer makes the sequence word odd, stores, and makes it even again; a reader reads again when it was odd or has
    moved. A writer killed in between leaves it odd for ever, so a reader gives up after some tries and takes what is
    there: every single word is whole, they may belong to two neighbouring reports.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._signed = memoryview(mapping).cast("q")
        self._real = memoryview(mapping).cast("d")

    @classmethod
    def create(cls) -> tuple[int, ProgressPage]:
        """A fresh page and its memfd (close-on-exec, the caller's to close), sealed so that nobody can cut it short."""
        descriptor = os.memfd_create("phoenix-progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, PAGE_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            page = cls(mmap.mmap(descriptor, PAGE_BYTES))
        except BaseException:
            os.close(descriptor)
            raise
        page._write(Progress())
        page._signed[_COMPLETE] = page._signed[_INSIDE] = -1
        page._signed[_SEQUENCE] = 0
        page._signed[_LAYOUT] = LAYOUT
        return descriptor, page

    @classmethod
    def attach(cls, path: str) -> ProgressPage:
        """Map the page behind a path such as /proc/PID/fd/N. Raises OSError, or ValueError if it is no page of ours."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != PAGE_BYTES:
                raise ValueError(f"{path} is no progress page: {os.fstat(descriptor).st_size} bytes, not {PAGE_BYTES}")
            page = cls(mmap.mmap(descriptor, PAGE_BYTES))
        finally:
            os.close(descriptor)
        if page._signed[_LAYOUT] != LAYOUT:
            page.close()
            raise ValueError(f"{path} is no progress page of layout {LAYOUT}")
        return page

    def write(self, progress: Progress) -> None:
        """Store a report; its `reports` is counted here, its `complete` and `inside` are not taken over."""
        sequence = self._signed[_SEQUENCE] | 1
        self._signed[_SEQUENCE] = sequence
        self._write(progress)
        self._signed[_SEQUENCE] = sequence + 1

    def write_complete(self, version: int) -> None:
        """One word by itself, which any one thread may write while another one writes reports."""
        self._signed[_COMPLETE] = version

    def write_inside(self, step: int) -> None:
        """The same, when a step begins, and -1 when it is finished."""
        self._signed[_INSIDE] = step

    def write_copies(self, figures: CopyFigures) -> None:
        """The same, after each version that was copied."""
        for word, value in zip(_COPIES, (figures.state, figures.copied, figures.sent, figures.holders), strict=True):
            self._signed[word] = value

    def read_copies(self) -> CopyFigures:
        state, copied, sent, holders = (self._signed[word] for word in _COPIES)
        return CopyFigures(state=state, copied=copied, sent=sent, holders=holders)

    # --- where it is among the others: written by the script's thread alone ---

    def write_typical(self, seconds: float) -> None:
        self._real[_TYPICAL] = seconds

    def write_allowed(self, seconds: float) -> None:
        self._real[_ALLOWED] = seconds

    def write_pace(self, figures: PaceFigures) -> None:
        self._signed[_ROLE] = figures.role
        self._real[_COMPUTE] = figures.compute

    def read_pace(self) -> PaceFigures:
        return PaceFigures(compute=self._real[_COMPUTE], role=self._signed[_ROLE])

    def write_waiting(self, key: int, count: int) -> None:
        self._signed[_WAIT_COUNT] = count
        self._signed[_WAIT_KEY] = key

    def place_of(self, number: int, key: int) -> int:
        """Give the key the place with this number in the table. Returns what `count` wants to have; 0: the table is full."""
        if number >= len(_TABLE):
            return 0
        place = _TABLE[number]
        self._signed[place + 1] = 0
        self._signed[place] = key
        return place + 1

    def count(self, place: int) -> int:
        """An operation has begun. Returns its number in its group, from 1."""
        signed = self._signed
        signed[_OPERATIONS] += 1
        signed[place] = count = signed[place] + 1
        return count

    def begin_anew(self) -> None:
        """All groups have new communicators: everybody counts from 0 again."""
        for place in _TABLE:
            self._signed[place + 1] = 0
        self.write_waiting(0, 0)
        self._real[_COMPUTE] = 0.0

    def read_position(self) -> Position:
        signed, real = self._signed, self._real
        waits_for = (signed[_WAIT_KEY], signed[_WAIT_COUNT])
        return Position(
            operations=signed[_OPERATIONS], waits_for=waits_for, typical=real[_TYPICAL], allowed=real[_ALLOWED]
        )

    def read_counts(self) -> dict[int, int]:
        """By key, how many operations were begun."""
        return {key: self._signed[place + 1] for place in _TABLE if (key := self._signed[place])}

    def read(self) -> Progress:
        progress = Progress()
        for _ in range(_READ_TRIES):
            before = self._signed[_SEQUENCE]
            progress = Progress(
                step=self._signed[_STEP],
                phase=self._signed[_PHASE],
                loss=self._real[_LOSS],
                tokens=self._signed[_TOKENS],
                reports=before // 2,
                complete=self._signed[_COMPLETE],
                inside=self._signed[_INSIDE],
            )
            if before % 2 == 0 and before == self._signed[_SEQUENCE]:
                break
        return progress

    def close(self) -> None:
        self._signed.release()
        self._real.release()
        self._mapping.close()

    def _write(self, progress: Progress) -> None:
        self._signed[_STEP] = progress.step
        self._signed[_PHASE] = progress.phase
        self._real[_LOSS] = progress.loss
        self._signed[_TOKENS] = progress.tokens
