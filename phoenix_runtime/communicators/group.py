"""A process group that stays the same object for ever while the communicators inside it are replaced.

What torch calls from C++ reaches the methods below as virtual functions (allgather, allreduce, the coalesced and single forms,
barrier, broadcast, reduce_scatter, send, recv, getRank, getSize, getBackendName), the others as Python attributes. One that
is not here meets a stand-in backend that refuses by name.
"""

# mypy: disable-error-code="override"
# Torch's stubs give most operations three forms of call; a virtual function is called by C++ in one.

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup, ReduceOp, Store, Work

from phoenix_runtime.communicators import stand_in
from phoenix_runtime.communicators.gate import Gate, StepAborted
from phoenix_runtime.communicators.inner import Devices, Identity
from phoenix_runtime.communicators.work import ElsewhereWork, FinishedWork, SlicedWork, SwappableWork

NAME = "phoenix"
_WITHOUT_SLICES: Final = frozenset(
    {"send", "recv", "recv_anysource", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"}
)
_Options = Any  # AllreduceOptions and its siblings: torch's stubs do not have all of them


class PhoenixGroup(ProcessGroup):
    """A group of ranks. `inner` carries what they say; `replace` gives it another one.

    Args:
        identity: which group this is.
        devices: which backend serves which device type.
        store: where the members of this group found each other.
        inner: the communicators.
        gate: whether operations go through; the same for all groups of a process.
        split: makes a group of some of these ranks; torch's `split_group` ends here.
    """

    def __init__(
        self,
        identity: Identity,
        devices: Devices,
        store: Store,
        inner: ProcessGroup,
        gate: Gate,
        split: Callable[[PhoenixGroup, list[int], timedelta | None, str], PhoenixGroup | None],
    ) -> None:
        super().__init__(identity.rank, identity.size)  # type: ignore[call-arg]  # with a store it is no subclass
        self.identity, self.devices, self.living = identity, devices, True
        self.scripts = True  # the script's own, not one of ours
        self._store, self._inner, self._gate, self._split = store, inner, gate, split
        self._all_gloo = set(devices.backends.values()) == {"gloo"}
        # Names, device types and FSDP2's allocation are asked of a backend; collectives that get there were forgotten here.
        options: Any = c10d.FakeProcessGroup.Options()  # type: ignore[call-arg]
        options.error_on_collective = True
        for device in devices.types:
            refusing = c10d.FakeProcessGroup._create_internal(identity.rank, identity.size, options)  # type: ignore[call-arg]
            super()._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, refusing)
        super()._set_default_backend(ProcessGroup.BackendType.CUSTOM)

    # --- who it is ---------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    def getRank(self) -> int:
        return self.identity.rank

    def getSize(self) -> int:
        return self.identity.size

    def rank(self) -> int:
        return self.identity.rank

    def size(self) -> int:
        return self.identity.size

    def get_group_store(self) -> Store:
        return self._store

    # --- its communicators -------------------------------------------------------------------------------------------

    @property
    def inner(self) -> ProcessGroup:
        return self._inner

    def replace(self, inner: ProcessGroup) -> ProcessGroup:
        """From now on `inner` carries what is said. Returns the old one: its end takes long, not for the main thread."""
        old, self._inner = self._inner, inner
        return old

    def divert(self, carry: Callable[..., Work] | None) -> None:
        """All operations go to `carry` (called as `_carry` is); None: to the communicators again.

        It hides the method by an attribute of the instance, so that it costs nothing when nobody asked for it.
        """
        if carry is None:
            self.__dict__.pop("_carry", None)
        else:
            self.__dict__["_carry"] = carry

    @property
    def aborted(self) -> bool:
        """What operations leave in their outputs was never received."""
        return self._gate.closed

    def shutdown(self) -> None:
        """Torch calls it when the group is destroyed; whoever still refers to the group then has something dead."""
        self.living = False
        self._inner.shutdown()

    def abort(self) -> None:
        self._inner.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """All ranks of this group call it; those of `new_ranks` (ranks in this group) get the new group."""
        part = self._split(self, new_ranks, timeout, group_name or "")
        if part is not None and group_desc:
            part._set_group_desc(group_desc)
        return part

    def merge_remote_group(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("the phoenix backend does not carry merge_remote_group")

    # --- operations --------------------------------------------------------------------------------------------------

    def _carry(self, operation: str, outputs: Any, *arguments: Any) -> Work:
        """Run `operation` on the communicators, or, when the gate is closed, only leave plausible values in its outputs."""

        def fill() -> None:
            stand_in.fill(operation, self.identity.rank, arguments)

        gate = self._gate
        if not gate.keeps and self.scripts:
            gate.between += 1
        if not gate.closed:
            epoch = gate.epoch
            try:
                position = gate.positions.begun(operation, self.identity.name, self.identity.rank, arguments)
                work = self._kind(operation, outputs)(
                    gate, getattr(self._inner, operation)(*arguments), outputs, fill, self._next, position
                )
            except (TypeError, ValueError):  # wrong arguments are the script's own error
                raise
            except Exception as error:
                gate.failed(error, epoch)
            else:
                gate.issued(work)
                return work
        elif not gate.keeps:
            gate.refuse(StepAborted(f"{operation} outside of a step, while the communicators are replaced"))
        if threading.get_ident() not in gate.ours:
            gate.skipped += 1
        fill()
        return FinishedWork(outputs, self._next)

    def _kind(self, operation: str, outputs: Any) -> type[SwappableWork]:
        """How an operation can be waited for so that the wait can be given up."""
        if not self._all_gloo:
            while isinstance(outputs, (list, tuple)) and outputs:
                outputs = outputs[0]
            device = outputs.device.type if isinstance(outputs, Tensor) else self.devices.types[-1]
            if self.devices.backends.get(device) != "gloo":
                return SwappableWork
        return ElsewhereWork if operation in _WITHOUT_SLICES else SlicedWork

    @property
    def _next(self) -> int:
        return (self.identity.rank + 1) % self.identity.size

    def allreduce(self, tensors: Any, opts: _Options = None, timeout: timedelta | None = None, op: Any = None) -> Work:
        listed = _listed(tensors)
        return self._carry("allreduce", listed, listed, _options(c10d.AllreduceOptions, opts, timeout, op=op))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: _Options = None) -> Work:
        opts = opts or c10d.AllreduceCoalescedOptions()
        return self._carry("allreduce_coalesced", tensors, tensors, opts)

    def broadcast(
        self, tensors: Any, opts: _Options = None, timeout: timedelta | None = None, root: int | None = None
    ) -> Work:
        listed = _listed(tensors)
        return self._carry("broadcast", listed, listed, _options(c10d.BroadcastOptions, opts, timeout, root))

    def reduce(
        self,
        tensors: Any,
        opts: _Options = None,
        op: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Work:
        listed = _listed(tensors)
        return self._carry("reduce", listed, listed, _options(c10d.ReduceOptions, opts, timeout, root, op))

    def allgather(
        self, output_tensors: list[Any], input_tensors: Any, opts: _Options = None, timeout: timedelta | None = None
    ) -> Work:
        if isinstance(input_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        opts = _options(c10d.AllgatherOptions, opts, timeout)
        return self._carry("allgather", output_tensors, output_tensors, input_tensors, opts)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: _Options = None
    ) -> Work:
        opts = opts or c10d.AllgatherOptions()
        return self._carry("allgather_coalesced", output_lists, output_lists, input_list, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: _Options = None) -> Work:
        return self._carry("all_gather_single", output, output, input, opts or c10d.AllgatherOptions())

    def all_gather_single_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: _Options = None
    ) -> Work:
        opts = opts or c10d.AllgatherOptions()
        return self._carry("all_gather_single_coalesced", output_lists, output_lists, input_list, opts)

    def gather(
        self,
        output_tensors: list[Any],
        input_tensors: Any,
        opts: _Options = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Work:
        if isinstance(input_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors] if output_tensors else [], [input_tensors]
        opts = _options(c10d.GatherOptions, opts, timeout, root)
        return self._carry("gather", output_tensors, output_tensors, input_tensors, opts)

    def scatter(
        self,
        output_tensors: Any,
        input_tensors: list[Any],
        opts: _Options = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Work:
        if isinstance(output_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors] if input_tensors else []
        opts = _options(c10d.ScatterOptions, opts, timeout, root)
        return self._carry("scatter", output_tensors, output_tensors, input_tensors, opts)

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: list[Any],
        opts: _Options = None,
        timeout: timedelta | None = None,
        op: Any = None,
    ) -> Work:
        if isinstance(output_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        opts = _options(c10d.ReduceScatterOptions, opts, timeout, op=op)
        return self._carry("reduce_scatter", output_tensors, output_tensors, input_tensors, opts)

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: _Options = None) -> Work:
        opts = opts or c10d.ReduceScatterOptions()
        return self._carry("reduce_scatter_single", outputTensor, outputTensor, inputTensor, opts)

    def reduce_scatter_single_coalesced(
        self, outputTensors: list[Tensor], inputTensors: list[Tensor], opts: _Options = None
    ) -> Work:
        opts = opts or c10d.ReduceScatterOptions()
        return self._carry("reduce_scatter_single_coalesced", outputTensors, outputTensors, inputTensors, opts)

    def all_to_all_single(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: _Options = None,
    ) -> Work:
        opts = opts or c10d.AllToAllOptions()
        return self._carry(
            "all_to_all_single", output_tensor, output_tensor, input_tensor, output_split_sizes, input_split_sizes, opts
        )

    def alltoall(self, output_tensor: list[Tensor], input_tensor: list[Tensor], opts: _Options = None) -> Work:
        opts = opts or c10d.AllToAllOptions()
        return self._carry("alltoall", output_tensor, output_tensor, input_tensor, opts)

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Work:
        return self._carry("send", tensors, tensors, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Work:
        return self._carry("recv", tensors, tensors, srcRank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        return self._carry("recv_anysource", tensors, tensors, tag)

    def barrier(self, opts: _Options = None, timeout: timedelta | None = None) -> Work:
        return self._carry("barrier", [], _options(c10d.BarrierOptions, opts, timeout))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self._inner.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]

    # Names of torch 2.9 to 2.12, which torch 2.13 still knows.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def _start_coalescing(self, device: torch.device) -> None:
        if not self._gate.closed:
            self._inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Work:
        if self._gate.closed:
            return FinishedWork([], self._next)
        return SwappableWork(self._gate, self._inner._end_coalescing(device), [], lambda: None, self._next)

    def _set_sequence_number_for_group(self) -> None:
        return None  # the communicators inside count, each set from its own beginning

    def _get_sequence_number_for_group(self) -> int:
        return int(self._inner._get_sequence_number_for_group())  # type: ignore[attr-defined]


def _options(
    kind: Callable[[], _Options], given: _Options, timeout: timedelta | None, root: int | None = None, op: Any = None
) -> _Options:
    """The options of an operation: `given`, unless that is a root, an operator or a timeout, as in torch's short forms."""
    match given:
        case int():
            root = given
        case ReduceOp() | ReduceOp.RedOpType():
            op = given
        case timedelta():
            timeout = given
        case None:
            pass
        case _:
            return given
    options = kind()
    for name, value in (("rootRank", root), ("reduceOp", op), ("timeout", timeout)):
        if value is not None:
            setattr(options, name, value)
    return options


def _listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
