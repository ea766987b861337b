"""Files that workers' output goes to: made at the first byte, rotated at a size, unharmed by a full disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

RETRY_SECONDS: Final = 5.0  # between two attempts to write again, and between two looks whether a file was deleted


class Disk:
    """One folder's health, shared by all files in it: says once that it cannot be written, once that it can again."""

    def __init__(self, folder: Path, remark: Callable[[str], None]) -> None:
        self.folder = folder
        self._remark = remark
        self._retry_at: float | None = None  # None: all is well

    def usable(self, now: float) -> bool:
        """Whether a write is worth trying: always, except for some seconds after a failed one."""
        return self._retry_at is None or now >= self._retry_at

    def failed(self, error: OSError, now: float) -> None:
        if self._retry_at is None:
            self._remark(
                f"logs in {self.folder} cannot be written ({error.strerror or error}); the job goes on, "
                "what its workers write is not kept there until it is possible again"
            )
        self._retry_at = now + RETRY_SECONDS

    def worked(self) -> None:
        if self._retry_at is not None:
            self._retry_at = None
            self._remark(f"logs in {self.folder} are written again")


class LogFile:
    """One file. Writing never raises: what cannot be written is counted, and the gap noted when writing works again."""

    def __init__(self, path: Path, disk: Disk, size_limit: int = 0) -> None:
        """`size_limit` in bytes: beyond it the file becomes `NAME.1` (which is replaced); 0: no limit."""
        self.path = path
        self._disk = disk
        self._limit = size_limit
        self._fd = -1
        self._size = 0
        self._ends_in_line = False  # the last byte written is no newline
        self._lost = 0
        self._look_at = 0.0

    def create(self, now: float) -> None:
        """Make the file now, although there is nothing to write yet."""
        self.write(b"", now)

    def write(self, data: bytes, now: float) -> None:
        if not self._disk.usable(now):
            self._lost += len(data)
            return
        try:
            self._open(now)
            if self._lost:
                self._note_gap()
            if self._limit and self._size + len(data) > self._limit:
                data = self._rotate(data)
            self._append(data)
        except OSError as error:
            self._lost += len(data)
            self.close()
            self._disk.failed(error, now)
        else:
            self._disk.worked()

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # NFS reports a full disk here; the bytes are gone either way
                os.close(self._fd)
            self._fd = -1

    def _open(self, now: float) -> None:
        if self._fd >= 0 and now >= self._look_at:
            self._look_at = now + RETRY_SECONDS
            if os.fstat(self._fd).st_nlink == 0:
                self.close()  # somebody deleted it: begin a new one instead of writing into nothing
        if self._fd >= 0:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._fd = os.open(self.path, flags, 0o666)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, flags, 0o666)
        self._look_at = now + RETRY_SECONDS
        self._size = os.fstat(self._fd).st_size
        self._ends_in_line = False
        if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
            self._append(b"\n")  # an earlier process ended in the middle of a line

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._size += written
            self._ends_in_line = view[written - 1] != 0x0A
            view = view[written:]

    def _note_gap(self) -> None:
        start = "\n" if self._ends_in_line else ""
        self._append(f"{start}[phoenix-run: up to {self._lost} bytes could not be written here]\n".encode())
        self._lost = 0

    def _rotate(self, data: bytes) -> bytes:
        """Begin a new file, after the line that is being written; returns what belongs into the new one."""
        if self._ends_in_line:
            end = data.find(b"\n") + 1
            if not end and self._size < 2 * self._limit:
                return data
            self._append(data[:end])
            data = data[end:]
        if not self._size or not data:
            return data
        self.close()
        os.replace(self.path, self.path.with_name(self.path.name + ".1"))
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._size = 0
        return data
