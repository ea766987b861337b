"""One rank writes its state to disk and loads it again; what a disk can do meanwhile harms nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from phoenix_launch.checkpoint import folders
from phoenix_launch.copies import Stamp
from phoenix_launch.wire import Generation
from phoenix_runtime import TrainState
from phoenix_runtime.checkpoint import private_files
from phoenix_runtime.checkpoint.bundles import bundled
from phoenix_runtime.checkpoint.copier import Copier
from phoenix_runtime.checkpoint.durable import Durable, Place
from phoenix_runtime.checkpoint.filling import NO_COPIES, Footing
from phoenix_runtime.checkpoint.loading import load
from phoenix_runtime.checkpoint.private import Private
from phoenix_runtime.communicators.gate import Gate
from phoenix_runtime.errors import ScriptError
from phoenix_runtime.resuming import put_back

SECONDS = 10.0
JOB = "train-1a2b"
G1, G2 = Generation(1, 1), Generation(1, 2)
Eventually = Callable[..., object]


class Training:
    """A script of one rank."""

    def __init__(self, seed: int = 3) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.state = TrainState(model=self.model, optimizer=self.optimizer, best=0.5)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(5, 3)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state.step += 1

    def bits(self) -> list[Tensor]:
        kept = [item for entry in self.optimizer.state.values() for item in entry.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *kept, torch.get_rng_state()]
        return [tensor.detach().clone() for tensor in tensors]


@dataclass
class Writer:
    """A durable writer with whom it talks."""

    durable: Durable
    reported: list[Stamp] = field(default_factory=list)
    published: list[Stamp] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def write(self, training: Training, generation: Generation = G1) -> None:
        stamp = Stamp(generation, training.state.step)
        assert self.durable.due(stamp.version) and self.durable.idle()
        private = Private(training.state.capture(), training.state.step)
        self.durable.take(stamp, bundled(training.state, 0, 1), private)


@contextmanager
def writer(root: Path, interval: int = 1) -> Iterator[Writer]:
    made: Writer
    durable = Durable(
        Place(root, interval, JOB, 0, 1), Gate(), None,
        lambda stamp: made.reported.append(stamp), lambda stamp: stamp in made.published,
        lambda text: made.remarks.append(text),
    )  # fmt: skip
    made = Writer(durable)
    try:
        yield made
    finally:
        durable.end()


def publish(found: Writer) -> Path:
    """As the agent does when it is told to."""
    found.durable.finish(SECONDS)
    stamp = found.reported[-1]
    path = folders.publish(found.durable.place.root, JOB, stamp, keep=2)
    found.published.append(stamp)
    return path


def test_what_was_written_comes_back_bit_for_bit_in_another_process(tmp_path: Path) -> None:
    training = Training()
    training.train(3)
    with writer(tmp_path) as found:
        found.write(training)
        entry = training.bits()
        training.train(1)  # while it is written
        folder = publish(found)
    other = Training(seed=4)
    put_back(other.state, load(folder, other.state, 0, 1))
    assert (other.state.step, other.state.best) == (3, 0.5)
    assert all(map(torch.equal, other.bits(), entry))
    other.train(1)
    assert all(map(torch.equal, other.bits(), training.bits()))
    assert [list(entry) for entry in other.optimizer.state.values()] == [["step", "exp_avg", "exp_avg_sq"]] * 6


def test_any_tool_can_read_it(tmp_path: Path) -> None:
    training = Training()
    training.train(2)
    with writer(tmp_path) as found:
        found.write(training)
        folder = publish(found)
    read: dict[str, Tensor] = {}
    _load_state_dict(read, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    for name, tensor in [*training.model.named_parameters(), *training.model.named_buffers()]:
        assert torch.equal(read[f"model.{name}"], tensor.detach()), name
    assert torch.equal(
        read["optimizer[model.0.weight].exp_avg"], training.optimizer.state[training.model[0].weight]["exp_avg"]
    )


def test_the_interval_counts_completed_steps(tmp_path: Path) -> None:
    with writer(tmp_path, interval=4) as found:
        assert [version for version in range(13) if found.durable.due(version)] == [4, 8, 12]
        found.durable.begin_at(8)
        assert [version for version in range(13) if found.durable.due(version)] == [12]


def test_a_disk_that_fails_is_named_once_and_tried_again(tmp_path: Path) -> None:
    root = tmp_path / "file" / "ck"
    root.parent.touch()
    training = Training()
    with writer(root) as found:
        for _ in range(2):
            training.train(1)
            found.write(training)
            found.durable.finish(SECONDS)
        assert found.reported == []
        root.parent.unlink()
        for _ in range(2):
            training.train(1)
            found.write(training)
            publish(found)
    assert len(found.remarks) == 2
    assert f"no checkpoint of step 1 in {root}" in found.remarks[0] and "Not a directory" in found.remarks[0]
    assert found.remarks[1] == "checkpoints can be written again: step 3"
    assert folders.newest(root) == root / folders.visible_name(4)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "private/rank-00000")

    monkeypatch.setattr(private_files, "write", full)
    training = Training()
    training.train(1)
    with writer(tmp_path) as found:
        found.write(training)
        found.durable.finish(SECONDS)
    assert found.reported == [] and list(tmp_path.iterdir()) == []
    assert "No space left on device" in found.remarks[0]


class SlowDisk:
    """Writes when it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writing, self.go = threading.Event(), threading.Event()
        original = private_files.write

        def write(*arguments: object) -> None:
            self.writing.set()
            assert self.go.wait(SECONDS)
            original(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(private_files, "write", write)


def test_a_slow_disk_leaves_versions_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, training = SlowDisk(monkeypatch), Training()
    training.train(1)
    with writer(tmp_path) as found:
        found.write(training)
        assert disk.writing.wait(SECONDS)
        for version in (2, 3):
            assert found.durable.due(version) and not found.durable.idle()
            found.durable.missed(version)
        disk.go.set()
        publish(found)
        assert found.durable.idle() and found.durable.due(4)
    assert len(found.remarks) == 1 and "no checkpoint of step 2" in found.remarks[0]


def test_a_second_one_waits_until_the_first_is_visible(tmp_path: Path) -> None:
    training = Training()
    training.train(1)
    with writer(tmp_path) as found:
        found.write(training)
        assert found.durable.finish(SECONDS) == Stamp(G1, 1)
        assert not found.durable.idle()
        publish(found)
        assert found.durable.idle()


def test_a_failure_meanwhile_makes_it_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, training = SlowDisk(monkeypatch), Training()
    training.train(1)
    with writer(tmp_path) as found:
        found.write(training)
        assert disk.writing.wait(SECONDS)
        found.durable.stop()
        disk.go.set()
        found.durable.finish(SECONDS)
        assert found.reported == [] and found.remarks == []
        assert not found.durable.idle(), "a swap is under way"
        found.durable.resume(1)
        assert not found.durable.due(1) and found.durable.due(2)
        training.train(1)
        found.write(training, G2)
        publish(found)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [folders.visible_name(2)], "the void one was removed"


def test_one_that_is_agreed_upon_while_a_swap_begins_is_void(tmp_path: Path) -> None:
    training = Training()
    training.train(1)
    with writer(tmp_path) as found:
        captured = Private(training.state.capture(), 1)
        found.durable.stop()
        found.durable.take(Stamp(G1, 1), bundled(training.state, 0, 1), captured)
        found.durable.finish(SECONDS)
        assert found.reported == [] and list(tmp_path.iterdir()) == []


def checkpoint(root: Path) -> Path:
    training = Training()
    training.train(2)
    with writer(root) as found:
        found.write(training)
        return publish(found)


@pytest.mark.parametrize("place", [20, -1])
def test_a_private_file_whose_bits_have_changed_is_refused(place: int, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    path = folders.private_path(folder, 0)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(ScriptError, match="is damaged"):
        load(folder, Training().state, 0, 1)


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    wider = nn.Sequential(nn.Linear(3, 5))
    with pytest.raises(ScriptError):
        load(folder, TrainState(model=wider, optimizer=torch.optim.Adam(wider.parameters())), 0, 1)
    other = Training()
    more = nn.Linear(2, 2)
    with pytest.raises(ScriptError, match=r"has no more\.weight"):
        load(folder, TrainState(model=other.model, more=more, optimizer=other.optimizer, best=0.0), 0, 1)


def test_a_job_without_copies_in_memory_has_them_on_disk(tmp_path: Path) -> None:
    training = Training()
    with writer(tmp_path) as found:
        copier = Copier(JOB, 0, found.durable._gate, None, to_disk=found.durable)
        copier.resume(Footing(G1, NO_COPIES, 0, ""))
        for _ in range(2):
            captured = Private(training.state.capture(), training.state.step)
            copier.begin(Stamp(G1, training.state.step), bundled(training.state, 0, 1), captured)
            copier.wait(lambda: None)
            training.train(1)
        publish(found)
        copier.end()
    assert folders.newest(tmp_path) == tmp_path / folders.visible_name(1)
