"""While modules load, Ctrl-C ends the process at once (some would make it their own error), and nothing looks for garbage."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Nothing has been started yet that would need cleaning up. An ignored SIGINT (`phoenix-run ... &`) stays ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    collecting = gc.isenabled()
    gc.disable()  # what loads stays: each search finds nothing, and together they take a tenth of a command's time
    try:
        yield
    finally:
        if collecting:
            gc.enable()
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
