"""While modules load, Ctrl-C ends the process at once: some of them would turn a KeyboardInterrupt into their own error."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Nothing has been started yet that would need cleaning up. An ignored SIGINT (`phoenix-run ... &`) stays ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
