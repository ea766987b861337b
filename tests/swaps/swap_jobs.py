"""Jobs that lose processes at fault points, and their calm counterparts: the oracle is that nobody can tell them apart."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs_under_test
from jobs_under_test import Done

SCRIPT = Path(__file__).parent / "swap_script.py"
SECONDS = 180.0  # for a job with many swaps, on cores that others use too
Digests = dict[int, str]


@dataclass(frozen=True)
class Swapped:
    """A job that has ended."""

    done: Done

    @property
    def digests(self) -> Digests:
        """By rank; what a rank has printed twice is equal, or this fails."""
        found: Digests = {}
        for line in self.done.out.splitlines():
            if line.startswith("{"):
                said = json.loads(line)
                assert found.setdefault(said["rank"], said["digest"]) == said["digest"], self.done.out
        return found

    @property
    def rings(self) -> set[str]:
        """What of old communicators the survivors would have kept until their garbage collector came by."""
        lines = [json.loads(line) for line in self.done.out.splitlines() if line.startswith("{")]
        return {name for line in lines for name in line["rings"]}

    @property
    def swaps(self) -> list[dict[str, Any]]:
        return self.done.events("swap")

    @property
    def rungs(self) -> list[int]:
        return [swap["rung"] for swap in self.swaps]


def job(
    kind: str,
    steps: int,
    home: Path,
    *options: object,
    faults: Sequence[str] = (),
    script: Path = SCRIPT,
    env: Mapping[str, str] | None = None,
) -> Swapped:
    """Two nodes of two ranks and a spare node train; at `faults` ("POINT,RANK,STEP") a process dies. Asserts exit code 0."""
    happened = home / "faults"
    happened.mkdir(parents=True)
    args = ("--nodes", 2, "--nproc-per-node", 2, "--spares", 1, *options, script, kind, steps)
    environment = {**(env or {}), "PHOENIX_FAULTS": f"{happened}:{';'.join(faults)}"}
    done = jobs_under_test.run(home / "home", *args, env=environment, seconds=SECONDS)
    assert done.code == 0, done.err
    missing = len(faults) - len(list(happened.iterdir()))
    assert not missing, f"{missing} faults did not happen: {[f.name for f in happened.iterdir()]}"
    return Swapped(done)


@functools.cache
def calm(kind: str, steps: int, script: Path = SCRIPT) -> Digests:
    """What every rank has in the end when nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        found = job(kind, steps, Path(folder), script=script)
        assert found.swaps == []
        assert len(found.digests) == 4
        return found.digests
