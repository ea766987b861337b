"""Turns the bytes a worker writes into whole console lines: cutting, progress bars, prefixes and filters; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

CHUNK_BYTES: Final = 64 << 10  # the most that travels in one message
MAX_LINE_BYTES: Final = CHUNK_BYTES - 1  # a longer line is cut, and every piece ends with a newline
PROGRESS_INTERVAL: Final = 1.0  # seconds between two shown states of a progress bar
PROGRESS_SETTLE: Final = 0.05  # so that the two halves of a "\r\n" may arrive in two reads


class LineAssembler:
    """Collects one stream's bytes and hands out whole lines, each with its newline, in order.

    A segment that ends with a carriage return is a state of a progress bar: shown as a line of its own at most once a
    second, the latest wins. What stands before the newline is always shown. `\\r\\n` is a newline.
    """

    def __init__(self) -> None:
        self._rest = bytearray()  # since the last newline or carriage return
        self._progress = False  # this line has had a carriage return
        self._pending = b""  # the newest finished segment that was not shown
        self._shown_at = -PROGRESS_INTERVAL
        self.due: float | None = None  # when `tick` has a segment to show

    def feed(self, data: bytes, now: float) -> bytes:
        """The lines that `data` completed. `now` is a monotonic time in seconds."""
        if not self._progress:
            if b"\r" in data:
                data = data.replace(b"\r\n", b"\n")
            if b"\r" not in data:
                return self._plain(data)
        out = bytearray()
        *whole, unfinished = data.split(b"\n")
        for line in whole:
            self._segments(line, now)
            out += self._newline()
        self._segments(unfinished, now)
        out += self._overlong()
        out += self.tick(now)
        return bytes(out)

    def tick(self, now: float) -> bytes:
        """The state of a progress bar that has waited long enough."""
        if self.due is None or now < self.due:
            return b""
        shown, self._pending, self.due, self._shown_at = self._pending + b"\n", b"", None, now
        return shown

    def finish(self) -> bytes:
        """What is left at the end of the stream, completed with a newline."""
        return self._newline() if self._rest or self._pending else b""

    def _plain(self, data: bytes) -> bytes:
        end = data.rfind(b"\n") + 1
        if not end:
            self._rest += data
            return self._overlong()
        lines = bytes(self._rest) + data[:end]
        self._rest = bytearray(data[end:])
        return lines

    def _segments(self, line: bytes, now: float) -> None:
        *finished, last = line.split(b"\r")
        for segment in finished:
            self._progress = True
            text = bytes(self._rest) + segment
            self._rest.clear()
            if text:
                self._pending = text
        self._rest += last
        if self._pending and self.due is None:
            self.due = max(now + PROGRESS_SETTLE, self._shown_at + PROGRESS_INTERVAL)

    def _newline(self) -> bytes:
        text = bytes(self._rest) or self._pending
        already_shown = self._progress and not text
        self._rest.clear()
        self._progress, self._pending, self.due = False, b"", None
        return b"" if already_shown else text + b"\n"

    def _overlong(self) -> bytes:
        out = bytearray()
        while len(self._rest) > MAX_LINE_BYTES:
            end = utf8_boundary(self._rest, MAX_LINE_BYTES)
            out += self._rest[:end] + b"\n"
            del self._rest[:end]
        return bytes(out)


def utf8_boundary(data: bytes | bytearray, at: int) -> int:
    """The nearest place at or up to 3 bytes before `at` where no character is cut in two; `at` if there is none."""
    for place in range(at, max(at - 4, 0), -1):
        if place >= len(data) or data[place] & 0xC0 != 0x80:
            return place
    return at


def chunks(lines: bytes) -> Iterator[bytes]:
    """Split whole lines into pieces of at most CHUNK_BYTES that are whole lines again; a longer line is cut."""
    start = 0
    while len(lines) - start > CHUNK_BYTES:
        end = lines.rfind(b"\n", start, start + CHUNK_BYTES) + 1
        if end:
            yield lines[start:end]
        else:
            end = utf8_boundary(lines, start + MAX_LINE_BYTES)
            yield lines[start:end] + b"\n"
        start = end
    if start < len(lines):
        yield lines[start:]


def prefixed(lines: bytes, prefix: bytes) -> bytes:
    """`prefix` before each of the whole lines."""
    if not prefix or not lines:
        return lines
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + lines[-1:]


def matching(lines: bytes, needles: Sequence[bytes]) -> bytes:
    """Those of the whole lines that contain any of the needles."""
    if not any(needle in lines for needle in needles):
        return b""
    return b"".join(line for line in lines.splitlines(keepends=True) if any(needle in line for needle in needles))


def last_lines(tail: bytes, limit: int) -> str:
    """The last lines of `tail` that fit into `limit` bytes, as text; a single longer line loses its beginning."""
    if len(tail) > limit:
        cut = tail[-limit:]
        newline = cut.find(b"\n", 0, -1)
        tail = cut[newline + 1 :] if newline >= 0 else cut
    return tail.decode("utf-8", errors="replace")
