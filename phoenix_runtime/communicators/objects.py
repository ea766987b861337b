"""Object collectives in an aborted step: they raise, since unpickling what was never received gives errors or worse.

(Measured: EOFError, or an allocation of 139 TB.) All of them pass through two functions of torch.
"""

from __future__ import annotations

from typing import Any, Final

from torch.distributed import distributed_c10d

from phoenix_runtime.communicators.gate import Gate, StepAborted

_PASSED: Final = ("_object_to_tensor", "_tensor_to_object")


def guard(gate: Gate) -> None:
    """From now on no object collective packs or unpacks anything while `gate` is closed."""
    for name in _PASSED:
        setattr(distributed_c10d, name, _guarded(getattr(distributed_c10d, name), gate))


def _guarded(function: Any, gate: Gate) -> Any:
    def guarded(*arguments: Any, **named: Any) -> Any:
        if gate.closed:
            raise StepAborted("an object collective in a step that was aborted")
        return function(*arguments, **named)

    return guarded
