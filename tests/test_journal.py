"""Every event is a line of its own, and neither a torn line nor a full disk costs more than that line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phoenix_launch.records.journal import Fault, JobFinished, Journal, RankMove, Swap, WorkerStarted, read_events
from phoenix_launch.wire import Generation

SECOND = Generation(1, 2)
MOVE = {"rank": 1, "from_node": "node0", "to_node": "node2", "source": "script"}
EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("job_started", {"job": "j-1", "nodes": ["node0"], "spares": [], "settings": {"nodes": "1"}}),
    ("worker_started", {"node": "node0", "rank": 0, "pid": 7}),
    ("spare_parked", {"node": "node0", "pid": 8}),
    ("step", {"step": 3, "loss": 0.5, "step_s": 0.1, "tokens": 4096}),
    ("fault", {"kind": "worker", "node": "node0", "ranks": [0, 1], "detail": "killed by SIGKILL"}),
    ("straggler", {"rank": 2, "node": "node1", "compute_s": 0.3, "median_s": 0.1, "over": False}),
    (
        "corruption",
        {"ranks": [2], "holders": [0, 1, 2], "bundle": "ranks 0-2", "tensor": "model.w", "step": 6},
    ),
    (
        "swap",
        {"rung": 2, "lost_ranks": [1], "moves": [MOVE], "resumed_step": None, "lost_steps": None}
        | {"phases": {"quiesce": 0.25}, "total": 0.5, "why": ""},
    ),
    ("redundancy", {"state": "degraded", "why": "1 failure domain for 1 replica"}),
    ("checkpoint", {"step": 100, "path": "/x"}),
    ("drill", {"kind": "kill-node", "target": "node1"}),
    (
        "drill_ended",
        {"kind": "kill-node", "target": "node1", "detection": 0.1, "recovery": 1.2, "redundancy": 0.5, "lost_steps": 0},
    ),
    ("node_drained", {"node": "node1"}),
    ("supervisor_resumed", {"term": 2, "nodes": ["node0", "node1"], "adopted": True}),
    ("job_finished", {"exit_code": 0, "steps": None, "goodput": None}),
]


@pytest.mark.parametrize(("event", "fields"), EVENTS, ids=[event for event, _ in EVENTS])
def test_an_event_is_a_line_with_its_time_its_generation_and_its_fields(
    tmp_path: Path, event: str, fields: dict[str, Any]
) -> None:
    journal = Journal(tmp_path / "events.jsonl", pytest.fail)
    journal.write(event, SECOND, **fields)
    journal.close()
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    written = json.loads(line)
    assert abs(written.pop("t") - time.time()) < 10
    assert written == {"event": event, "generation": {"term": 1, "n": 2}, **fields}
    assert len(read_events(tmp_path / "events.jsonl")) == 1


def test_events_come_back_typed_and_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl", pytest.fail)
    for event, fields in EVENTS:
        journal.write(event, SECOND, **fields)
    journal.close()
    events = read_events(tmp_path / "events.jsonl")
    assert len(events) == len(EVENTS)
    assert isinstance(events[4], Fault) and events[4].ranks == (0, 1)
    assert isinstance(events[7], Swap) and events[7].moves == (RankMove(1, "node0", "node2", "script"),)
    assert isinstance(events[-1], JobFinished) and events[-1].generation == SECOND


@pytest.mark.parametrize("fields", [{"node": "n", "rank": 0}, {"node": "n", "rank": 0, "pid": 1, "host": "x"}])
def test_an_event_with_other_fields_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    journal = Journal(tmp_path / "events.jsonl", pytest.fail)
    with pytest.raises(msgspec.ValidationError):
        journal.write("worker_started", SECOND, **fields)
    assert not (tmp_path / "events.jsonl").exists()


def test_a_torn_line_is_left_out_and_the_next_begins_afresh(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for pid in (1, 2):
        journal = Journal(path, pytest.fail)
        journal.write("worker_started", SECOND, node="node0", rank=0, pid=pid)
        journal.close()
        with path.open("ab") as torn:
            torn.write(b'{"event":"worker_started","t":17')
    events = read_events(path)
    assert [event.pid for event in events if isinstance(event, WorkerStarted)] == [1, 2] and len(events) == 2


def test_what_a_later_version_wrote_does_not_disturb(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    head = '{"t": 1.5, "generation": {"term": 1, "n": 2},'
    path.write_text(f'{head} "event": "eclipse"}}\n{head} "event": "redundancy", "state": "full", "since": 3}}\n')
    assert [type(event).__name__ for event in read_events(path)] == ["Redundancy"]
    assert read_events(tmp_path / "nothing") == []


def test_a_full_disk_is_said_once_and_the_job_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    journal = Journal(path, said.append)
    for _ in range(3):
        journal.write("redundancy", SECOND, state="full")
    assert len(said) == 1 and "No space left" in said[0]
    path.unlink()
    journal.write("redundancy", SECOND, state="degraded")
    journal.close()
    assert len(read_events(path)) == 1 and said[1:] == ["the journal is written again; 3 events are missing in it"]
