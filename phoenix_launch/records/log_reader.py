"""Reads the log files of a node, in order or as they grow; on other hosts `phoenix-run logs` runs it by `python -m`."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from phoenix_launch.records.folders import jobs_root

STDOUT: Final = 1
STDERR: Final = 2
POLL_SECONDS: Final = 0.1
_READ_BYTES: Final = 1 << 20
_NAME: Final = re.compile(r"(?:(\d+)\.(?:t(\d+))?g(\d+)|spare-(\d+))\.(out|err)(\.1)?")
_OLDER: Final = ".1"  # what a file is called after it was rotated


@dataclass(frozen=True, slots=True)
class LogName:
    """What the name of a log file says: `3.g2.out` is rank 3 in generation 2, `spare-4711.err` an unused process."""

    text: str
    label: str  # the rank, or spare-PID
    order: tuple[int, int, int, int, int]  # generation, rank, stream, older file first
    stream: int

    @property
    def rank(self) -> str:
        """Empty for a spare."""
        return self.label if self.label.isdecimal() else ""


def parse_name(text: str) -> LogName | None:
    """None for a file that is no log of a worker or spare."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    rank, term, n, pid, suffix, older = found.groups()
    stream = STDOUT if suffix == "out" else STDERR
    generation = (int(term or 1), int(n)) if n else (0, 0)
    order = (*generation, int(rank or pid), stream, 0 if older else 1)
    return LogName(text, rank or f"spare-{pid}", order, stream)


def log_names(folder: Path, rank: str = "") -> list[LogName]:
    """The logs in a folder, oldest generation first; of one rank when it is given."""
    try:
        found = [parse_name(name) for name in os.listdir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []  # nothing was written yet
    return sorted((name for name in found if name and (not rank or name.rank == rank)), key=lambda name: name.order)


def read_once(folder: Path, rank: str = "") -> Iterator[tuple[LogName, bytes]]:
    """Every line that is there, in the order of `log_names`, each with its newline."""
    for name in log_names(folder, rank):
        try:
            with open(folder / name.text, "rb") as file:
                for line in file:
                    yield name, line if line.endswith(b"\n") else line + b"\n"
        except FileNotFoundError:
            continue  # rotated away in this moment


class Follower:
    """Hands out the whole lines that were added since it was last asked, from all logs of a folder."""

    def __init__(self, folder: Path, rank: str = "") -> None:
        self._folder = folder
        self._rank = rank
        self._growing: dict[str, _GrowingFile] = {}

    def poll(self) -> Iterator[tuple[LogName, bytes]]:
        for name in log_names(self._folder, self._rank):
            if name.text.endswith(_OLDER):
                continue  # its reader has it open, or takes it first
            growing = self._growing.get(name.text)
            if growing is None:
                growing = self._growing[name.text] = _GrowingFile(self._folder / name.text)
            for line in growing.read():
                yield name, line

    def finish(self) -> Iterator[tuple[LogName, bytes]]:
        """The last lines, also one without a newline; closes all files."""
        yield from self.poll()
        for text, growing in self._growing.items():
            name = parse_name(text)
            if name and (rest := growing.close()):
                yield name, rest + b"\n"
        self._growing.clear()


class _GrowingFile:
    """One file that somebody else appends to and may rotate, always between two lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest = b""
        older = path.with_name(path.name + _OLDER)
        self._file = _opened(older) or _opened(path)

    def read(self) -> Iterator[bytes]:
        while self._file is not None:
            while data := self._file.read(_READ_BYTES):
                *lines, self._rest = (self._rest + data).split(b"\n")
                yield from (line + b"\n" for line in lines)
            fresh = _opened(self._path)
            if fresh is None or os.path.sameopenfile(fresh.fileno(), self._file.fileno()):
                if fresh is not None:
                    fresh.close()
                return
            self._rest += self._file.read()  # what was written between the last look and the rotation
            self._file.close()
            self._file = fresh

    def close(self) -> bytes:
        if self._file is not None:
            self._file.close()
        return self._rest


def _opened(path: Path) -> BinaryIO | None:
    try:
        return open(path, "rb", buffering=0)
    except FileNotFoundError:
        return None


def main(folder: str, rank: str, mode: str) -> int:
    """Write `NAME LINE` for each line; in the mode "follow" until stdin closes, which also the death of ssh does."""
    place = jobs_root(os.environ) / folder  # an absolute one stays what it is
    try:
        if mode != "follow":
            _put(read_once(place, rank))
            return 0
        follower = Follower(place, rank)
        while not select.select([sys.stdin], [], [], POLL_SECONDS)[0]:
            _put(follower.poll())
        _put(follower.finish())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody listens any more; nor does the interpreter's last flush
    return 0


def _put(lines: Iterator[tuple[LogName, bytes]]) -> None:
    for name, line in lines:
        sys.stdout.buffer.write(name.text.encode() + b" " + line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
