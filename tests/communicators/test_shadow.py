"""A process that was started alone, from the record of another, takes that one's place: bit for bit, in every parallelism."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import GroupName

from phoenix_runtime.communicators.gate import Gate
from phoenix_runtime.communicators.group import PhoenixGroup
from phoenix_runtime.communicators.inner import Devices, Identity, connect, unconnected
from phoenix_runtime.communicators.recording import Recorder, signature
from phoenix_runtime.communicators.shadow import ReplayError, Shadow
from phoenix_runtime.startup import LARGEST, Call, StartupRecord

FOLDER: Final = Path(__file__).parent
RUNTIME: Final = FOLDER.parent / "runtime"
THE_START: Final = "the start"
EARLY: Final = ("ddp with buffers and unused early", "fsdp early")
TIMEOUT: Final = 240.0


# --- whole ranks -----------------------------------------------------------------------------------------------------


def kinds() -> list[str]:
    """Read, not imported, as in test_repeated_steps.py."""
    for statement in ast.parse((RUNTIME / "small_models.py").read_text()).body:
        if isinstance(statement, ast.AnnAssign) and getattr(statement.target, "id", "") == "MODELS":
            assert isinstance(statement.value, ast.Dict)
            return [ast.literal_eval(key) for key in statement.value.keys if key is not None]
    raise AssertionError("small_models.py has no MODELS")


def parameters() -> list[Any]:
    """Those of which whole jobs lose ranks (tests/swaps) are run by hand here, and variants that start as another kind does."""
    here = ("ddp with buffers and unused", "gpipe")
    return [pytest.param(kind, marks=[] if kind in here else [pytest.mark.slow]) for kind in kinds()]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """All jobs are forked from one process, in which torch is loaded."""
    selected = [item.callspec.params.get("kind") for item in request.session.items if hasattr(item, "callspec")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH_", "GLOO_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(RUNTIME), environment.get("PYTHONPATH", "")])
    chosen = [THE_START, *(kind for kind in [*kinds(), *EARLY] if kind in selected)]
    command = [sys.executable, "-W", "ignore", str(FOLDER / "shadow_ranks.py"), *chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, done.stderr[-3000:]
    return {kind: [line for line in lines if line["kind"] == kind] for kind in {line["kind"] for line in lines}}


@pytest.mark.timeout(TIMEOUT + 20)
@pytest.mark.parametrize("kind", parameters())
def test_a_replacement_that_started_alone_trains_on_bit_for_bit(
    found: dict[str, list[dict[str, Any]]], kind: str
) -> None:
    (line,) = found[kind]
    assert "error" not in line, line["error"]
    assert line["replaced"] == line["calm"]
    assert len(set(line["calm"])) > 1
    assert line["first step differs"] == (kind in ("gpipe", "1f1b")), (
        "only pipelining exchanges shapes in its first step"
    )
    assert line["unreplayable"] == []


@pytest.mark.timeout(TIMEOUT + 20)
@pytest.mark.parametrize("kind", [pytest.param(EARLY[0], marks=pytest.mark.slow), EARLY[1]])
def test_a_replacement_that_knows_only_a_first_step_runs_its_own_alone_before(
    found: dict[str, list[dict[str, Any]]], kind: str
) -> None:
    (line,) = found[kind]
    assert "error" not in line, line["error"]
    assert line["first step differs"]
    assert line["replaced"] == line["calm"]


@pytest.mark.timeout(TIMEOUT + 20)
def test_whatever_a_script_asks_of_the_others_at_its_start_is_replayed(found: dict[str, list[dict[str, Any]]]) -> None:
    assert len(found[THE_START]) == 4
    for line in found[THE_START]:
        assert isinstance(line["received"], list), line["received"]
        assert line["alone"] == line["received"]
        (missing,) = line["unreplayable"]
        assert missing.startswith("allreduce of float32[262145] at startup_ranks.py:")


# --- recording -------------------------------------------------------------------------------------------------------


def group_of(size: int, inner: torch.distributed.ProcessGroup | None = None) -> PhoenixGroup:
    identity = Identity(GroupName("g"), 0, size, timedelta(seconds=10), tuple(range(size)))
    return PhoenixGroup(identity, Devices(), HashStore(), inner or unconnected(identity), Gate(), lambda *_: None)


@contextmanager
def recording() -> Iterator[tuple[PhoenixGroup, Recorder]]:
    """A group of one, over gloo."""
    identity = Identity(GroupName("g"), 0, 1, timedelta(seconds=10), (0,))
    group, recorder = group_of(1, connect(identity, Devices(), HashStore())), Recorder()
    recorder.attach(group)
    yield group, recorder
    group.shutdown()


def sum_up(group: PhoenixGroup, *values: float) -> None:
    group.allreduce([torch.tensor(values)]).wait()


def test_a_record_holds_what_came_before_the_first_step_and_survives_its_bytes() -> None:
    with recording() as (group, recorder):
        group.allreduce([torch.tensor([1, 2])]).wait()
        group.barrier().wait()
        recorder.enter_step(0)
        sum_up(group, 3.0)
        record = StartupRecord.from_bytes(recorder.record.to_bytes())
    assert record == recorder.record
    (total, barrier) = record.calls["g"]
    assert (total.operation, total.signature, total.outputs) == (
        "allreduce",
        "int64[2]",
        (b"\x01" + bytes(7) + b"\x02" + bytes(7),),
    )
    assert total.site.startswith("test_shadow.py:")
    assert barrier.operation == "barrier" and barrier.outputs == ()
    assert record.unreplayable == ()


def test_outputs_are_those_of_the_moment_of_the_wait() -> None:
    with recording() as (group, recorder):
        tensor = torch.tensor([5], dtype=torch.uint8)
        work = group.allreduce([tensor])
        work.wait()
        tensor.zero_()
        work.wait()
        recorder.enter_step(0)
    assert recorder.record.calls["g"][0].outputs == (b"\x05",)


def test_what_is_too_large_or_was_never_waited_for_is_named_with_its_place() -> None:
    with recording() as (group, recorder):
        sum_up(group, *[1.0] * (LARGEST // 4 + 1))
        unfinished = group.allreduce([torch.tensor([1])])
        sum_up(group, *[1.0] * (LARGEST // 4))
        recorder.enter_step(0)
        unfinished.wait()
    large, unwaited = recorder.record.unreplayable
    assert large.startswith(f"allreduce of float32[{LARGEST // 4 + 1}] at test_shadow.py:") and large.endswith(
        "group g"
    )
    assert unwaited.startswith("allreduce of int64[1] at test_shadow.py:")


def test_large_parameters_that_torch_sends_around_are_not_missed() -> None:
    with recording() as (group, recorder):
        tensor = torch.zeros(LARGEST)
        torch.distributed.utils._sync_params_and_buffers(group, [tensor], LARGEST, 0)
        recorder.enter_step(0)
    (call,) = recorder.record.calls["g"]
    assert call.outputs is None and call.restored
    assert recorder.record.unreplayable == ()


def test_a_first_step_that_is_like_the_second_needs_no_run_of_its_own() -> None:
    with recording() as (group, recorder):
        for completed in range(3):
            recorder.enter_step(completed)
            assert recorder.record.first_step_differs == (completed < 2), "as long as that is not known, it might"
            sum_up(group, float(completed))
        assert "_carry" not in vars(group), "the third step costs nothing"
    assert recorder.record.first_step == {}


def test_a_step_that_is_repeated_counts_once() -> None:
    with recording() as (group, recorder):
        for completed in (7, 7, 8, 8, 9):
            recorder.enter_step(completed)
            sum_up(group, 1.0)
    assert not recorder.record.first_step_differs


def test_shapes_that_come_in_the_first_step_only_are_kept() -> None:
    with recording() as (group, recorder):
        for completed in range(3):
            recorder.enter_step(completed)
            if not completed:
                group.allreduce([torch.tensor([4])]).wait()
            sum_up(group, 1.0)
    record = recorder.record
    assert record.first_step_differs
    assert [call.signature for call in record.first_step["g"]] == ["int64[1]"]


def test_signatures_of_many_tensors_are_short_and_differ() -> None:
    tensors = [torch.zeros(1)] * 1000
    one, other = signature(tensors, ()), signature([*tensors[1:], torch.zeros(2)], ())
    assert one != other
    assert len(one) < 200 and "1000 in all" in one


# --- replaying -------------------------------------------------------------------------------------------------------


def shadowed(*calls: Call, first_step: tuple[Call, ...] = ()) -> tuple[PhoenixGroup, Shadow]:
    group, shadow = group_of(4), Shadow(StartupRecord({"g": calls}, {"g": first_step}, bool(first_step)))
    shadow.attach(group)
    return group, shadow


RECEIVED: Final = Call("allreduce", "uint8[2]", "train.py:3", (b"\x07\x09",))


def test_what_was_received_is_received_again() -> None:
    group, shadow = shadowed(RECEIVED)
    tensor = torch.zeros(2, dtype=torch.uint8)
    work = group.allreduce([tensor])
    assert work.wait() and tensor.tolist() == [7, 9]
    shadow.enter_step()


@pytest.mark.parametrize(
    ("tensor", "this_time"),
    [(torch.zeros(3, dtype=torch.uint8), "allreduce of uint8[3]"), (torch.zeros(2), "allreduce of float32[2]")],
)
def test_another_shape_or_type_is_an_error_that_names_the_call(tensor: torch.Tensor, this_time: str) -> None:
    group, _ = shadowed(RECEIVED)
    with pytest.raises(ReplayError) as error:
        group.allreduce([tensor])
    assert str(error.value) == f"call 1 of group g was allreduce of uint8[2] at train.py:3; this time it is {this_time}"


def test_another_operation_or_one_too_many_or_too_few_is_an_error() -> None:
    group, shadow = shadowed(RECEIVED)
    with pytest.raises(ReplayError, match="this time it is barrier of nothing"):
        group.barrier()
    group, shadow = shadowed(RECEIVED)
    with pytest.raises(ReplayError, match=r"call 1 of group g was .* this time the first step came before it"):
        shadow.enter_step()
    group.allreduce([torch.zeros(2, dtype=torch.uint8)])
    with pytest.raises(ReplayError, match="call 2 of group g is barrier of nothing; 1 came before the first step"):
        group.barrier()


def test_what_was_not_recorded_is_plausible() -> None:
    group, _ = shadowed(Call("allgather", "float32[1] float32[1] float32[1] float32[1]", "train.py:3", None))
    outputs = [[torch.full((1,), 9.0) for _ in range(4)]]
    group.allgather(outputs, [torch.tensor([2.0])]).wait()
    assert torch.cat(outputs[0]).tolist() == [2.0] * 4


def test_in_the_step_that_is_run_alone_shapes_are_replayed_and_the_rest_is_plausible() -> None:
    group, shadow = shadowed(first_step=(RECEIVED, Call("recv", "int64[1] 1 0", "train.py:9", (b"\x05" + bytes(7),))))
    shadow.enter_step()
    numbers, size = torch.ones(2), torch.zeros(1, dtype=torch.int64)
    group.recv([numbers], 1, 0).wait()
    group.recv([size], 1, 0).wait()
    assert numbers.tolist() == [0, 0] and size.item() == 5
    group.recv([size], 1, 0).wait()
    assert size.item() == 0


def test_bytes_that_are_no_record_are_refused() -> None:
    with pytest.raises(ValueError):
        StartupRecord.from_bytes(b"\x93\x01")
    with pytest.raises(ValueError, match="format 7"):
        StartupRecord.from_bytes(StartupRecord({}, {}, False, format=7).to_bytes())
