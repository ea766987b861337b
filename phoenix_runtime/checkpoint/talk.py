"""What the ranks say to each other about one checkpoint: bytes to rank 0 and back, in a group of our own."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from phoenix_runtime.communicators.gate import Gate, StepAborted


class LeftError(Exception):
    """A process of the job failed meanwhile: nobody knows what the others have heard."""


class Talk:
    """All ranks make the same calls. It ends with the communicators: what began before a swap is not continued after it.

    `leave` is for the thread that brings notices; between the last look and the beginning of an operation it has to wait, so
    that nothing of this is said into communicators that belong to a later generation.
    """

    def __init__(self, gate: Gate, group: dist.ProcessGroup | None, rank: int, world: int) -> None:
        """`group`: None in a world of one."""
        self._gate, self._group, self._rank, self._world = gate, group, rank, world
        self._epoch = gate.epoch
        self._lock = threading.Lock()
        self._left = False

    @property
    def over(self) -> bool:
        return self._left or self._gate.closed or self._gate.epoch != self._epoch

    def leave(self) -> None:
        """Returns at once. Any thread."""
        with self._lock:
            self._left = True

    def check(self) -> None:
        if self.over:
            raise LeftError

    def gather(self, data: bytes) -> list[bytes]:
        """What each rank gave, at rank 0; nothing elsewhere. Raises LeftError."""
        self.check()
        if self._group is None:
            return [data]
        sizes = self._all_sizes(len(data))
        longest = max(sizes)
        mine = _padded(data, longest)
        outputs = [torch.empty(longest, dtype=torch.uint8) for _ in sizes] if self._rank == 0 else []
        group = self._group
        options = dist.GatherOptions()
        options.rootRank = 0
        self._carry(lambda: group.gather([outputs] if outputs else [], [mine], options))
        return [ctypes.string_at(output.data_ptr(), size) for output, size in zip(outputs, sizes, strict=False)]

    def scatter(self, items: Sequence[bytes]) -> bytes:
        """The one of rank 0's items that is for this rank; other ranks' are not looked at. Raises LeftError."""
        self.check()
        if self._group is None:
            return items[0]
        group = self._group
        sizes = torch.tensor([len(item) for item in items] if self._rank == 0 else [0] * self._world)
        told = dist.BroadcastOptions()
        told.rootRank = 0
        self._carry(lambda: group.broadcast([sizes], told))
        longest = int(sizes.max())
        output = torch.empty(longest, dtype=torch.uint8)
        inputs = [[_padded(item, longest) for item in items]] if self._rank == 0 else []
        options = dist.ScatterOptions()
        options.rootRank = 0
        self._carry(lambda: group.scatter([output], inputs, options))
        return ctypes.string_at(output.data_ptr(), int(sizes[self._rank]))

    def _all_sizes(self, size: int) -> list[int]:
        assert self._group is not None
        group = self._group
        sizes = torch.zeros(self._world, dtype=torch.int64)
        sizes[self._rank] = size
        self._carry(lambda: group.allreduce([sizes], dist.AllreduceOptions()))
        return [int(item) for item in sizes]

    def _carry(self, begin: Callable[[], dist.Work]) -> None:
        try:
            with self._lock:
                self.check()
                work = begin()
            work.wait()
        except (Exception, StepAborted) as error:  # a process has gone, and soon all will be told
            raise LeftError from error
        self.check()


def _padded(data: bytes, size: int) -> torch.Tensor:
    tensor = torch.zeros(size, dtype=torch.uint8)
    ctypes.memmove(tensor.data_ptr(), data, len(data))
    return tensor
