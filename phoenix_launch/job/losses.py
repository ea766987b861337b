"""Whether the end of a worker is bad luck, or a bug that would come again and is not retried (with the runtime). Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from phoenix_launch.messages import ExitReport


@dataclass(frozen=True, slots=True)
class Loss:
    """How a rank ended. `words`: its error or signal, without what differs from one time to the next."""

    words: str
    step: int
    raised: bool  # by its own error, not by a signal


def loss(report: ExitReport, step: int) -> Loss:
    return Loss(_words(report), step, raised=report.code > 0)


def _words(report: ExitReport) -> str:
    if report.code < 0:
        return f"signal {-report.code}"
    if report.code == 0:
        return "ended early"
    return f"{report.code}: {_error(report.error) or report.tail.rstrip().rpartition(chr(10))[2]}"


def _error(text: str) -> str:
    """The message of a torchelastic error file; its call stack and time are left out."""
    try:
        message = json.loads(text)["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (ValueError, KeyError, TypeError):
        return ""


def bug(new: Loss, earlier: Loss | None, together: Mapping[int, Loss], ranks: int) -> str | None:
    """What speaks for a bug, as words that go on from how it ended; None: it may be bad luck.

    `earlier`: how the same rank ended before; `together`: all that ended since all ran together, this one too.

    A bug: a rank raises before its first step is done, or ends twice alike at the same step, or all raise the same error.
    """
    if new.raised and new.step < 1:
        return "before its first step was done"
    if new == earlier:
        return f"for the second time in step {new.step + 1}" if new.step >= 0 else "twice before its first step"
    words = {its.words for its in together.values()}
    alike = len(together) == ranks and len(words) == 1 and new.raised
    if not alike:
        return None
    return "as all ranks did" if ranks > 1 else ""
