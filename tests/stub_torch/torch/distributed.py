"""The one class of torch.distributed that the launcher's own processes use."""

from __future__ import annotations

import socket
from datetime import timedelta


class TCPStore:
    """Holds the port open, as the real one does, and answers nobody."""

    def __init__(
        self,
        host_name: str,
        port: int,
        *,
        is_master: bool,
        wait_for_workers: bool,
        timeout: timedelta,
        master_listen_fd: int,
    ) -> None:
        self._listener = socket.socket(fileno=master_listen_fd)
