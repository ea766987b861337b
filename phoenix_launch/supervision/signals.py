"""Signals as readable bytes, for loops that wait for them as for everything else."""

from __future__ import annotations

import signal
import socket


class SignalPipe:
    """Signals as bytes on a pipe, so that the loop waits for them as for everything else. A context manager."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._signals = [signal.Signals[name] for name in names]
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> SignalPipe:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        held = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)  # one that comes in between must not be lost
        self._wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in self._signals:
            self._before[number] = signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """From here on signals do again what they did before; may be called twice."""
        if self._read.fileno() < 0:
            return
        signal.set_wakeup_fd(self._wakeup)  # what comes from here on ends nothing that was not over
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._read.close()
        self._write.close()

    def fileno(self) -> int:
        return self._read.fileno()

    def take(self) -> list[int]:
        try:
            return [number for number in self._read.recv(256) if number in self._signals]
        except BlockingIOError:
            return []
