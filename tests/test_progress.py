"""A progress page is one worker's to write and readable from outside at any moment."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

import phoenix_runtime
from phoenix_launch.progress import PAGE_BYTES, CopyFigures, Phase, Progress, ProgressPage
from phoenix_runtime import link


@pytest.fixture
def page() -> Iterator[tuple[ProgressPage, str]]:
    """An agent's page and the path by which a worker finds it."""
    descriptor, created = ProgressPage.create()
    yield created, f"/proc/{os.getpid()}/fd/{descriptor}"
    created.close()
    os.close(descriptor)


@pytest.fixture
def worker_page(page: tuple[ProgressPage, str], monkeypatch: pytest.MonkeyPatch) -> ProgressPage:
    """The agent's side of the page that `report` in this process writes to."""
    monkeypatch.setenv(link.PROGRESS_VARIABLE, page[1])
    monkeypatch.setattr(link, "_page", None)
    monkeypatch.setattr(link, "_looked", False)
    return page[0]


def test_a_fresh_page_says_that_nothing_is_known(page: tuple[ProgressPage, str]) -> None:
    progress = page[0].read()
    assert (progress.step, progress.phase, progress.tokens, progress.reports) == (-1, Phase.STARTING, 0, 0)
    assert math.isnan(progress.loss)


def test_what_one_side_writes_the_other_reads(page: tuple[ProgressPage, str]) -> None:
    worker = ProgressPage.attach(page[1])
    for step in (1, 2**40):
        worker.write(Progress(step=step, phase=Phase.TRAINING, loss=-0.25, tokens=2**50))
    worker.close()
    assert page[0].read() == Progress(step=2**40, phase=Phase.TRAINING, loss=-0.25, tokens=2**50, reports=2)


def test_a_page_stays_readable_when_its_writer_was_killed_while_writing(page: tuple[ProgressPage, str]) -> None:
    page[0].write(Progress(step=3))
    page[0]._signed[1] += 1  # the sequence as a killed writer leaves it
    assert page[0].read().step == 3
    page[0].write(Progress(step=4))  # its successor
    assert (page[0].read().step, page[0].read().reports) == (4, 2)


def test_a_worker_cannot_cut_the_page_short_under_its_agent(page: tuple[ProgressPage, str]) -> None:
    descriptor = os.open(page[1], os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


@pytest.mark.parametrize("size", [0, 8, PAGE_BYTES])
def test_another_file_is_not_taken_for_a_page(size: int) -> None:
    descriptor = os.memfd_create("something else")
    os.ftruncate(descriptor, size)
    with pytest.raises(ValueError, match="no progress page"):
        ProgressPage.attach(f"/proc/self/fd/{descriptor}")
    os.close(descriptor)


def test_report_keeps_what_it_is_not_told_and_adds_tokens_up(worker_page: ProgressPage) -> None:
    phoenix_runtime.report(step=5, loss=1.5, tokens=10)
    phoenix_runtime.report(tokens=7)
    phoenix_runtime.report(step=6)
    assert worker_page.read() == Progress(step=6, phase=Phase.TRAINING, loss=1.5, tokens=17, reports=3)


class Device:
    def __init__(self, type: str) -> None:
        self.type = type


class OnGpu:
    """A tensor whose value is not to be had without waiting for its device."""

    device = Device("cuda")

    def __float__(self) -> float:
        raise AssertionError("synchronises the device")


class Sharded(OnGpu):
    device = Device("cpu")

    def to_local(self) -> None: ...


class OnCpu:
    device = Device("cpu")

    def detach(self) -> float:
        return 0.5


def test_report_never_waits_for_a_device_or_for_other_ranks(worker_page: ProgressPage) -> None:
    phoenix_runtime.report(step=1, loss=OnCpu())
    phoenix_runtime.report(step=2, loss=OnGpu())
    phoenix_runtime.report(step=3, loss=Sharded())
    assert (worker_page.read().step, worker_page.read().loss) == (3, 0.5)


def test_a_process_that_the_worker_forked_does_not_write_its_page(worker_page: ProgressPage) -> None:
    phoenix_runtime.report(step=1)
    child = os.fork()
    if child == 0:
        try:
            phoenix_runtime.report(step=2)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert worker_page.read().step == 1


@pytest.mark.parametrize("path", ["", "/proc/self/fd/999", "/dev/null"])
def test_report_does_nothing_without_a_page(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(link.PROGRESS_VARIABLE, path)
    monkeypatch.setattr(link, "_page", None)
    monkeypatch.setattr(link, "_looked", False)
    phoenix_runtime.report(step=1, loss=2.0)
    assert link.progress_page() is None


def test_the_runtime_is_imported_without_torch() -> None:
    code = "import sys, phoenix_runtime; phoenix_runtime.report(1); sys.exit(bool({'torch', 'zmq'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


def test_what_copies_come_to_stands_beside_the_steps(page: tuple[ProgressPage, str]) -> None:
    assert page[0].read_copies() == CopyFigures()
    figures = CopyFigures(state=2**40, copied=2**50, sent=2**49, holders=2)
    worker = ProgressPage.attach(page[1])
    worker.write_copies(figures)
    worker.write(Progress(step=3))
    worker.close()
    assert (page[0].read_copies(), page[0].read().step) == (figures, 3)


def test_a_rank_says_what_it_has_begun_and_what_it_waits_for(page: tuple[ProgressPage, str]) -> None:
    first, second = page[0].place_of(0, 77), page[0].place_of(1, 78)
    assert [page[0].count(first), page[0].count(first), page[0].count(second)] == [1, 2, 1]
    page[0].write_waiting(77, 2)
    page[0].write_typical(0.25)
    page[0].write_allowed(60.0)
    found = page[0].read_position()
    assert (found.operations, found.waits_for, found.typical, found.allowed) == (3, (77, 2), 0.25, 60.0)
    assert page[0].read_counts() == {77: 2, 78: 1}


def test_with_new_communicators_all_is_counted_anew(page: tuple[ProgressPage, str]) -> None:
    place = page[0].place_of(0, 77)
    page[0].count(place)
    page[0].write_waiting(77, 1)
    page[0].begin_anew()
    assert page[0].read_counts() == {77: 0}
    assert page[0].read_position().waits_for == (0, 0)
    assert page[0].count(place) == 1


def test_a_full_table_takes_no_more_groups(page: tuple[ProgressPage, str]) -> None:
    places = [page[0].place_of(number, number + 1) for number in range(400)]
    taken = [place for place in places if place]
    assert len(set(taken)) == len(taken) == places.index(0)
    assert max(taken) * 8 < PAGE_BYTES
