"""What runs inside a namespace to carry or shape traffic of a test host: `traffic.py relay|segmentation|pipe ...`."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time

_TUNSETIFF, _TUNSETOFFLOAD, _TAP_NO_PI_VNET_HDR, _CSUM_TSO4_TSO6 = 0x400454CA, 0x400454D0, 0x5002, 7
_SIOCETHTOOL, _ETHTOOL_STSO, _ETHTOOL_SGSO = 0x8946, 0x1F, 0x24
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE = 33, 32
_ETH_P_ALL = 3


def relay(port: str, delay: float, jitter: float, loss: float, mtu: int) -> None:
    """Carry frames between a host's port and the bridge (through a tap), late (in ms) and with losses (in percent).

    They keep their virtio header, so that checksum and segmentation offload go through; with loss the kernel cuts them
    to packets first.
    """
    tap_name = "t" + port[1:]
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", tap_name.encode(), _TAP_NO_PI_VNET_HDR))
    if not loss:
        fcntl.ioctl(tap, _TUNSETOFFLOAD, _CSUM_TSO4_TSO6)
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    raw.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    raw.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    raw.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
    raw.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 64 << 20)
    raw.bind((port, 0))
    raw.setblocking(False)
    wiring = f"link set {port} nomaster\nlink set {tap_name} mtu {mtu} txqueuelen 10000 master br0 up\n"
    subprocess.run(["ip", "-batch", "-"], input=wiring, text=True, check=True)
    _carry(tap, raw.fileno(), delay, jitter, loss)


def _carry(tap: int, raw: int, delay: float, jitter: float, loss: float) -> None:
    queue: list[tuple[float, int, int, bytes]] = []
    sequence, last = 0, [0.0, 0.0]
    while True:
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        ready, now = select.select([tap, raw], [], [], wait)[0], time.monotonic()
        for way, (source, target) in enumerate(((tap, raw), (raw, tap))):
            with contextlib.suppress(BlockingIOError):
                for _ in range(64 if source in ready else 0):
                    frame = os.read(source, 70000)
                    if not loss or random.random() * 100 >= loss:
                        last[way] = max(last[way], now + (delay + random.uniform(0, jitter)) / 1000)  # in order
                        sequence += 1
                        heapq.heappush(queue, (last[way], sequence, target, frame))
        while queue and queue[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # full or gone: a lost packet
                os.write(queue[0][2], queue[0][3])
            heapq.heappop(queue)


def segmentation(on: bool) -> None:
    """As `ethtool -K eth0 tso on|off gso on|off`: off, so that a loss is per packet and not per 64 KiB."""
    with socket.socket() as any_socket:
        for command in (_ETHTOOL_STSO, _ETHTOOL_SGSO):
            value = ctypes.create_string_buffer(struct.pack("II", command, int(on)))
            fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("16sP16x", b"eth0", ctypes.addressof(value)))


def pipe(address: str, port: int) -> None:
    """Standard streams to a TCP connection, for ssh's ProxyCommand."""
    connection = socket.create_connection((address, port))
    ends = {0: connection.fileno(), connection.fileno(): 1}
    while connection.fileno() in ends:
        for source in select.select(list(ends), [], [])[0]:
            data = os.read(source, 65536)
            if not data and ends.pop(source) != 1:
                connection.shutdown(socket.SHUT_WR)
            while data:
                data = data[os.write(ends[source], data) :]


def main(argv: list[str]) -> None:
    what, *rest = argv
    if what == "relay":
        relay(rest[0], float(rest[1]), float(rest[2]), float(rest[3]), int(rest[4]))
    elif what == "segmentation":
        segmentation(rest[0] == "1")
    elif what == "pipe":
        pipe(rest[0], int(rest[1]))
    else:
        raise SystemExit(f"traffic: no {what!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
