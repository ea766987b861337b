"""The part of phoenix-run that lives beside torch: what the launcher starts, and what a training script imports."""

from __future__ import annotations

from phoenix_runtime.link import report

__all__ = ["report"]
