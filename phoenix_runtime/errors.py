"""Errors that a training script gets from its runtime."""

from __future__ import annotations


class ScriptError(RuntimeError):
    """The script breaks a rule that repeating a step needs. `hint` says what to do instead."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(f"{message}\n  hint: {hint}")
        self.hint = hint


class RehearsalError(RuntimeError):
    """A repeated step was not the same as its first run: something that it reads is not part of TrainState."""


class DrillError(RuntimeError):
    """A drill asked for an error in a step: `phoenix-run inject-fault raise`."""
