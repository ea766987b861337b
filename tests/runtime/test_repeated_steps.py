"""A step that was aborted at any of its collectives is repeated bit for bit, for every kind of parallelism; nobody dies."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
SCRIPT = FOLDER / "repeat_ranks.py"
FAULTS = 4  # in each aborted run
TIMEOUT = 280.0


def kinds() -> list[str]:
    """Read, not imported: torch is loaded by the ranks only."""
    tree = ast.parse((FOLDER / "small_models.py").read_text())
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign) and getattr(statement.target, "id", "") == "MODELS":
            assert isinstance(statement.value, ast.Dict)
            return [ast.literal_eval(key) for key in statement.value.keys if key is not None]
    raise AssertionError("small_models.py has no MODELS")


def parameters() -> list[Any]:
    """Variants that exchange what another kind does are run by hand."""
    variants = ("ddp", "ddp bucket view", "fsdp unresharded", "fsdp mixed", "hsdp", "tp", "gpipe")
    return [pytest.param(kind, marks=[pytest.mark.slow] if kind in variants else []) for kind in kinds()]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw, by kind. All kinds run in the same four processes, one after the other."""
    selected = [item.callspec.params.get("kind") for item in request.session.items if hasattr(item, "callspec")]
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *(kind for kind in kinds() if kind in selected)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, done.stderr[-3000:]
    return {line["kind"]: line["ranks"] for line in lines}


@pytest.mark.timeout(TIMEOUT + 20)
@pytest.mark.parametrize("kind", parameters())
def test_an_aborted_step_is_repeated_bit_for_bit(found: dict[str, list[dict[str, Any]]], kind: str) -> None:
    assert kind in found, f"not run, since an earlier kind failed: {list(found)[-1:]}"
    for rank, answer in enumerate(found[kind]):
        assert "error" not in answer, f"rank {rank}: {answer['error']}"
        assert answer["repairs"] == FAULTS, (rank, answer)
        assert answer["aborted"] == answer["calm"], (rank, answer)
    digests = {answer["calm"] for answer in found[kind]}
    assert len(digests) > 1, "each rank has something of its own: random numbers, shards, buffers"
