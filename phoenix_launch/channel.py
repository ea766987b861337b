"""Framed messages with file descriptors over a Unix stream socket: how an agent talks to processes on its own node."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence

import msgspec

from phoenix_launch.errors import ProtocolError
from phoenix_launch.local_messages import NodeLocal, decode_local
from phoenix_launch.wire import MAX_MESSAGE_BYTES, encode

_HEADER = struct.Struct("!I")
_MAX_DESCRIPTORS = 8


def send(sock: socket.socket, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
    """Send one message whole; the descriptors ride on its first byte. Blocks as `sock` does (its timeout holds)."""
    data = encode(message)
    frame = _HEADER.pack(len(data)) + data
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    sent = sock.sendmsg([frame], ancillary)
    if sent < len(frame):  # sendall of nothing is a send too, and fails when the peer has read all and closed
        sock.sendall(memoryview(frame)[sent:])


def receive(sock: socket.socket) -> tuple[NodeLocal, tuple[int, ...]] | None:
    """Receive one message and its descriptors (close-on-exec, the caller's to close); None at the end of the stream.

    Raises ProtocolError for a malformed frame, TimeoutError when the socket has a timeout and it passes.
    """
    size = array.array("i").itemsize
    head, ancillary, _, _ = sock.recvmsg(
        _HEADER.size, socket.CMSG_LEN(_MAX_DESCRIPTORS * size), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % size])
    try:
        if not head:
            return None
        length = _HEADER.unpack(head + _exactly(sock, _HEADER.size - len(head)))[0]
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a frame of {length} bytes on a local socket")
        return decode_local(_exactly(sock, length)), tuple(descriptors)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _exactly(sock: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(count - len(parts))
        if not part:
            raise ProtocolError("a local socket closed in the middle of a message")
        parts += part
    return bytes(parts)
