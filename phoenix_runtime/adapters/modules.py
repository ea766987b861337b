"""nn.Module: buffers, modes and gradients of a model; its parameters belong to the optimizers.

Capturing happens in every step, so what does not change is looked up once: where the buffers stand and which tensors they
are. That this still holds is asked by identity, which takes microseconds; otherwise everything is looked up again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from phoenix_runtime.adapters.part import joined
from phoenix_runtime.adapters.tensors import cloned, copy_into
from phoenix_runtime.adapters.values import copied
from phoenix_runtime.errors import ScriptError

_PACKED: Final = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
)


@dataclass(frozen=True, slots=True)
class ModuleState:
    """What forward and backward change in a module.

    Buffers by their full names: `packed` holds those of one kind (type, device) one after another, `single` each other one, or
    None where there is none. `trains`: which parameters asked for gradients.
    """

    names: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[torch.Size, ...], ...]
    packed: tuple[Tensor, ...]
    single: dict[str, Tensor | None]
    training: tuple[bool, ...]
    trains: tuple[bool, ...]
    extra: dict[str, Any]

    def buffers(self) -> dict[str, Tensor | None]:
        """Each buffer in its own shape."""
        found = dict(self.single)
        for names, shapes, packed in zip(self.names, self.shapes, self.packed, strict=True):
            pieces = torch.split(packed, [shape.numel() for shape in shapes])
            found.update({name: piece.view(shape) for name, shape, piece in zip(names, shapes, pieces, strict=True)})
        return found


@dataclass(slots=True)
class _Slot:
    """A place for a buffer: `owner._buffers[key]`."""

    name: str
    owner: nn.Module
    key: str


@dataclass(slots=True)
class _Structure:
    """What was found in the module, and whether that still holds."""

    modules: list[tuple[str, nn.Module]]
    slots: list[_Slot]
    places: list[tuple[dict[str, Tensor | None], str]]
    parameters: list[tuple[str, nn.Parameter]]
    with_extra: list[tuple[str, nn.Module]]
    children: list[dict[str, nn.Module | None]]
    children_seen: list[nn.Module | None]
    owned: list[dict[str, nn.Parameter | None]]
    owned_seen: list[nn.Parameter | None]
    buffer_dicts: list[dict[str, Tensor | None]]
    # How the buffers are packed, for the tensors that stood there when it was worked out.
    packed_for: list[Tensor | None] = field(default_factory=list)
    groups: list[list[Tensor]] = field(default_factory=list)
    names: tuple[tuple[str, ...], ...] = ()
    shapes: tuple[tuple[torch.Size, ...], ...] = ()
    sizes: list[int] = field(default_factory=list)
    single: list[tuple[str, Tensor | None]] = field(default_factory=list)

    def holds(self) -> bool:
        return (
            sum(map(len, self.buffer_dicts)) == len(self.places)
            and _same_objects(list(chain.from_iterable(map(dict.values, self.children))), self.children_seen)
            and _same_objects(list(chain.from_iterable(map(dict.values, self.owned))), self.owned_seen)
        )

    def pack(self, tensors: list[Tensor | None]) -> None:
        """Decide which buffers are copied together."""
        groups: dict[tuple[torch.dtype, torch.device, int], list[tuple[str, Tensor]]] = {}
        self.single = []
        seen: set[int] = set()
        for slot, tensor in zip(self.slots, tensors, strict=True):
            if tensor is not None and _packs(tensor) and id(tensor) not in seen:
                groups.setdefault((tensor.dtype, tensor.device, min(tensor.dim(), 2)), []).append((slot.name, tensor))
                seen.add(id(tensor))
            else:
                self.single.append((slot.name, tensor))
        self.groups = [[tensor for _, tensor in group] for group in groups.values()]
        self.names = tuple(tuple(name for name, _ in group) for group in groups.values())
        self.shapes = tuple(tuple(tensor.shape for tensor in group) for group in self.groups)
        self.sizes = [sum(shape.numel() for shape in shapes) for shapes in self.shapes]
        self.packed_for = tensors


def _packs(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type != "meta"
    return plain and not tensor.requires_grad and tensor.dtype in _PACKED


def _same_objects(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


class ModulePart:
    """A module with all that is in it, wrapped by DDP or not."""

    captures: ClassVar[type] = ModuleState

    def __init__(self, value: nn.Module, name: str) -> None:
        self.value = value
        self._name = name
        self._found: _Structure | None = None
        self._entry: tuple[list[_Slot], list[Tensor | None]] = ([], [])  # what stood where at the last capture

    # --- what is in it -----------------------------------------------------------------------------------------------

    def structure(self) -> _Structure:
        if self._found is None or not self._found.holds():
            self._found = _look_through(self.value, self._name)
        return self._found

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Each once, tied ones too; those of FSDP modules as shards, whatever stands in the module at the moment."""
        return self.structure().parameters

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        for slot in self.structure().slots:
            tensor = slot.owner._buffers[slot.key]
            if tensor is not None:
                yield slot.name, tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.parameters()

    def reshard(self) -> None:
        """Throw away parameters that FSDP has gathered: those of an aborted forward are garbage."""
        for module in self.value.modules():
            if isinstance(module, FSDPModule):
                _reset(module)

    # --- capture and restore -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def capture(self) -> ModuleState:
        found = self.structure()
        tensors = [place[key] for place, key in found.places]
        if not _same_objects(tensors, found.packed_for):
            found.pack(tensors)
        packed = [_flattened(group) for group in found.groups]
        if [flat.numel() for flat in packed] != found.sizes:  # one was resized in place
            found.pack(tensors)
            packed = [_flattened(group) for group in found.groups]
        self._entry = (found.slots, tensors)
        return ModuleState(
            names=found.names,
            shapes=found.shapes,
            packed=tuple(packed),
            single={name: None if tensor is None else cloned(tensor) for name, tensor in found.single},
            training=tuple([module.training for _, module in found.modules]),
            trains=tuple([parameter.requires_grad for _, parameter in found.parameters]),
            extra={name: copied(module.get_extra_state()) for name, module in found.with_extra},
        )

    def restore(self, captured: ModuleState) -> None:
        entry = {slot.name: tensor for slot, tensor in zip(*self._entry, strict=True)}
        saved = captured.buffers()
        self._drop_new_buffers(saved)
        owners = dict(self.structure().modules)
        for name, bits in saved.items():
            path, _, key = name.rpartition(".")
            owner = owners.get(path)
            if owner is None:
                raise ScriptError(
                    f"{joined(self._name, name)} was captured, but there is no module {joined(self._name, path)} here",
                    hint="build the same model in every process before the first step",
                )
            owner._buffers[key] = _put_back(entry.get(name, owner._buffers.get(key)), bits)
        found = self.structure()
        for (_, module), training in zip(found.modules, captured.training, strict=True):
            module.training = training
        for (_, parameter), trains in zip(found.parameters, captured.trains, strict=True):
            if parameter.requires_grad != trains:
                parameter.requires_grad_(trains)
        for name, module in found.with_extra:
            if name in captured.extra:
                module.set_extra_state(copied(captured.extra[name]))

    def _drop_new_buffers(self, saved: dict[str, Tensor | None]) -> None:
        """A buffer that a forward registers would be in the way when it is repeated."""
        for slot in _look_through(self.value, self._name).slots:
            if slot.name not in saved:
                del slot.owner._buffers[slot.key]
                slot.owner._non_persistent_buffers_set.discard(slot.key)


def _flattened(tensors: list[Tensor]) -> Tensor:
    """A copy of all of them in one piece: one call instead of one a tensor, and the quickest one there is."""
    dimensions = tensors[0].dim()
    if dimensions < 2:
        return torch.cat(tensors) if dimensions else torch.stack(tensors)
    flat: Tensor = torch._C._nn.flatten_dense_tensors(tensors)
    return flat.clone() if len(tensors) == 1 else flat  # a single one is not copied


def _put_back(tensor: Tensor | None, saved: Tensor | None) -> Tensor | None:
    if saved is None or tensor is None:
        return None if saved is None else saved.clone()
    copy_into(tensor, saved)
    return tensor


def _reset(module: FSDPModule) -> None:
    """reshard(), and without the gradients that were accumulated before they were reduced."""
    module.reshard()
    for group in module._get_fsdp_state()._fsdp_param_groups:
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None


def _look_through(root: nn.Module, name: str) -> _Structure:
    modules = list(root.named_modules())
    sharded = any(isinstance(module, FSDPModule) for _, module in modules)
    for _, module in modules if sharded else ():
        if isinstance(module, FSDPModule):
            module.reshard()
    parameters = list(root.named_parameters())
    slots = [_Slot(joined(path, key), module, key) for path, module in modules for key in module._buffers]
    for path, tensor in chain(parameters, ((slot.name, slot.owner._buffers[slot.key]) for slot in slots)):
        if tensor is not None and nn.parameter.is_lazy(tensor):
            raise ScriptError(
                f"{joined(name, path)} has no shape yet",
                hint="run the model once on an example before TrainState(...), so that lazy modules know their shapes",
            )
    owned = [] if sharded else [module._parameters for _, module in modules]
    children = [module._modules for _, module in modules]
    return _Structure(
        modules=modules,
        slots=slots,
        places=[(slot.owner._buffers, slot.key) for slot in slots],
        parameters=parameters,
        with_extra=[pair for pair in modules if type(pair[1]).get_extra_state is not nn.Module.get_extra_state],
        children=children,
        children_seen=list(chain.from_iterable(map(dict.values, children))),
        owned=owned,
        owned_seen=cast(list[nn.Parameter | None], list(chain.from_iterable(map(dict.values, owned)))),
        buffer_dicts=[module._buffers for _, module in modules],
    )
