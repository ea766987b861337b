"""Hosts the TCPStore of one generation: in a parked process, or as `python -m phoenix_runtime.store_host FD`."""

from __future__ import annotations

import errno
import os
import socket
import sys
from datetime import timedelta
from typing import Final, NoReturn

from phoenix_launch import channel
from phoenix_launch.errors import ProtocolError
from phoenix_launch.local_messages import BecomeStore, StoreUp

_SELF_CONNECT: Final = timedelta(seconds=10)  # the server's own client, to a port that listens already
_BACKLOG: Final = 4096  # every rank of a job connects at the same moment


def serve(control: socket.socket, request: BecomeStore) -> NoReturn:
    """Host the store until the other end of `control` closes; then end this process."""
    try:
        listener = listen(request)
    except OSError as error:
        _answer(control, StoreUp(port=0, error=explain(error, request)))
        os._exit(1)
    port = int(listener.getsockname()[1])
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, re-exported without saying so

        store = TCPStore(
            request.address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_SELF_CONNECT,
            master_listen_fd=listener.detach(),
        )
    except Exception as error:
        _answer(control, StoreUp(port=0, error=f"the store did not start: {str(error).splitlines()[0]}"))
        os._exit(1)
    _answer(control, StoreUp(port=port))
    while control.recv(1024):  # no deadline: the store lives exactly as long as its owner keeps the other end
        pass
    del store
    os._exit(0)


def listen(request: BecomeStore) -> socket.socket:
    """Bind before anybody is told the port: a port that was merely found free may be gone when it is used.

    Raises OSError; EADDRINUSE when the port, or every port of the range, is taken.
    """
    if request.port or not request.port_low:
        return _listen_on(request.address, request.port)
    for port in range(request.port_low, request.port_high + 1):
        try:
            return _listen_on(request.address, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _listen_on(address: str, port: int) -> socket.socket:
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a previous generation's connections linger
        listener.bind(where)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def explain(error: OSError, request: BecomeStore) -> str:
    ports = f"{request.port_low}-{request.port_high}" if not request.port and request.port_low else f"{request.port}"
    said = error.strerror or str(error)
    return f"{said[:1].lower()}{said[1:]}: {request.address} port {ports}"


def _answer(control: socket.socket, answer: StoreUp) -> None:
    try:
        channel.send(control, answer)
    except OSError:  # nobody waits for this store any more
        os._exit(0)


def main(descriptor: int) -> NoReturn:
    control = socket.socket(fileno=descriptor)
    control.setblocking(True)
    import torch.distributed  # noqa: F401  # started early, so that nobody waits for this when the store is needed

    received = channel.receive(control)
    if received is None:
        os._exit(0)
    if not isinstance(received[0], BecomeStore):
        raise ProtocolError(f"a store host got {type(received[0]).__name__}")
    serve(control, received[0])


if __name__ == "__main__":
    main(int(sys.argv[1]))
