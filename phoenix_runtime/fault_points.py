"""Places in the code where a test can make a process die: by where it is, not by when.

`PHOENIX_FAULTS="FOLDER:POINT,RANK,STEP;POINT,RANK,STEP..."` arms them; a STEP of `7/8` is whichever of the two comes first. A
fault happens once a job, whoever holds the rank by then: its file in the folder says that it has happened. Unarmed, a
point costs one comparison.
"""

from __future__ import annotations

import os
import signal
from typing import Final

VARIABLE: Final = "PHOENIX_FAULTS"


class FaultPoints:
    """Those of this process. `step`: completed steps, kept up to date by the loop."""

    def __init__(self) -> None:
        self.step = -1
        self._folder = ""
        self._armed: dict[str, dict[int, str]] = {}  # by point and step: the file's name

    def arm(self, text: str, rank: str) -> None:
        """Once this process knows its rank (it may have been forked from one that had loaded this)."""
        self._folder, _, faults = text.partition(":")
        self._armed = {}
        for fault in filter(None, faults.split(";")):
            point, whose, steps = fault.split(",")
            if whose == rank:
                name = f"{point}.{whose}.{steps.replace('/', '-')}"
                self._armed.setdefault(point, {}).update({int(step): name for step in steps.split("/")})

    def reached(self, point: str, step: int | None = None) -> None:
        """Die here, by SIGKILL, if a fault is armed for this point and step and has not happened yet.

        `step`: of what is done here, where that is not done for the step that the loop is in.
        """
        if self._armed and self.happens(point, step):
            os.kill(os.getpid(), signal.SIGKILL)

    def happens(self, point: str, step: int | None = None) -> bool:
        """Whether a fault is armed here that has not happened yet; now it has."""
        name = self._armed.get(point, {}).get(self.step if step is None else step)
        if name is None:
            return False
        try:
            os.close(os.open(os.path.join(self._folder, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True


FAULT_POINTS: Final = FaultPoints()
