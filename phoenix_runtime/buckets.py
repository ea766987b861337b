"""DDP's bucket order, fixed before the first iteration, so that all iterations of all runs add gradients up in one order.

DDP lays its buckets out anew after its first backward, in the order in which gradients came. So its first iteration reduces
in another order than all others, and a model that was just built has other buckets than one that has trained, which ends
the process at their first common all-reduce. Here DDP is told, without any forward, that gradients came in the reverse
order of the parameters; it then lays its buckets out once and for all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def fix_bucket_order(modules: Iterable[nn.Module]) -> list[str]:
    """Fix it for each DDP module in these. All ranks do it together: it communicates as one backward does.

    No gradient is left behind, and nothing is done twice.

    Returns:
        A sentence for each module whose order could not be fixed: its first iterations may differ in their last bits.
    """
    wrapped = {id(inner): inner for module in modules for inner in module.modules() if _is_ddp(inner)}
    remarks = []
    for ddp in wrapped.values():
        reason = _obstacle(ddp)
        if reason:
            name = type(ddp.module).__name__
            remarks.append(
                f"DDP of {name} {reason}: its first steps may differ in their last bits from a run that resumed"
            )
        elif not _is_settled(ddp):
            _rebuild(ddp)
    return remarks


def _is_ddp(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel)


def _is_settled(ddp: Any) -> bool:
    """Its buckets stay what they are: laid out anew already, or (with find_unused_parameters) never."""
    return bool(ddp._has_rebuilt_buckets or (ddp.find_unused_parameters and not ddp.static_graph))


def _obstacle(ddp: Any) -> str:
    if ddp.static_graph:
        return "has a static graph, whose first two steps reduce in orders of their own"
    if _is_settled(ddp):
        return ""
    if getattr(ddp, "_use_python_reducer", False):
        return "uses the reducer of torch.compile"
    if ddp.mixed_precision is not None or ddp._delay_all_reduce_params:
        return "uses mixed_precision or delay_all_reduce_named_params"
    if any(parameter._post_accumulate_grad_hooks for parameter in ddp.parameters()):
        return "has hooks that run when a gradient was accumulated"
    return ""


def _rebuild(ddp: Any) -> None:
    reducer = ddp.reducer
    reducer.prepare_for_forward()
    if reducer._rebuild_buckets():  # a backward ran already: its order stays
        ddp._has_rebuilt_buckets = True
        return
    parameters, sparse = ddp._build_params_for_reducer()
    with _gradients_aside(parameters), _hook_states_aside(ddp), torch.inference_mode(False), torch.enable_grad():
        reducer.prepare_for_backward([])
        for parameter, is_sparse in reversed(list(zip(parameters, sparse, strict=True))):
            torch.autograd.backward(_nothing_of(parameter, is_sparse))
        if reducer._rebuild_buckets():
            ddp._has_rebuilt_buckets = True


def _nothing_of(parameter: Tensor, sparse: bool) -> Tensor:
    """A number that depends on the parameter with gradient zero."""
    if sparse:
        rows = torch.zeros(1, dtype=torch.int64, device=parameter.device)
        return torch.nn.functional.embedding(rows, parameter, sparse=True).sum() * 0
    total = parameter.flatten()[:0].sum()
    return total.abs() if total.is_complex() else total


@contextmanager
def _gradients_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """The parameters have no gradients inside, and their own ones again afterwards."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@contextmanager
def _hook_states_aside(ddp: Any) -> Iterator[None]:
    """Communication hooks are called inside; what they count and gather in their states is forgotten afterwards."""
    states = [state for _, state in getattr(ddp, "_comm_hooks", []) if state is not None]
    before = [(state, {name: _shallow(getattr(state, name)) for name in _attributes(state)}) for state in states]
    try:
        yield
    finally:
        for state, values in before:
            for name, value in values.items():
                setattr(state, name, value)


def _attributes(state: Any) -> list[str]:
    slots = [name for kind in type(state).__mro__ for name in getattr(kind, "__slots__", ())]
    return [name for name in [*slots, *getattr(state, "__dict__", {})] if hasattr(state, name)]


def _shallow(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, dict | list | set) else value
