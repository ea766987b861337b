"""Options of checkpoints on disk that do not go together are refused by one line and a hint."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_checkpoint_folders import G1, JOB, written

from phoenix_launch.checkpoint import folders
from phoenix_launch.copies import Stamp
from phoenix_launch.errors import UsageError
from phoenix_launch.options.checkpoints import check_checkpoints, of_workers
from phoenix_launch.settings import RunSettings


def settings(**given: object) -> RunSettings:
    return RunSettings(script="train.py", given=frozenset(given), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"checkpoint_interval": 5}, "--checkpoint-interval does nothing without a folder"),
        ({"resume": True}, "--resume does nothing without a folder"),
        ({"keep": 3}, "--keep does nothing without a folder"),
        ({"checkpoint_dir": "ck"}, "--checkpoint-dir alone does nothing"),
        ({"checkpoint_dir": "ck", "resume": True, "rehearse": 2}, "--rehearse does not go with --checkpoint-dir"),
        ({"checkpoint_dir": __file__, "resume": True}, "is no folder"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        check_checkpoints(settings(**given))
    assert refused.value.exit_code == 2 and refused.value.hint


def test_a_folder_with_checkpoints_of_an_older_job_wants_a_word(tmp_path: Path) -> None:
    written(tmp_path, Stamp(G1, 4))
    folders.publish(tmp_path, JOB, Stamp(G1, 4), keep=2)
    with pytest.raises(UsageError, match="has checkpoints of an older job already: step-00000004"):
        check_checkpoints(settings(checkpoint_dir=str(tmp_path), checkpoint_interval=5))
    check_checkpoints(settings(checkpoint_dir=str(tmp_path), checkpoint_interval=5, resume=True))


def test_workers_are_told_a_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert of_workers(settings()) == {}
    asked = of_workers(settings(checkpoint_dir="ck", checkpoint_interval=5))
    assert asked == {
        "PHOENIX_CHECKPOINT_DIR": str(tmp_path / "ck"), "PHOENIX_CHECKPOINT_INTERVAL": "5", "PHOENIX_RESUME": "0"
    }  # fmt: skip
