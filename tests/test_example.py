"""The examples train alone and with others; what interrupts them leaves no trace in the result."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs_under_test
import pytest

PLAIN, SCRIPT = (Path(__file__).parents[1] / "examples" / name for name in ("train_plain.py", "train_gpt.py"))
SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--sequence", "16", "--batch", "2", "--log-every", "2"]
RUN_SECONDS = 60


def train(
    folder: Path, *options: str, world: int = 1, script: Path = PLAIN, **environment: str
) -> tuple[dict[str, Any], str]:
    """Run the example to its end: what the last line of rank 0 says, and everything that rank printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PHOENIX_", "TORCHELASTIC_"))}
    kept |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *SMALL, *options],
            cwd=folder,
            env={**kept, "RANK": str(rank), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        shown = [rank.communicate(timeout=RUN_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0] * world, "".join(shown)
    return json.loads(shown[0].splitlines()[-1]), shown[0]


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_it_runs_under_plain_python_learns_and_keeps_nothing_unasked(tmp_path: Path) -> None:
    result, shown = train(tmp_path, "--steps", "20", TORCHELASTIC_RUN_ID="none")
    assert result["step"] == 20 and len(result["state_sha256"]) == 64
    losses = [float(line.split()[3]) for line in shown.splitlines() if line.startswith("step")]
    assert len(losses) == 10 and losses[-1] < losses[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_was_interrupted_ends_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("All happy families are alike; each unhappy family is unhappy in its own way. " * 9)
    common = ("--checkpoint-every", "3", "--text", "text", "--seed", "7")
    whole, _ = train(tmp_path, *common, "--steps", "7", "--checkpoint", "whole.pt", world=2)
    train(tmp_path, *common, "--steps", "4", "--checkpoint", "deep/cut.pt", world=2)
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "numpy.py").write_text("raise ModuleNotFoundError('a machine that has torch and no NumPy')")
    rest, shown = train(
        tmp_path, *common, "--steps", "7", "--checkpoint", "deep/cut.pt", world=2, PYTHONPATH=str(tmp_path / "without")
    )
    assert "from step 4 of deep/cut.pt" in shown
    assert rest == whole
    assert sorted(path.name for path in tmp_path.rglob("*.pt*")) == ["cut.pt", "whole.pt"]


def test_a_job_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    train(tmp_path, "--steps", "1", PHOENIX_JOB="train_gpt-7f3a", TORCHELASTIC_RUN_ID="none")
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == ["train_gpt-7f3a.pt"]


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_lost_rank_changes_no_bit_and_without_phoenix_run_they_are_the_same(parallel: str, tmp_path: Path) -> None:
    options = ("--steps", "12", "--parallel", parallel)
    alone, _ = train(tmp_path, *options, world=2, script=SCRIPT)
    (tmp_path / "faults").mkdir()
    faults = {"OMP_NUM_THREADS": "1", "PHOENIX_FAULTS": f"{tmp_path}/faults:before-optimizer,1,6"}
    job = ("--nproc-per-node", 2, SCRIPT, *SMALL, *options)
    done = jobs_under_test.run(tmp_path / "home", *job, env=faults, seconds=90)
    assert done.code == 0, done.err
    assert [swap["rung"] for swap in done.events("swap")] == [1]
    assert json.loads(done.out.splitlines()[-1]) == alone
