"""Swappable communicators: torch.distributed's groups stay the same objects while what carries them is replaced."""

from __future__ import annotations

from phoenix_runtime.communicators.backend import BACKEND
from phoenix_runtime.communicators.gate import Gate, StepAborted
from phoenix_runtime.communicators.group import NAME, PhoenixGroup
from phoenix_runtime.communicators.inner import Devices

__all__ = ["BACKEND", "NAME", "Devices", "Gate", "PhoenixGroup", "StepAborted", "gate", "groups", "register"]


def register(backend: str | None = None) -> None:
    """Make `init_process_group("phoenix")` known. `backend`: what carries the groups, as init_process_group's own.

    Raises ValueError for a backend that cannot be swapped.
    """
    BACKEND.register(Devices.parse(backend))


def groups() -> list[PhoenixGroup]:
    """The living groups of this process."""
    return BACKEND.groups


def gate() -> Gate:
    return BACKEND.gate
