"""What a training script does through torch.distributed gives the same bits under phoenix as under gloo, or the same error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

import pytest
from case_table import FOLDER, Case, declared

pytestmark = pytest.mark.timeout(300)  # all cases run while the first test waits

LIMIT: Final = 240.0  # seconds for all cases together
Run = dict[tuple[str, str], dict[str, Any]]


def parameters() -> list[Any]:
    return [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else []) for case in declared()]


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What became of each selected case under each backend, all run by one call of ranks.py."""
    selected = [parameters_of(item).get("case") for item in request.session.items]
    chosen = [case.name for case in selected if isinstance(case, Case)]
    command = [sys.executable, str(FOLDER / "ranks.py"), str(tmp_path_factory.mktemp("ranks")), *chosen]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()  # its ranks die with it
        output, _ = process.communicate()
    lines = [json.loads(line) for line in output.splitlines()]
    return {(line["case"], line["backend"]): line for line in lines}


def parameters_of(item: pytest.Item) -> dict[str, object]:
    return getattr(getattr(item, "callspec", None), "params", {})


def environment() -> dict[str, str]:
    """Nothing of the caller's that speaks to torch.distributed."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("TORCH_", "GLOO_", "NCCL_"))}


def answers(run: Run, case: Case, backend: str) -> list[Any]:
    """One result a rank; a case that did not give them fails here, with what each rank said."""
    line = run.get((case.name, backend))
    if line is None:
        pytest.fail(f"{case.name} was not run under {backend}: the ranks ended before, or ran out of time")
    if any("error" in answer for answer in line["answers"]):
        told = [f"rank {rank}: {answer.get('error', 'finished')}" for rank, answer in enumerate(line["answers"])]
        told += [f"stderr of {name}:\n{text}" for name, text in (line["stderr"] or {}).items() if text]
        pytest.fail(f"{case.name} under {backend}:\n" + "\n".join(told))
    return [answer["value"] for answer in line["answers"]]


@pytest.mark.parametrize("case", parameters())
def test_phoenix_gives_the_bits_that_gloo_gives(run: Run, case: Case) -> None:
    results = {backend: answers(run, case, backend) for backend in case.backends}
    if not case.only:
        assert results["phoenix"] == results["gloo"]
        assert any(results["gloo"]), "nothing was compared"
