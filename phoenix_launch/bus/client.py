"""The end of those who ask: commands (`status`, `stop`, `inject-fault`), and hosts that want to join."""

from __future__ import annotations

from typing import Generic

import msgspec
import zmq

from phoenix_launch.bus.connection import CONTROL_QUEUE, Connection
from phoenix_launch.bus.keys import KeyPair
from phoenix_launch.errors import PhoenixError
from phoenix_launch.wire import NO_GENERATION, PROTOCOL, BodyT, Envelope, Message, encode, opened


class ClientLink(Connection, Generic[BodyT]):
    """Ask one thing, get one answer; or listen for as long as one is there."""

    def __init__(
        self,
        job: str,
        endpoint: str,
        server_key: str,
        keys: KeyPair,
        timeout: float,
        answers: msgspec.msgpack.Decoder[Envelope[BodyT]],
        *,
        events: int = 0,
    ) -> None:
        """`answers`: which there are. `events`: of the connection, which `monitor` then tells until `unwatch`."""
        super().__init__(zmq.DEALER, endpoint, server_key, keys, CONTROL_QUEUE, events)
        self.job = job
        self.timeout = timeout
        self._answers = answers

    def unwatch(self) -> None:
        """A monitor that nobody reads would block libzmq when it is full."""
        if self.monitor is not None:
            self.socket.disable_monitor()
            self.monitor.close(0)
            self.monitor = None

    def ask(self, body: Message) -> BodyT:
        """Raises PhoenixError when there is no answer within the timeout."""
        self.say(body)
        answer = self.listen(self.timeout)
        if answer is None:
            raise PhoenixError(
                f"the supervisor of job {self.job} does not answer", hint="it may have ended: see `phoenix-run jobs`"
            )
        return answer

    def say(self, body: Message) -> None:
        """Never blocks. After a refusal (another job had the port, with another key) the next word tries anew."""
        data = encode(Envelope(PROTOCOL, self.job, NO_GENERATION, body))
        try:
            self.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            self.socket.disconnect(self.endpoint)  # without this, connecting again does nothing
            self.socket.connect(self.endpoint)
            self.socket.send(data, zmq.NOBLOCK)

    def listen(self, timeout: float) -> BodyT | None:
        """The next message within `timeout` seconds, else None."""
        if not self.socket.poll(int(timeout * 1000)):
            return None
        return opened(self.socket.recv(zmq.NOBLOCK), self._answers, self.job).body
