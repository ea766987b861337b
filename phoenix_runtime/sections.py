"""What sections returned, kept for a process that takes this one's place: it passes them without running them."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from phoenix_runtime.errors import ScriptError

LARGEST: Final = 1 << 20  # bytes of a pickled result that are kept
_SINCE_STEP: Final = "sections"
_AT_START: Final = "sections at the start"
_Kept = tuple[str, bytes | None]  # name, pickled result; None: too large


class TooLargeError(Exception):
    """The section's result was not kept, so that only a process that runs it again can know it."""


class SectionResults:
    """Two lists: of sections since the last step, which a script that begins there may come to again, and of those before
    the first step, which it may come to as a part of its start."""

    def __init__(self) -> None:
        self._since_step: list[_Kept] = []
        self._at_start: list[_Kept] = []
        self._to_come: tuple[deque[_Kept], deque[_Kept]] = (deque(), deque())  # those that a replacement has not passed

    # --- the process that runs them ----------------------------------------------------------------------------------

    def add(self, name: str, value: object, *, at_start: bool) -> str:
        """Keep what a section returned. Returns what the user ought to know. Raises ScriptError."""
        try:
            pickled: bytes | None = pickle.dumps(value)
        except Exception as error:  # whatever a result's own code raises
            raise ScriptError(
                f"what the section {name!r} returns cannot be kept: {error}",
                hint="return plain values, for they have to reach a process that takes this one's place",
            ) from None
        assert pickled is not None
        size = len(pickled)
        kept = (name, pickled if size <= LARGEST else None)
        self._since_step.append(kept)
        if at_start:
            self._at_start.append(kept)
        if size <= LARGEST:
            return ""
        return (
            f"the result of the section {name!r} has {size} bytes, more than the {LARGEST} that are kept for a process"
            " that takes this one's place: if it has to pass that section, all processes start again"
        )

    def step_finished(self) -> None:
        self._since_step = []

    def to_keep(self) -> dict[str, Any]:
        """What goes into the private bundle, by name."""
        lists = {_SINCE_STEP: self._since_step, _AT_START: self._at_start}
        return {name: list(kept) for name, kept in lists.items() if kept}

    # --- the process that takes its place ----------------------------------------------------------------------------

    def take(self, kept: Mapping[str, Any]) -> None:
        """All that a private bundle has."""
        self._since_step, self._at_start = list(kept.get(_SINCE_STEP, ())), list(kept.get(_AT_START, ()))

    def begin_to_pass(self) -> None:
        """The script starts alone, and comes to sections that were run before."""
        self._to_come = (deque(self._since_step), deque(self._at_start))

    def passed(self, name: str) -> object:
        """The result of a section to which the script has come. Raises TooLargeError, ScriptError."""
        for kept in self._to_come:
            if kept and kept[0][0] == name:
                _, pickled = kept.popleft()
                if pickled is None:
                    raise TooLargeError(name)
                return pickle.loads(pickled)
        expected = ", ".join(sorted({kept[0][0] for kept in self._to_come if kept})) or "none"
        raise ScriptError(
            f"this process takes the place of one that did not come to the section {name!r} here (but to: {expected})",
            hint="a script has to pass the same sections in every process of a rank, each with a name of its own",
        )
