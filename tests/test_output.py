"""What a worker writes arrives whole and in order, whatever the disk, the console or the worker's end do to it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phoenix_launch.bootstrap import OutputSettings
from phoenix_launch.node.lines import CHUNK_BYTES, LineAssembler, chunks, last_lines, matching, prefixed
from phoenix_launch.node.log_files import RETRY_SECONDS, Disk, LogFile
from phoenix_launch.node.output import OutputPump
from phoenix_launch.node.routes import STDERR, STDOUT, SpareLabel, WorkerLabel, route
from phoenix_launch.output_messages import FromOutput, OutputChunk, OutputEnd
from phoenix_launch.wire import Generation

Eventually = Callable[..., object]
FIRST = Generation(1, 1)


def fed(*reads: bytes, now: float = 0.0) -> bytes:
    assembler = LineAssembler()
    return b"".join([assembler.feed(data, now) for data in reads] + [assembler.finish()])


# --- lines -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"]))), st.data())
def test_lines_come_out_as_they_went_in_wherever_the_reads_cut_them(lines: list[str], data: st.DataObject) -> None:
    whole = "\n".join(lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    reads = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert fed(*reads) == whole + (b"" if whole.endswith(b"\n") or not whole else b"\n")


def test_half_a_line_waits_for_its_end() -> None:
    assembler = LineAssembler()
    assert assembler.feed("loss 0.5 \N{GREEK SMALL LETTER MU}".encode()[:-1], 0.0) == b""
    assert assembler.feed(b"\xbcs\nnext", 0.0) == "loss 0.5 \N{GREEK SMALL LETTER MU}s\n".encode()
    assert assembler.finish() == b"next\n"


@pytest.mark.parametrize("read", [1 << 20, CHUNK_BYTES, 1000])
def test_a_line_too_long_for_a_message_is_cut_between_characters(read: int) -> None:
    text = "x" + "\N{EURO SIGN}" * 60_000
    reads = [text.encode()[at : at + read] for at in range(0, 3 * len(text), read)]
    pieces = list(chunks(fed(*reads, b"\nnext\n")))
    assert all(len(piece) <= CHUNK_BYTES and piece.endswith(b"\n") for piece in pieces)
    assert "".join(piece.decode() for piece in pieces).replace("\n", "") == text + "next"


def test_bytes_that_are_no_text_are_cut_too() -> None:
    pieces = list(chunks(fed(b"\x80" * 200_000)))
    assert b"".join(pieces).replace(b"\n", b"") == b"\x80" * 200_000


def test_a_progress_bar_is_shown_once_a_second_and_its_last_state_always() -> None:
    assembler = LineAssembler()
    shown = [assembler.feed(f"\r{percent} %".encode(), percent * 0.1) for percent in range(41)]
    shown.append(assembler.feed(b"\ndone\n", 4.1))
    assert [line for line in shown if line] == [b"1 %\n", b"11 %\n", b"21 %\n", b"31 %\n", b"40 %\ndone\n"]


def test_a_progress_bar_that_stops_moving_is_shown_by_the_clock() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"1 %\r2 %\r", 0.0) == b""
    assert assembler.due is not None and assembler.tick(assembler.due) == b"2 %\n"
    assert assembler.due is None and assembler.finish() == b""


@pytest.mark.parametrize("reads", [(b"a\r\nb\r\n",), (b"a\r", b"\nb", b"\r", b"\n"), (b"a", b"\r\nb\r\n")])
def test_windows_newlines_are_newlines(reads: tuple[bytes, ...]) -> None:
    assert fed(*reads) == b"a\nb\n"


def test_empty_lines_stay() -> None:
    assert fed(b"\n\na\n\n") == b"\n\na\n\n"


def test_prefix_and_filter_work_line_by_line() -> None:
    assert prefixed(b"a\n\nb\n", b"[default0]:") == b"[default0]:a\n[default0]:\n[default0]:b\n"
    assert matching(b"loss 1\nstep\nacc 2\n", [b"loss", b"acc"]) == b"loss 1\nacc 2\n"
    assert matching(b"step\n", [b"loss"]) == b""


def test_the_last_lines_begin_with_a_whole_line() -> None:
    assert last_lines(b"first line\nsecond\nthird\n", 15) == "second\nthird\n"
    assert last_lines(b"x" * 20, 15) == "x" * 15


# --- routes ----------------------------------------------------------------------------------------------------------


def settings(**changes: object) -> OutputSettings:
    return OutputSettings(**{"folder": "/logs/node0", "torchrun_folder": "/t", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "copied", "console", "prefix"),
    [
        ({}, False, True, ""),
        ({"redirects": {-1: 1}}, True, False, ""),
        ({"redirects": {-1: 2}}, False, True, ""),
        ({"redirects": {0: 3}}, False, True, ""),
        ({"redirects": {1: 3}}, True, False, ""),
        ({"tees": {-1: 3}}, True, True, "[default1]:"),
        ({"tees": {1: 1}, "redirects": {-1: 3}}, True, True, "[default1]:"),
        ({"tees": {-1: 3}, "role": "trainer"}, True, True, "[trainer1]:"),
        ({"tees": {-1: 3}, "line_prefix_template": "<${rank}/${local_rank} ${x}>"}, True, True, "<5/1 ${x}>"),
        ({"console_local_ranks": (0,)}, False, False, ""),
        ({"console_local_ranks": (0,), "tees": {-1: 3}}, True, False, "[default1]:"),
        ({"redirects": {-1: 3}, "files": False}, False, True, ""),
    ],
)
def test_redirects_tees_and_ranks_route_as_in_torchrun(
    changes: dict[str, object], copied: bool, console: bool, prefix: str
) -> None:
    taken = route(settings(**changes), WorkerLabel(5, 1, FIRST, attempt=2), STDOUT)
    assert taken.copy == (Path("/t/attempt_2/1/stdout.log") if copied else None)
    assert (taken.console, taken.prefix) == (console, prefix)
    assert taken.log == (Path("/logs/node0/5.g1.out") if changes.get("files", True) else None)


def test_filtered_copies_are_made_of_teed_streams_only() -> None:
    chosen = settings(tees={0: 3}, stderr_filters=("loss",))
    assert route(chosen, WorkerLabel(0, 0, FIRST), STDERR).filtered == Path("/t/attempt_0/filtered_stderr.log")
    assert route(chosen, WorkerLabel(0, 0, FIRST), STDOUT).filtered is None
    assert route(chosen, WorkerLabel(1, 1, FIRST), STDERR).filtered is None


def test_a_spare_has_a_file_of_its_own_and_no_console() -> None:
    taken = route(settings(tees={-1: 3}), SpareLabel(4711), STDERR)
    assert (taken.log, taken.console, taken.copy) == (Path("/logs/node0/spare-4711.err"), False, None)


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_rotated_between_lines_and_one_older_one_is_kept(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "0.g1.out", Disk(tmp_path, pytest.fail), size_limit=100)
    lines = [b"%08d\n" % number for number in range(50)]
    for line in lines:
        file.write(line[:4], 0.0)
        file.write(line[4:], 0.0)
    file.close()
    kept = [(tmp_path / name).read_bytes() for name in ("0.g1.out.1", "0.g1.out")]
    assert b"".join(lines).endswith(b"".join(kept)) and all(len(part) <= 117 for part in kept)
    assert kept[1].startswith(b"000") and len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_is_said_once_and_the_gap_is_noted(tmp_path: Path) -> None:
    said: list[str] = []
    path, disk = tmp_path / "0.g1.out", Disk(tmp_path, said.append)
    path.symlink_to("/dev/full")
    file, other = LogFile(path, disk), LogFile(tmp_path / "1.g1.out", disk)
    file.write(b"lost\n", 0.0)
    file.write(b"lost too\n", 1.0)
    other.write(b"not even tried\n", 1.0)
    file.write(b"still full\n", RETRY_SECONDS)
    assert len(said) == 1 and "No space left" in said[0] and str(tmp_path) in said[0]
    path.unlink()
    file.write(b"kept\n", 2 * RETRY_SECONDS)
    assert len(said) == 2 and "again" in said[1]
    assert path.read_bytes() == b"[phoenix-run: up to 25 bytes could not be written here]\nkept\n"
    file.close()


def test_a_deleted_folder_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "node0" / "0.g1.out"
    file = LogFile(path, Disk(tmp_path, pytest.fail))
    file.write(b"first\n", 0.0)
    path.unlink()
    path.parent.rmdir()
    file.write(b"second\n", RETRY_SECONDS)
    assert path.read_bytes() == b"second\n"
    file.close()


def test_a_file_that_ends_within_a_line_is_continued_on_the_next(tmp_path: Path) -> None:
    for text in (b"cut o", b"new\n"):
        file = LogFile(tmp_path / "stdout.log", Disk(tmp_path, pytest.fail))
        file.write(text, 0.0)
        file.close()
    assert (tmp_path / "stdout.log").read_bytes() == b"cut o\nnew\n"


# --- the pump --------------------------------------------------------------------------------------------------------


class Console:
    """A sender that keeps what it got, and takes nothing while it is shut."""

    def __init__(self) -> None:
        self.got: list[FromOutput] = []
        self.shut = threading.Event()
        self.closed = False

    def send(self, body: FromOutput, timeout: float) -> bool:
        if self.shut.is_set():
            return False
        self.got.append(body)
        return True

    def close(self) -> None:
        self.closed = True

    def text(self, rank: int, stream: int = STDOUT) -> bytes:
        return b"".join(
            body.data
            for body in list(self.got)
            if isinstance(body, OutputChunk) and (body.rank, body.stream) == (rank, stream)
        )

    def ends(self) -> int:
        return sum(isinstance(body, OutputEnd) for body in list(self.got))


class Bench:
    """A pump with a console, and processes that are just pipes."""

    def __init__(self, folder: Path, **changes: object) -> None:
        self.console = Console()
        self.folder = folder / "node0"
        self.remarks: list[str] = []
        chosen = settings(**{"folder": str(self.folder), "torchrun_folder": "", **changes})
        self.pump = OutputPump(chosen, "node0", "job-1", lambda: self.console, self.remarks.append)
        self.open: list[int] = []

    def process(self, key: int, label: WorkerLabel | SpareLabel) -> tuple[int, int]:
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        self.pump.attach(key, out, err, label)
        self.open += [out_end, err_end]
        return out_end, err_end

    def end(self, *descriptors: int) -> None:
        for fd in descriptors:
            self.open.remove(fd)
            os.close(fd)

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.folder.glob("*"))}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**changes: object) -> Bench:
        made.append(Bench(tmp_path, **changes))
        return made[-1]

    yield make
    for one in made:
        one.pump.close(0.0)
        assert one.console.closed
        one.end(*list(one.open))


def test_lines_reach_console_and_file_and_the_end_is_told(bench: Callable[..., Bench], eventually: Eventually) -> None:
    b = bench()
    out, err = b.process(1, WorkerLabel(3, 1, FIRST))
    os.write(out, b"step 1\nste")
    eventually(lambda: b.console.text(3) == b"step 1\n")
    os.write(err, b"Traceback\n")
    os.write(out, b"p 2")
    assert not b.pump.finished(1)
    b.end(out, err)
    eventually(lambda: b.pump.finished(1))
    assert b.console.text(3) == b"step 1\nstep 2\n" and b.console.text(3, STDERR) == b"Traceback\n"
    assert b.console.ends() == 2 and b.pump.tail(1) == "Traceback\n"
    assert b.files() == {"3.g1.err": b"Traceback\n", "3.g1.out": b"step 1\nstep 2"}


def test_a_silent_process_leaves_no_file(bench: Callable[..., Bench], eventually: Eventually) -> None:
    b = bench()
    b.end(*b.process(1, WorkerLabel(0, 0, FIRST)), *b.process(2, SpareLabel(77)))
    eventually(lambda: b.pump.finished(1) and b.pump.finished(2))
    assert b.files() == {} and b.console.ends() == 2


def test_what_a_spare_writes_stays_apart_from_what_it_writes_as_a_worker(
    bench: Callable[..., Bench], eventually: Eventually
) -> None:
    b = bench()
    out, err = b.process(1, SpareLabel(77))
    os.write(out, b"warming up")
    eventually(lambda: b.files() == {"spare-77.out": b"warming up"})
    b.pump.relabel(1, WorkerLabel(2, 0, Generation(1, 4)))
    os.write(out, b"step 9\n")
    b.end(out, err)
    eventually(lambda: b.pump.finished(1))
    assert b.files() == {"2.g4.out": b"step 9\n", "spare-77.out": b"warming up"}
    assert b.console.text(2) == b"step 9\n" and b.console.ends() == 2


def test_a_slow_console_stops_its_writers_and_nothing_else(bench: Callable[..., Bench], eventually: Eventually) -> None:
    b = bench()
    b.console.shut.set()
    out, err = b.process(1, WorkerLabel(0, 0, FIRST))
    whole = b"".join(b"line %06d\n" % number for number in range(60_000))
    sent: list[int] = []
    writer = threading.Thread(target=lambda: sent.append(_write_all(out, whole)))
    writer.start()
    eventually(lambda: "0.g1.out" in b.files())
    silent = b.process(2, SpareLabel(5))
    os.write(silent[0], b"a spare's word\n")
    eventually(lambda: b.files().get("spare-5.out") == b"a spare's word\n")
    assert not sent and b.console.got == []
    b.console.shut.clear()
    writer.join(10)
    b.end(out, err)
    eventually(lambda: b.pump.finished(1))
    assert b.console.text(0) == whole


def _write_all(fd: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)


WRITER = """
import sys
for number in range(int(sys.argv[2])):
    print(sys.argv[1], number, "\u00b5" * (number % 50), flush=number % 7 == 0)
"""


def test_many_lines_from_four_processes_are_all_there_and_in_order(
    bench: Callable[..., Bench], eventually: Eventually
) -> None:
    b = bench()
    writers = []
    for rank in range(4):
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, "-c", WRITER, f"rank{rank}", "10000"]
        writers.append(subprocess.Popen(command, stdout=out_end, stderr=err_end, env=environment))
        os.close(out_end)
        os.close(err_end)
        b.pump.attach(rank, out, err, WorkerLabel(rank, rank, FIRST))
    assert [writer.wait(30) for writer in writers] == [0] * 4
    eventually(lambda: all(b.pump.finished(rank) for rank in range(4)))
    for rank in range(4):
        expected = "".join(f"rank{rank} {number} {'µ' * (number % 50)}\n" for number in range(10_000)).encode()
        assert b.console.text(rank) == expected == b.files()[f"{rank}.g1.out"]


def test_a_pipe_that_somebody_else_holds_open_is_given_up(bench: Callable[..., Bench], eventually: Eventually) -> None:
    b = bench()
    out, _ = b.process(1, WorkerLabel(0, 0, FIRST))
    os.write(out, b"last words")
    b.pump.abandon(1)
    eventually(lambda: b.pump.finished(1))
    assert b.console.text(0) == b"last words\n" and b.console.ends() == 2
    with pytest.raises(BrokenPipeError):
        os.write(out, b"nobody listens")


def test_a_promoted_spare_that_never_wrote_is_still_said_to_have_ended(
    bench: Callable[..., Bench], eventually: Eventually
) -> None:
    b = bench()
    b.process(1, SpareLabel(9))
    b.pump.relabel(1, WorkerLabel(0, 0, FIRST))
    b.pump.abandon(1)
    eventually(lambda: b.pump.finished(1))
    assert b.console.ends() == 2


def test_without_a_supervisor_closing_takes_no_longer_than_granted(
    bench: Callable[..., Bench], eventually: Eventually
) -> None:
    b = bench()
    b.console.shut.set()
    out, err = b.process(1, WorkerLabel(0, 0, FIRST))
    os.write(out, b"for the file\n")
    b.end(out, err)
    began = time.monotonic()
    b.pump.close(0.2)
    assert time.monotonic() - began < 1.5
    assert b.files() == {"0.g1.out": b"for the file\n"} and b.pump.finished(1)


def test_closing_waits_for_what_is_on_its_way(bench: Callable[..., Bench]) -> None:
    b = bench()
    out, err = b.process(1, WorkerLabel(0, 0, FIRST))
    os.write(out, b"almost missed\n")
    b.end(out, err)
    b.pump.close(5.0)
    assert b.console.text(0) == b"almost missed\n" and b.console.ends() == 2


def test_what_is_attached_to_a_closed_pump_is_closed(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.pump.close(1.0)
    out, _ = b.process(1, WorkerLabel(0, 0, FIRST))
    with pytest.raises(BrokenPipeError):
        os.write(out, b"x")


def test_torchruns_layout_is_written_beside_ours(
    bench: Callable[..., Bench], eventually: Eventually, tmp_path: Path
) -> None:
    folder = tmp_path / "none_x_node0"
    b = bench(torchrun_folder=str(folder), tees={0: 1}, redirects={-1: 3}, stdout_filters=("loss", "acc"))
    pipes = [b.process(rank, WorkerLabel(4 + rank, rank, FIRST)) for rank in range(2)]
    for rank, (out, err) in enumerate(pipes):
        os.write(out, b"loss %d\n10 %%\rno newline" % rank)
        b.end(out, err)
        eventually(lambda rank=rank: b.pump.finished(rank))
    written = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert written == {
        "attempt_0/0/stdout.log": b"loss 0\n10 %\rno newline",
        "attempt_0/0/stderr.log": b"",
        "attempt_0/1/stdout.log": b"loss 1\n10 %\rno newline",
        "attempt_0/1/stderr.log": b"",
        "attempt_0/filtered_stdout.log": b"[default0]:loss 0\n",
    }
    assert b.console.text(4) == b"loss 0\nno newline\n" and b.console.text(5) == b""
    shown = [body for body in b.console.got if isinstance(body, OutputChunk)]
    assert {body.prefix for body in shown} == {"[default0]:"}


def test_a_full_disk_costs_the_file_and_not_the_job(bench: Callable[..., Bench], eventually: Eventually) -> None:
    b = bench()
    b.folder.mkdir()
    (b.folder / "0.g1.out").symlink_to("/dev/full")
    out, err = b.process(1, WorkerLabel(0, 0, FIRST))
    for number in range(3):
        os.write(out, b"step %d\n" % number)
        eventually(lambda number=number: b.console.text(0).endswith(b"step %d\n" % number))
    b.end(out, err)
    eventually(lambda: b.pump.finished(1))
    assert len(b.remarks) == 1 and "No space left" in b.remarks[0]


def test_a_progress_bar_reaches_the_console_while_it_moves(bench: Callable[..., Bench], eventually: Eventually) -> None:
    b = bench()
    out, _ = b.process(1, WorkerLabel(0, 0, FIRST))
    os.write(out, b" 1 %\r 2 %\r")
    eventually(lambda: b.console.text(0) == b" 2 %\n")
    assert b.files()["0.g1.out"] == b" 1 %\r 2 %\r"
