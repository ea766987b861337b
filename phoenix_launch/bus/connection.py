"""What the other ends have in common: one CURVE socket that dials the supervisor."""

from __future__ import annotations

from typing import Final

import zmq

from phoenix_launch.bus.keys import KeyPair
from phoenix_launch.wire import MAX_MESSAGE_BYTES

CONTROL_QUEUE: Final = 2000
OUTPUT_QUEUE: Final = 32  # chunks of at most 64 KiB at each end: what may be on its way to a slow terminal


class Connection:
    """A CURVE client socket with its own context; closing it leaves nothing behind."""

    def __init__(self, kind: int, endpoint: str, server_key: str, keys: KeyPair, queue: int, events: int = 0) -> None:
        self.endpoint = endpoint
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(kind)
        self.socket.curve_serverkey = server_key.encode()
        self.socket.curve_publickey = keys.public.encode()
        self.socket.curve_secretkey = keys.secret.encode()
        self.socket.maxmsgsize = MAX_MESSAGE_BYTES
        self.socket.linger = 0
        self.socket.ipv6 = "[" in endpoint
        self.socket.reconnect_ivl = 50
        self.socket.reconnect_ivl_max = 1000
        self.socket.set_hwm(queue)
        self.monitor: zmq.Socket[bytes] | None = self.socket.get_monitor_socket(events) if events else None
        self.socket.connect(endpoint)

    def close(self, linger: float = 0.0) -> None:
        self.socket.close(int(linger * 1000))
        self.context.term() if linger else self.context.destroy(0)
