"""Signals that a loop waits for: none is lost, whenever it comes."""

from __future__ import annotations

import signal

import pytest

from phoenix_launch.supervision.signals import SignalPipe


def test_a_signal_that_comes_while_the_pipe_is_set_up_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    set_handler = signal.signal

    def interrupted(number: signal.Signals, handler: signal.Handlers) -> object:
        signal.raise_signal(number)  # to this thread: others may run here
        return set_handler(number, handler)

    monkeypatch.setattr(signal, "signal", interrupted)
    pipe = SignalPipe(("SIGUSR1",))
    with pipe:
        monkeypatch.undo()
        assert pipe.take() == [signal.SIGUSR1]
        assert pipe.take() == []


def test_a_closed_pipe_leaves_signals_as_they_were() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with SignalPipe(("SIGUSR1",)) as pipe:
        assert signal.getsignal(signal.SIGUSR1) is not before
        pipe.close()
        assert signal.getsignal(signal.SIGUSR1) is before
