"""Keeps torch.compile from looking into our methods: they are called between graphs, they are no part of them."""

from __future__ import annotations

import pkgutil
import sys
import types
from collections.abc import Iterator

from torch._C._dynamo import eval_frame


def hide() -> None:
    """Mark the code of this package as not to be traced; does not import torch._dynamo, which takes seconds."""
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for module in _rooms():
        for function in _functions(module):
            setattr(function, "_torchdynamo_disable", True)  # noqa: B010  # keeps callers from inlining it
            for code in _nested(function.__code__):
                eval_frame.set_code_exec_strategy(code, skip)


def _rooms() -> Iterator[types.ModuleType]:
    """This package and its modules. Not by a walk through sys.modules: that would touch, and so copy, ten megabytes of what a
    forked process shares with its parent."""
    package = sys.modules[__name__.rpartition(".")[0]]
    names = [
        package.__name__,
        *(f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__)),
    ]
    yield from (sys.modules[name] for name in names if name in sys.modules)


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    for item in vars(module).values():
        members = vars(item).values() if isinstance(item, type) and item.__module__ == module.__name__ else [item]
        for member in members:
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                yield function


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
