"""A copy that another node keeps, on its way through this node's server to a worker: a pipe, and nothing is kept of it.

A slot would cost more than the transfer, its pages above all, and is of no use to a rank that has the tensors. The server hands
the pipe to the worker and passes on what comes: table and extras, then the data, which the kernel moves without a copy in the
server, unless it has to be deciphered. What the table must be the other server has said before, in a frame that nobody can
forge; whether all came as it was sent is known after the last byte. So the worker may store the data where it belongs
meanwhile, and use nothing before the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import select
from collections.abc import Callable
from typing import Final

from phoenix_launch.checkpoint.header import PAGE_BYTES, Extent
from phoenix_launch.checkpoint.layout import Layout, Tensor, table_digest
from phoenix_launch.checkpoint.pairs import SlotRefusedError
from phoenix_launch.errors import PhoenixError
from phoenix_launch.local_messages import SlotStream, SlotStreamed

_PIPE_BYTES: Final = 1 << 20  # what a process may have without privileges
_BUFFER_BYTES: Final = 64 << 10  # for what is read in small parts; more is read straight to where it belongs
_SKIP_BYTES: Final = 1 << 20
_NOT_TAKEN: Final = "the worker does not take the copy"


class StreamWriter:
    """The server's end, until `close`. `patience`: seconds in which the worker has to make room for something."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.far, self._near = os.pipe2(os.O_CLOEXEC)  # `far` is handed to the worker, then given up
        os.set_blocking(self._near, False)
        with contextlib.suppress(OSError):  # the user's other processes have taken what all may: then it is slower
            fcntl.fcntl(self._near, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def handed_over(self) -> None:
        far, self.far = self.far, -1
        if far >= 0:
            os.close(far)

    def write(self, data: memoryview) -> None:
        """Raises OSError: TimeoutError when the worker stands still, BrokenPipeError when it has given up."""
        while data:
            try:
                data = data[os.write(self._near, data) :]
            except BlockingIOError:
                _await(self._near, select.POLLOUT, self._patience, _NOT_TAKEN)

    def take(self, descriptor: int, count: int) -> int:
        """Move what has come on a socket, at most so many bytes, within the kernel: how many. 0: nothing will come any more.

        Raises as `write` does.
        """
        while True:
            try:
                return os.splice(descriptor, self._near, count, flags=os.SPLICE_F_NONBLOCK)
            except BlockingIOError:  # it is full: who calls has seen that something has come
                _await(self._near, select.POLLOUT, self._patience, _NOT_TAKEN)

    def until_taken(self) -> None:
        """Until the worker has read all, or has gone. What was moved here may have been the sender's own memory. Raises
        TimeoutError."""
        _await(self._near, 0, self._patience, _NOT_TAKEN)

    def close(self) -> None:
        """The worker finds the end of the stream here."""
        self.handed_over()
        near, self._near = self._near, -1
        if near >= 0:
            os.close(near)


class StreamReader:
    """The worker's end: `layout`, then the data by `fill`, in order; after `end` the extras. All may raise OSError.

    `data_sum`, `data_crc`: as in the label of a slot; the second is known after `end`, where there is no first.
    """

    def __init__(
        self, descriptor: int, said: SlotStream, seconds: float, last_word: Callable[[], SlotStreamed]
    ) -> None:
        """The descriptor belongs to this object from here on. `seconds`: of patience for anything to come; `last_word`: waits
        for what the server says after the stream. Raises SlotRefusedError when what comes is not what was offered."""
        extent = Extent(said.table, said.extras, said.data)
        self.data_sum, self.data_crc = said.data_sum, -1
        self.size = self._left = extent.data
        self._bundle, self._last_word = said.bundle, last_word
        self._source = io.BufferedReader(_Pipe(descriptor, seconds), _BUFFER_BYTES)
        self._heard = False
        try:
            self._head = memoryview(bytearray(extent.data_offset - PAGE_BYTES))
            self._read(self._head)
            self.layout = self._layout(self._head[: extent.table], said.layout)
            self._advance(0)
        except BaseException:
            self.close()
            raise
        start = extent.extras_offset - PAGE_BYTES
        self._extras = self._head[start : start + extent.extras]

    @property
    def extras(self) -> memoryview:
        """Only after `end`."""
        assert self._heard, "nobody knows yet whether they are what was sent"
        return self._extras

    def fill(self, memory: memoryview) -> None:
        """With the data that comes next. Raises SlotRefusedError when no more of it comes."""
        self._read(memory)
        self._advance(len(memory))

    def skip(self) -> None:
        """What is left of the data, for whom the extras are enough; then `end`."""
        scratch = memoryview(bytearray(min(_SKIP_BYTES, self._left)))
        while self._left:
            self.fill(scratch[: self._left])
        self.end()

    def end(self) -> None:
        """When all data is there: raises SlotRefusedError when the servers say that this is not the copy that was sent."""
        said = self._hear()
        if hashlib.blake2b(self._head).digest() != said.head:
            raise self._damaged()
        self.data_crc = said.data_crc

    def close(self) -> None:
        """Gives up what has not come. The server's last word is heard, so that it is not taken for that on another copy."""
        self._source.close()
        if not self._heard:
            with contextlib.suppress(OSError, PhoenixError):
                self._hear()

    def _advance(self, count: int) -> None:
        self._left -= count
        if not self._left:
            self._source.close()  # with that the server knows that it has nothing of it any more

    def _read(self, memory: memoryview) -> None:
        if memory and self._source.readinto(memory) < len(memory):
            self._hear()
            raise SlotRefusedError(f"the copy of bundle {self._bundle!r} ended in the middle")

    def _hear(self) -> SlotStreamed:
        self._heard = True
        return self._last_word()

    def _layout(self, table: memoryview, digest: str) -> Layout:
        try:
            layout = Layout.decode(table)
        except ValueError:
            raise self._damaged() from None
        if table_digest(table) != digest or layout.size != self.size:
            raise self._damaged()
        return layout

    def _damaged(self) -> SlotRefusedError:
        return SlotRefusedError(f"a copy of bundle {self._bundle!r} was changed on its way")


class HeldCopy:
    """A small copy that has come as a whole, read as `SlotReader` is."""

    def __init__(self, layout: Layout, extras: memoryview, data: memoryview) -> None:
        self.layout, self.extras, self.data = layout, extras, data

    def tensor(self, row: Tensor) -> memoryview:
        return self.data[row.offset : row.offset + row.size]


class _Pipe(io.RawIOBase):
    def __init__(self, descriptor: int, seconds: float) -> None:
        self._descriptor, self._seconds = descriptor, seconds
        os.set_blocking(descriptor, False)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while True:
            try:
                return os.readv(self._descriptor, [buffer])
            except BlockingIOError:
                _await(self._descriptor, select.POLLIN, self._seconds, "the node's checkpoint server does not go on")

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def _await(descriptor: int, event: int, seconds: float, late: str) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(seconds * 1000):
        raise TimeoutError(late)
