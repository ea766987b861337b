"""A rank's private bundle as a file: the bytes of a slot, so that it is sealed and read as one."""

from __future__ import annotations

import os
import zlib
from contextlib import closing
from pathlib import Path
from typing import Final

import torch

from phoenix_launch.checkpoint import header
from phoenix_launch.checkpoint.header import Label
from phoenix_launch.checkpoint.layout import Layout
from phoenix_launch.checkpoint.slots import SlotReader, slot_size
from phoenix_launch.copies import Stamp
from phoenix_runtime.checkpoint.bundles import private_bundle
from phoenix_runtime.checkpoint.memory import entry, local, view
from phoenix_runtime.checkpoint.private import Private, decoded, encoded
from phoenix_runtime.errors import ScriptError
from phoenix_runtime.state import TrainState

NAMES: Final = "names"  # beside the bundle: of all tensors of the rank, in the order in which its optimizers made them
_HINT: Final = "remove this checkpoint's folder: --resume then takes the one before it"


def write(path: Path, job: str, rank: int, stamp: Stamp, private: Private) -> None:
    """Down to the disk. Raises OSError, ScriptError.

    Not through a mapping: on a full disk that would end the process.
    """
    tensors, extras = encoded(private)
    layout = Layout.of(entry(name, tensor) for name, tensor in tensors)
    memory = memoryview(bytearray(slot_size(layout, len(extras))))
    label = Label(job, private_bundle(rank).key, stamp, layout.digest)
    extent = header.write(memory, label, layout.table, extras, layout.size)
    data = memory[extent.data_offset : extent.total]
    with torch.no_grad():
        for (_, tensor), row in zip(tensors, layout.tensors, strict=True):
            view(data, row).copy_(local(tensor))
    header.relabel(memory, Label(job, label.bundle, stamp, layout.digest, data_crc=zlib.crc32(data)), extent)
    header.seal(memory)
    with open(path, "wb") as file:
        file.write(memory)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, job: str, rank: int, stamp: Stamp, state: TrainState) -> Private:
    """Raises ScriptError when it is not what was written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            reader = SlotReader.attach(descriptor, job, private_bundle(rank).key, stamp)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ScriptError(f"{path} cannot be read: {error.strerror or error}", hint=_HINT) from error
    if reader is None or not reader.intact():
        if reader is not None:
            reader.close()
        raise ScriptError(f"{path} is damaged", hint=_HINT)
    with closing(reader):
        return decoded(reader, state)
