"""`init_process_group`: as torch's own, on communicators that can be replaced where phoenix-run is there to replace them."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from phoenix_runtime import communicators

JOB: Final = "PHOENIX_JOB"  # set by phoenix-run for each worker


def is_resilient() -> bool:
    """Whether this process was started by phoenix-run with communicators that can be replaced."""
    return JOB in os.environ and dist.is_initialized() and dist.get_backend() == communicators.NAME


def init_process_group(backend: str | None = None, timeout: timedelta | None = None, **options: Any) -> None:
    """Start torch.distributed. The same script runs under phoenix-run, torchrun and plain python.

    Args:
        backend: what carries the groups, as torch's own: None, "gloo", "nccl", "cpu:gloo,cuda:nccl".
        timeout: of each collective, as torch's own.
        options: anything else that torch.distributed.init_process_group takes.

    Raises:
        ValueError: for a backend whose communicators cannot be replaced (under phoenix-run only).
    """
    if JOB in os.environ:
        communicators.register(backend)
        dist.init_process_group(communicators.NAME, timeout=timeout or _torchs_own(backend), **options)
        if options.get("device_id") is not None:
            dist.group.WORLD.bound_device_id = options["device_id"]  # type: ignore[union-attr]  # it was just made
    elif "RANK" in os.environ or {"init_method", "store"} & options.keys():
        dist.init_process_group(backend, timeout=timeout, **options)
    else:  # plain python: a world of one
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1, **options)


def _torchs_own(backend: str | None) -> timedelta | None:
    """NCCL's default is shorter than that of all others."""
    if backend == "nccl":
        own: timedelta | None = dist.distributed_c10d._get_default_timeout(dist.Backend("nccl"))
        return own
    return None
