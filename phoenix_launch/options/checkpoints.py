"""What the options of copies and checkpoints mean together: refused before anything starts, and told to the workers."""

from __future__ import annotations

import os
from pathlib import Path

from phoenix_launch.checkpoint import folders, saved
from phoenix_launch.errors import UsageError
from phoenix_launch.settings import RunSettings


def check_checkpoints(settings: RunSettings) -> None:
    """Raises UsageError. Looks at the folder as far as it is there on this machine."""
    if settings.verify_replicas and settings.snapshot_interval == 0:
        raise UsageError(
            "--verify-replicas does nothing without copies in memory",
            hint="who has other bits is restored from a copy: leave --snapshot-interval 0 out",
        )
    given = [
        f"--{name.replace('_', '-')}" for name in ("checkpoint_interval", "resume", "keep") if name in settings.given
    ]
    if not settings.checkpoint_dir:
        if settings.checkpoint_interval or settings.resume or "keep" in settings.given:
            raise UsageError(f"{given[0]} does nothing without a folder", hint="give --checkpoint-dir FOLDER")
        return
    if not settings.checkpoint_interval and not settings.resume:
        raise UsageError(
            "--checkpoint-dir alone does nothing",
            hint="give --checkpoint-interval STEPS to write checkpoints there, or --resume to begin with one",
        )
    if settings.rehearse:
        raise UsageError(
            "--rehearse does not go with --checkpoint-dir", hint="rehearse the script's first steps by themselves"
        )
    root = Path(settings.checkpoint_dir)
    if root.exists() and not root.is_dir():
        raise UsageError(f"--checkpoint-dir {root} is no folder", hint="give a folder, or the name of a new one")
    found = _newest(root)
    if found is not None and settings.checkpoint_interval and not settings.resume:
        raise UsageError(
            f"{root} has checkpoints of an older job already: {found.name}",
            hint="--resume goes on from there; a job that is to begin at step 0 needs a folder of its own",
        )


def of_workers(settings: RunSettings) -> dict[str, str]:
    """What phoenix_runtime reads in the workers (`phoenix_runtime/checkpoint/disk.py`)."""
    if not settings.checkpoint_dir:
        return {}
    return {
        "PHOENIX_CHECKPOINT_DIR": os.path.abspath(settings.checkpoint_dir),
        "PHOENIX_CHECKPOINT_INTERVAL": str(settings.checkpoint_interval),
        "PHOENIX_RESUME": "1" if settings.resume else "0",
    }


def _newest(root: Path) -> Path | None:
    try:
        return folders.newest(root) or next(iter(sorted(root.glob(f"{saved.PREFIX}*"))), None)
    except OSError:
        return None  # what cannot be read here may be readable on the hosts
