"""The part of phoenix-run that lives beside torch: what the launcher starts, and what a training script imports."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from phoenix_runtime.link import report

if TYPE_CHECKING:
    from phoenix_runtime.checkpoint.bundles import replicated
    from phoenix_runtime.communicators.gate import StepAborted
    from phoenix_runtime.data import Batches
    from phoenix_runtime.distributed import generation, init_process_group, is_resilient, on_swap
    from phoenix_runtime.errors import RehearsalError, ScriptError
    from phoenix_runtime.loop import run_section, run_step
    from phoenix_runtime.state import TrainState

__all__ = [
    "Batches",
    "RehearsalError",
    "ScriptError",
    "StepAborted",
    "TrainState",
    "generation",
    "init_process_group",
    "is_resilient",
    "on_swap",
    "replicated",
    "report",
    "run_section",
    "run_step",
]

# Loaded when they are asked for: the fork server imports this package before torch.
_ROOMS: Final = {
    "Batches": "data",
    "RehearsalError": "errors",
    "ScriptError": "errors",
    "StepAborted": "communicators.gate",
    "TrainState": "state",
    "generation": "distributed",
    "init_process_group": "distributed",
    "is_resilient": "distributed",
    "on_swap": "distributed",
    "replicated": "checkpoint.bundles",
    "run_section": "loop",
    "run_step": "loop",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
