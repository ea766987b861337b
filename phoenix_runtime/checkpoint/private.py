"""The private bundle of a rank as a copy: its tensors lie in the slot's data, everything else is a pickle in its extras.

It is read by processes of the same job alone: slots are in memory that only the job's own servers hand out.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import msgspec
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from phoenix_launch.checkpoint.slots import SlotReader
from phoenix_launch.checkpoint.streams import HeldCopy, StreamReader
from phoenix_runtime.checkpoint.memory import loaded
from phoenix_runtime.errors import ScriptError
from phoenix_runtime.state import Captured, TrainState

_FORMAT: Final = 2
_HINT: Final = "all processes of a job have to run the same phoenix-run"


@dataclass(frozen=True, slots=True)
class Private:
    """What only this rank has, as it was at a step's entry.

    Attributes:
        captured: of TrainState.
        step: completed steps.
        startup: the startup record, as bytes.
        more: anything else that a replacement needs, by name; values that can be pickled.
        withdrawn: tensors that this rank has for itself though structure says otherwise (`bundles.withdraw`).
    """

    captured: Captured
    step: int
    startup: bytes = b""
    more: dict[str, Any] = field(default_factory=dict)
    withdrawn: tuple[str, ...] = ()


def encoded(private: Private) -> tuple[list[tuple[str, Tensor]], bytes]:
    """Its tensors by name, and the rest. Raises ScriptError for what cannot be pickled."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump((private.captured, private.more))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ScriptError(
            f"the training state cannot be copied for another process: {error}",
            hint="what TrainState(...) and param_groups refer to has to be picklable: no lambdas, no local classes",
        ) from error
    extras = _Extras(private.step, private.startup, stream.getvalue(), private.withdrawn)
    return pickler.tensors, msgspec.msgpack.encode(extras)


def startup_of(copy: SlotReader | StreamReader) -> bytes:
    """The startup record alone, for a process that has built nothing yet. Raises ScriptError, and as reading does."""
    if isinstance(copy, StreamReader):
        copy.skip()
    return _extras(copy.extras).startup


def decoded(reader: SlotReader | HeldCopy, state: TrainState) -> Private:
    """Copies, nothing of it refers to the slot. `state` is the one it belongs to, in this process.

    Raises:
        ScriptError: it cannot be put together in this process.
    """
    extras = _extras(reader.extras)
    try:
        captured, more = _Unpickler(extras.rest, reader, state).load()
    except (pickle.UnpicklingError, AttributeError, ImportError, ValueError, TypeError) as error:
        raise ScriptError(
            f"the copy of the training state cannot be read in this process: {error}",
            hint="a replacement has to define the same classes, before the first step",
        ) from error
    return Private(captured, extras.step, extras.startup, more, extras.withdrawn)


class _Extras(msgspec.Struct, frozen=True, array_like=True):
    """What lies in a slot beside the tensors. `rest`: the pickle of all else."""

    step: int
    startup: bytes
    rest: bytes
    withdrawn: tuple[str, ...]
    format: int = _FORMAT


def _extras(data: memoryview) -> _Extras:
    try:
        found = msgspec.msgpack.decode(data, type=_Extras)
    except msgspec.MsgspecError as error:
        raise ScriptError(f"the copy of the training state cannot be read: {error}", hint=_HINT) from error
    if found.format != _FORMAT:
        raise ScriptError(f"the copy of the training state has format {found.format}, not {_FORMAT}", hint=_HINT)
    return found


class _Pickler(pickle.Pickler):
    """Puts tensors aside. What is kept of one: its number, its device's type, and of a DTensor where it lies."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.tensors: list[tuple[str, Tensor]] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return None
        placed = None
        part = item
        if isinstance(item, DTensor):
            placed = (_mesh_key(item.device_mesh), item.placements, tuple(item.shape), item.stride())
            part = item._local_tensor
        elif type(item) is not Tensor:
            return None  # another kind knows itself how it is pickled
        if part.layout != torch.strided or part.is_quantized:
            return None
        number = self._numbers.get(id(item))
        if number is None:
            number = self._numbers[id(item)] = len(self.tensors)
            self.tensors.append((str(number), part))
        return number, part.device.type, placed


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, reader: SlotReader | HeldCopy, state: TrainState) -> None:
        super().__init__(io.BytesIO(pickled))
        self._reader, self._state = reader, state
        self._rows = {row.name: row for row in reader.layout.tensors}
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, kept: Any) -> Tensor:
        number, device, placed = kept
        if number not in self._made:
            row = self._rows[str(number)]
            tensor = loaded(self._reader.tensor(row), row)
            if device != "cpu":  # this process's own one of that kind: its predecessor's may have had another number
                tensor = tensor.to(torch.accelerator.current_accelerator())
            if placed is not None:
                key, placements, shape, stride = placed
                tensor = DTensor.from_local(
                    tensor, self._mesh(key), placements, run_check=False, shape=torch.Size(shape), stride=stride
                )
            self._made[number] = tensor
        return self._made[number]

    def _mesh(self, key: Any) -> DeviceMesh:
        """This process's own mesh of those ranks."""
        for _, tensor in chain(self._state.parameters(), self._state.buffers()):
            if isinstance(tensor, DTensor) and _mesh_key(tensor.device_mesh) == key:
                return tensor.device_mesh
        raise ValueError(f"nothing in the training state lies on a device mesh of ranks {key[0]}")


def _mesh_key(mesh: DeviceMesh) -> Any:
    return mesh.mesh.tolist(), mesh.mesh_dim_names, mesh.device_type
