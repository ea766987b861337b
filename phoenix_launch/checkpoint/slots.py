"""Slots as memory: made and owned by the checkpoint server, mapped and filled by a worker, mapped and read by anybody."""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import weakref
import zlib
from typing import Final

import msgspec

from phoenix_launch.checkpoint import header
from phoenix_launch.checkpoint.header import PAGE_BYTES, Header, Label
from phoenix_launch.checkpoint.layout import Layout, Tensor, aligned
from phoenix_launch.copies import Stamp

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; the mmap module of Python 3.11 does not name it
_POPULATE_BYTES: Final = 16 << 20  # at a time: madvise holds the interpreter's lock, and a thread waits for it
_HUGE_PAGE_BYTES: Final = 2 << 20
_LARGE_BYTES: Final = 64 << 20  # whole huge pages from here on: what they waste is little then
_GRAIN_BYTES: Final = 64 << 10  # of small slots: extras that grow a little still fit
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_serials = itertools.count(1)


def memory_size(size: int) -> int:
    """Bytes of memory that a copy of `size` bytes takes."""
    return aligned(size, _HUGE_PAGE_BYTES if size >= _LARGE_BYTES else _GRAIN_BYTES)


def populate(mapping: mmap.mmap) -> None:
    """Fault all pages in, huge ones where the system allows it. Raises OSError (ENOMEM) when there are not enough."""
    if len(mapping) >= _HUGE_PAGE_BYTES:
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without them
    for start in range(0, len(mapping), _POPULATE_BYTES):
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATE_BYTES, len(mapping) - start))
        except OSError as error:
            if error.errno == errno.EINVAL:
                return  # an older kernel: pages come when they are first written to
            raise


class SlotMemory:
    """A memfd in its server. Its size is fixed for its life, so that no access to it can raise SIGBUS.

    It is closed when nobody refers to this object any more: a thread that still sends from it, or receives into it, never
    finds another file under its descriptor. `serial` tells a worker whether it has mapped this one already.
    """

    def __init__(self, size: int) -> None:
        """Room for a copy of `size` bytes, all pages present. Raises OSError."""
        self.size = memory_size(size)
        self.serial = next(_serials)
        self.descriptor = os.memfd_create("phoenix-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, self.size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        mapping = mmap.mmap(self.descriptor, self.size)
        populate(mapping)
        self.view = memoryview(mapping)

    def header(self) -> Header | None:
        return header.read(self.view)

    def read_only(self) -> int:
        """A descriptor through which nobody can write, the caller's to close."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class SlotWriter:
    """The worker's end of a slot that its server told it to fill: `begin`, store the tensors, `seal`."""

    def __init__(self, descriptor: int) -> None:
        """Map the memory behind the descriptor, which stays the caller's. Raises OSError."""
        self.size = os.fstat(descriptor).st_size
        self._mapping = mmap.mmap(descriptor, self.size)
        populate(self._mapping)
        self._view = memoryview(self._mapping)
        self._begun: tuple[Label, header.Extent] | None = None

    def begin(self, job: str, bundle: str, stamp: Stamp, layout: Layout, extras: bytes = b"") -> memoryview:
        """Void what the slot held. Returns its data, in which each tensor has its place by the layout.

        Raises ValueError when the copy does not fit.
        """
        label = Label(job, bundle, stamp, layout.digest)
        extent = header.write(self._view, label, layout.table, extras, layout.size)
        self._begun = (label, extent)
        return self._view[extent.data_offset : extent.total]

    def join(self, layout: Layout) -> memoryview:
        """The data of a copy without extras that another worker begins and the server seals: this one fills a slice of it."""
        extent = header.Extent(len(layout.table), 0, layout.size)
        return self._view[extent.data_offset : extent.total]

    def seal(self, data_sum: str = "") -> None:
        """Every store to the data has ended before this is called (a device's copies are waited for).

        `data_sum`: its checksum, for whoever loads it on another node.
        """
        if data_sum and self._begun is not None:
            label, extent = self._begun
            header.relabel(self._view, msgspec.structs.replace(label, data_sum=data_sum), extent)
        header.seal(self._view)

    def close(self) -> None:
        _release(self._view, self._mapping)


class SlotReader:
    """A sealed copy, mapped so that it cannot be written to through this."""

    def __init__(self, mapping: mmap.mmap, found: Header, layout: Layout) -> None:
        self._mapping = mapping
        self._view = memoryview(mapping)
        self.label = found.label
        self.layout = layout
        extent = found.extent
        self.data = self._view[extent.data_offset : extent.total]
        self.extras = self._view[extent.extras_offset : extent.extras_offset + extent.extras]

    @classmethod
    def attach(cls, descriptor: int, job: str, bundle: str, stamp: Stamp) -> SlotReader | None:
        """None unless the slot behind the descriptor is exactly this copy, and whole. Raises OSError."""
        size = os.fstat(descriptor).st_size
        if size < PAGE_BYTES:
            return None
        mapping = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        with memoryview(mapping) as view:
            found = header.read(view)
            layout = None
            if found is not None and (found.label.job, found.label.bundle, found.label.stamp) == (job, bundle, stamp):
                layout = _layout(view, found)
        if found is None or layout is None:
            mapping.close()
            return None
        return cls(mapping, found, layout)

    def tensor(self, row: Tensor) -> memoryview:
        """The bytes of one tensor, in place."""
        return self.data[row.offset : row.offset + row.size]

    def still_sealed(self) -> bool:
        """Asked after the tensors were taken: whether nobody has begun to overwrite them meanwhile."""
        found = header.read(self._view)
        return found is not None and found.label == self.label

    def intact(self) -> bool:
        """Whether the data is what its checksum says. Of a slot that never left its memory nobody has computed one."""
        return self.label.data_crc < 0 or self.checksum() == self.label.data_crc

    def checksum(self) -> int:
        """CRC-32 of the data."""
        return zlib.crc32(self.data)

    def close(self) -> None:
        self.extras.release()
        self.data.release()
        _release(self._view, self._mapping)


def slot_size(layout: Layout, extras: int) -> int:
    """Bytes of memory for a copy with that many bytes of extras."""
    return header.Extent(len(layout.table), extras, layout.size).total


def _layout(view: memoryview, found: Header) -> Layout | None:
    try:
        layout = Layout.decode(view[PAGE_BYTES : PAGE_BYTES + found.extent.table])
    except ValueError:
        return None
    return layout if layout.size == found.extent.data else None


def _release(view: memoryview, mapping: mmap.mmap) -> None:
    """Unmap it, or leave that to the last one who still holds a part of it (a tensor made from it, say)."""
    try:
        view.release()
        mapping.close()
    except BufferError:
        pass
