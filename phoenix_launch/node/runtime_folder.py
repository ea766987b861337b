"""The private folder of a node's or a supervisor's sockets: short enough for them, and never left for long.

Its owner removes it. Where nobody was left to do so (power loss, SIGKILL to all at once) the next start of anything of
ours on this machine does. Only light modules of the standard library are imported: the guardian uses this.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from phoenix_launch.process_table import is_running, start_time

PREFIX: Final = "phoenix-"
LONGEST_NAME: Final = "/agent.sock"
SOCKET_PATH_BYTES: Final = 107  # what the kernel takes for the path of a Unix socket
_OWNER: Final = "owner"


def make_runtime_folder(environment: Mapping[str, str]) -> Path:
    """A fresh folder, 0700, owned by this process: not the job's folder (NFS, and a socket's path must be short).

    Raises OSError when there is no place for it.
    """
    places = [environment.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
    error: OSError | None = None
    for place in places:
        if not place or len(os.fsencode(place)) + len(f"/{PREFIX}12345678{LONGEST_NAME}") > SOCKET_PATH_BYTES:
            continue
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            (folder / _OWNER).write_text(f"{os.getpid()} {start_time(os.getpid())} {_pid_namespace()}")
        except OSError as failure:
            error = failure
        else:
            _sweep(Path(place))
            return folder
    raise error or OSError(f"no folder short enough for a socket among {places}")


def _sweep(place: Path) -> None:
    """Remove what dead owners left. A folder of another user or container, or of an unknown owner, is let alone."""
    for folder in place.glob(f"{PREFIX}????????"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            pid, started, namespace = (folder / _OWNER).read_text().split()
            abandoned = namespace == _pid_namespace() and not is_running(int(pid), int(started))
        except (OSError, ValueError):
            continue
        if abandoned:
            shutil.rmtree(folder, ignore_errors=True)


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"unknown-{os.getpid()}"  # equal to nobody's
