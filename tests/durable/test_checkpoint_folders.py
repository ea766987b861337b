"""Folders of checkpoints on disk: what is found, what becomes visible, what is removed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from phoenix_launch.checkpoint import folders
from phoenix_launch.checkpoint.folders import Manifest
from phoenix_launch.copies import Stamp
from phoenix_launch.wire import Generation

JOB, OTHER = "train-1a2b", "train-9f9f"
G1, G2, G3 = (Generation(1, n) for n in (1, 2, 3))


def written(root: Path, stamp: Stamp, job: str = JOB) -> Path:
    """A whole checkpoint that is not visible yet."""
    folder = root / folders.pending_name(job, stamp)
    folder.mkdir(parents=True)
    manifest = Manifest(job=job, generation=stamp.generation, step=stamp.version, world=2)
    (folder / folders.MANIFEST).write_bytes(msgspec.json.encode(manifest))
    (folder / folders.METADATA).touch()
    return folder


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_is_being_written_is_not_found(tmp_path: Path) -> None:
    written(tmp_path, Stamp(G1, 4))
    assert folders.newest(tmp_path) is None


@pytest.mark.parametrize("missing", [folders.MANIFEST, folders.METADATA])
def test_what_lacks_a_part_is_not_found(tmp_path: Path, missing: str) -> None:
    for step in (4, 8):
        written(tmp_path, Stamp(G1, step))
        folders.publish(tmp_path, JOB, Stamp(G1, step), keep=2)
    (tmp_path / folders.visible_name(8) / missing).unlink()
    assert folders.newest(tmp_path) == tmp_path / folders.visible_name(4)


def test_a_folder_that_is_not_there_has_no_checkpoint(tmp_path: Path) -> None:
    assert folders.newest(tmp_path / "none") is None


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        written(tmp_path, Stamp(G1, step))
        folders.publish(tmp_path, JOB, Stamp(G1, step), keep=2)
    assert folders.newest(tmp_path) == tmp_path / "step-100000000"


def test_without_resume_only_the_jobs_own_counts(tmp_path: Path) -> None:
    for job, step in ((JOB, 4), (OTHER, 8)):
        written(tmp_path, Stamp(G1, step), job)
        folders.publish(tmp_path, job, Stamp(G1, step), keep=5)
    assert folders.newest(tmp_path, JOB) == tmp_path / folders.visible_name(4)
    assert folders.newest(tmp_path) == tmp_path / folders.visible_name(8)


def test_the_oldest_beyond_those_that_are_kept_go(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        written(tmp_path, Stamp(G1, step))
        folders.publish(tmp_path, JOB, Stamp(G1, step), keep=2)
    assert names(tmp_path) == [folders.visible_name(6), folders.visible_name(8)]


def test_what_lies_ahead_does_not_cost_the_new_one_its_place(tmp_path: Path) -> None:
    for step in (40, 2, 4):
        written(tmp_path, Stamp(G1, step))
        folders.publish(tmp_path, JOB, Stamp(G1, step), keep=1)
    assert names(tmp_path) == [folders.visible_name(4), folders.visible_name(40)]


def test_a_step_that_was_run_again_is_visible_once(tmp_path: Path) -> None:
    written(tmp_path, Stamp(G1, 4))
    folders.publish(tmp_path, JOB, Stamp(G1, 4), keep=2)
    written(tmp_path, Stamp(G2, 4))
    assert folders.publish(tmp_path, JOB, Stamp(G2, 4), keep=2) == tmp_path / folders.visible_name(4)
    assert names(tmp_path) == [folders.visible_name(4)]


def test_a_half_written_one_cannot_become_visible(tmp_path: Path) -> None:
    (written(tmp_path, Stamp(G1, 4)) / folders.METADATA).unlink()
    with pytest.raises(OSError, match="no whole checkpoint"):
        folders.publish(tmp_path, JOB, Stamp(G1, 4), keep=2)
    assert folders.newest(tmp_path) is None


def test_a_visible_one_without_a_manifest_is_replaced(tmp_path: Path) -> None:
    (tmp_path / folders.visible_name(4)).mkdir()
    written(tmp_path, Stamp(G1, 4))
    folders.publish(tmp_path, JOB, Stamp(G1, 4), keep=2)
    assert folders.newest(tmp_path) == tmp_path / folders.visible_name(4)


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead = [written(tmp_path, Stamp(G1, 8)), written(tmp_path, Stamp(G2, 2)), written(tmp_path, Stamp(G3, 9), OTHER)]
    living = [written(tmp_path, Stamp(G2, 4)), written(tmp_path, Stamp(G2, 6)), written(tmp_path, Stamp(G3, 2))]
    mine = tmp_path / "notes.txt"
    mine.touch()
    folders.sweep(tmp_path, JOB, Stamp(G2, 4))
    assert [folder for folder in dead if folder.exists()] == []
    assert [folder for folder in living if not folder.exists()] == []
    assert mine.exists()
