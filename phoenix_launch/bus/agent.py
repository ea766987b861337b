"""An agent's ends of the bus: control, and its workers' output."""

from __future__ import annotations

from typing import Final

import zmq

from phoenix_launch.bootstrap import AgentBootstrap
from phoenix_launch.bus.connection import CONTROL_QUEUE, OUTPUT_QUEUE, Connection
from phoenix_launch.bus.keys import KeyPair
from phoenix_launch.errors import ProtocolError
from phoenix_launch.messages import Body, decode_envelope
from phoenix_launch.output_messages import FromOutput, OutputEnvelope
from phoenix_launch.wire import PROTOCOL, Envelope, Generation, encode

LAST_OUTPUT_SECONDS: Final = 0.5  # what is in a node's queue may take to the supervisor when the node leaves


class AgentLink(Connection):
    """An agent's end of the control bus. `socket` is there to be polled."""

    def __init__(self, bootstrap: AgentBootstrap) -> None:
        keys = KeyPair(bootstrap.public_key, bootstrap.secret_key)
        super().__init__(zmq.DEALER, bootstrap.control_endpoint, bootstrap.server_key, keys, CONTROL_QUEUE)
        self.job = bootstrap.job
        self.malformed = 0

    def send(self, body: Body, generation: Generation) -> None:
        """Never blocks: when the queue is full the message is dropped, the next report says the same anyway."""
        try:
            self.socket.send(encode(Envelope(PROTOCOL, self.job, generation, body)), zmq.NOBLOCK)
        except zmq.Again:
            return

    def receive(self) -> Envelope[Body] | None:
        """The next good message without waiting; None when there is none. Bad ones are counted and dropped."""
        while True:
            try:
                return decode_envelope(self.socket.recv(zmq.NOBLOCK), self.job)
            except zmq.Again:
                return None
            except ProtocolError:
                self.malformed += 1


class OutputSender(Connection):
    """The output pump's end: carries workers' lines to the supervisor's console, blocking when that is slow."""

    def __init__(self, bootstrap: AgentBootstrap) -> None:
        keys = KeyPair(bootstrap.public_key, bootstrap.secret_key)
        super().__init__(zmq.PUSH, bootstrap.output_endpoint, bootstrap.server_key, keys, OUTPUT_QUEUE)
        self.job = bootstrap.job

    def close(self, linger: float = LAST_OUTPUT_SECONDS) -> None:
        super().close(linger)

    def send(self, body: FromOutput, timeout: float) -> bool:
        """False when the queue stayed full for `timeout` seconds."""
        if not self.socket.poll(int(timeout * 1000), zmq.POLLOUT):
            return False
        try:
            self.socket.send(encode(OutputEnvelope(PROTOCOL, self.job, body)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
