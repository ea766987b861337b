"""The startup record: what a rank received from the others until its first step, so that a replacement can start alone.

A replacement runs the script from its first line while the others stand in the middle of training. Whatever it would have
received in between is read from here. Parameters need not be in it, they are restored; so large outputs are left out.
"""

from __future__ import annotations

from typing import Final

import msgspec

LARGEST: Final = 1 << 20  # bytes of one call's outputs that are recorded
_FORMAT: Final = 1


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One operation of a group.

    Attributes:
        operation: ProcessGroup's name for it.
        signature: types and shapes of its outputs, and its plain numbers (source, tag).
        site: file and line of the script.
        outputs: the bytes of each output tensor; None when they were not recorded.
        source: the group rank that a receive came from.
        restored: the outputs are parameters and buffers of a module, which TrainState restores.
    """

    operation: str
    signature: str
    site: str
    outputs: tuple[bytes, ...] | None
    source: int = 0
    restored: bool = False

    def __str__(self) -> str:
        return f"{self.operation} of {self.signature} at {self.site}"


class StartupRecord(msgspec.Struct, frozen=True):
    """Of one rank; belongs to its private bundle and never changes after its second step.

    Attributes:
        calls: per group, what it received until the first step's entry, in order.
        first_step: per group, what it received in the first step that is no floating-point number: sizes, shapes, objects.
        first_step_differs: operations were in the first step that the second one did not have (pipelining exchanges
            shapes there), or no second step was seen. A replacement then runs the step once by itself, to be aborted.
        final: nothing will be added.
    """

    calls: dict[str, tuple[Call, ...]]
    first_step: dict[str, tuple[Call, ...]]
    first_step_differs: bool
    final: bool = False
    format: int = _FORMAT

    @property
    def unreplayable(self) -> tuple[str, ...]:
        """Calls whose outputs are missing here, and may be missing in TrainState too; each with its place in the script."""
        return tuple(
            f"{call}, group {group}"
            for group, calls in self.calls.items()
            for call in calls
            if call.outputs is None and not call.restored
        )

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> StartupRecord:
        """Raises ValueError for what is no record, or one of another format."""
        record = msgspec.msgpack.decode(data, type=cls)  # its error is a ValueError
        if record.format != _FORMAT:
            raise ValueError(f"a startup record of format {record.format}, not {_FORMAT}")
        return record
