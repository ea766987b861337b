"""The private bundle in a slot: read back in another process it is the same, bit for bit."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from checkpoint_nodes import G1, JOB
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from phoenix_launch.checkpoint.layout import Layout
from phoenix_launch.checkpoint.slots import SlotMemory, SlotReader, SlotWriter, slot_size
from phoenix_launch.copies import Stamp
from phoenix_runtime import Batches, ScriptError, TrainState
from phoenix_runtime.checkpoint.memory import SlotTargets, entry
from phoenix_runtime.checkpoint.private import Private, decoded, encoded, startup_of

STAMP = Stamp(G1, 3)
RECORD = b"what was received at the start"


def written(private: Private) -> SlotMemory:
    """A sealed slot with it."""
    tensors, extras = encoded(private)
    layout = Layout.of(entry(name, tensor) for name, tensor in tensors)
    memory = SlotMemory(slot_size(layout, len(extras)))
    writer = SlotWriter(memory.descriptor)
    data = writer.begin(JOB, "private 0", STAMP, layout, extras)
    SlotTargets().store(writer, data, layout, [tensor for _, tensor in tensors], lambda: None)
    writer.seal()
    return memory


def reader_of(descriptor: int) -> SlotReader:
    reader = SlotReader.attach(descriptor, JOB, "private 0", STAMP)
    assert reader is not None
    return reader


class Trained:
    """A state with something of every kind in its private bundle."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.model[0].register_buffer("flags", torch.rand(3, 3) > 0.5)
        self.model[0].register_buffer("wide", torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
        data = TensorDataset(torch.arange(24.0).view(8, 3))
        loader = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(seed))
        self.state = TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=torch.optim.lr_scheduler.StepLR(self.optimizer, 2),
            data=Batches(loader),
            average=torch.rand(4, dtype=torch.float64),
            generator=torch.Generator().manual_seed(seed),
            best={"loss": 1.0, "steps": [1, 2], "seen": {seed}},
            array=numpy.arange(3) + seed,
        )

    def forward(self) -> None:
        self.model(next(self.state.data)[0])
        self.state.finish_step()

    def digest(self) -> str:
        found = hashlib.sha256()
        for name, tensor in [*self.model.named_buffers(), ("average", self.state.average)]:
            found.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.tolist()}".encode())
        drawn = [torch.rand(1), numpy.random.rand(), random.random(), torch.rand(1, generator=self.state.generator)]
        batches = [next(self.state.data)[0].tolist() for _ in range(6)]
        rate = self.optimizer.param_groups[0]["lr"]
        found.update(f"{drawn} {batches} {rate} {self.state.best} {self.state.array} {self.state.step}".encode())
        return found.hexdigest()


def one_that_trained() -> tuple[Trained, Private]:
    trained = Trained(1)
    for _ in range(3):
        trained.forward()
    trained.state.step = 3
    trained.optimizer.step()  # without gradients
    trained.state.scheduler.step()
    trained.state.scheduler.step()
    captured = trained.state.capture()
    return trained, Private(captured, 3, RECORD, {"sections": [("eval", b"pickle")], "sizes": (1, 2)})


def take_over(descriptor: int) -> None:
    """In another process."""
    trained = Trained(2)
    private = decoded(reader_of(descriptor), trained.state)
    assert (private.step, private.startup) == (3, RECORD)
    assert private.more == {"sections": [("eval", b"pickle")], "sizes": (1, 2)}
    trained.state.restore(private.captured)
    print(trained.digest())


def test_another_process_reads_the_same_bits() -> None:
    trained, private = one_that_trained()
    memory = written(private)
    code = f"import test_private; test_private.take_over({memory.descriptor})"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "checkpoint")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        pass_fds=[memory.descriptor],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == trained.digest()


def test_no_tensor_is_in_the_pickle() -> None:
    model = nn.Module()
    model.register_buffer("large", torch.ones(1 << 16, dtype=torch.uint8))
    state = TrainState(model=model, same=torch.ones(1 << 16, dtype=torch.uint8))
    tensors, extras = encoded(Private(state.capture(), 0))
    assert sum(tensor.nbytes for _, tensor in tensors) > 2 << 16
    assert len(extras) < 1 << 14


def test_what_is_read_does_not_refer_to_the_slot() -> None:
    state = TrainState(x=torch.ones(5))
    memory = written(Private(state.capture(), 0))
    reader = reader_of(memory.descriptor)
    private = decoded(reader, state)
    reader.close()
    memory.view[:] = bytes(len(memory.view))
    state.x.zero_()
    state.restore(private.captured)
    assert state.x.tolist() == [1.0] * 5


def test_the_startup_record_can_be_read_by_who_has_built_nothing_yet() -> None:
    memory = written(Private(TrainState(x=torch.ones(2)).capture(), 0, RECORD))
    assert startup_of(reader_of(memory.descriptor)) == RECORD


@pytest.mark.parametrize("value", [lambda: 0, type("Local", (), {})()])
def test_what_cannot_be_pickled_is_said_to_be_so(value: object) -> None:
    parameter = torch.zeros(2, requires_grad=True)
    state = TrainState(optimizer=torch.optim.SGD([{"params": [parameter], "extra": value}], lr=0.1))
    with pytest.raises(ScriptError, match="cannot be copied for another process"):
        encoded(Private(state.capture(), 0))


def test_a_copy_of_something_else_is_said_to_be_unreadable() -> None:
    layout = Layout.of([])
    memory = SlotMemory(slot_size(layout, 7))
    writer = SlotWriter(memory.descriptor)
    writer.begin(JOB, "private 0", STAMP, layout, b"rubbish")
    writer.seal()
    with pytest.raises(ScriptError, match="cannot be read"):
        decoded(reader_of(memory.descriptor), TrainState())


def distributed(value: float) -> TrainState:
    """A module with a buffer that is a DTensor."""
    mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("all",))
    model = nn.Linear(2, 2)
    buffer = DTensor.from_local(torch.full((3,), value), mesh, [Replicate()], run_check=False)
    model.register_buffer("scale", buffer)
    return TrainState(model=model)


def test_a_buffer_that_is_a_dtensor_finds_its_mesh_again() -> None:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        memory = written(Private(distributed(7.0).capture(), 0))
        state = distributed(1.0)
        buffer: Any = state.model.scale
        state.restore(decoded(reader_of(memory.descriptor), state).captured)
        assert state.model.scale is buffer and buffer.to_local().tolist() == [7.0] * 3
        with pytest.raises(ScriptError, match="device mesh"):
            decoded(reader_of(memory.descriptor), TrainState())
    finally:
        dist.destroy_process_group()


def test_values_in_an_optimizers_state_are_part_of_it() -> None:
    """LBFGS keeps numbers and lists of tensors."""
    model, optimizer = lbfgs()
    state = TrainState(model=model, optimizer=optimizer)
    minimize(model, optimizer, 2)
    memory = written(Private(state.capture(), 2))
    again, others = lbfgs()
    second = TrainState(model=again, optimizer=others)
    with torch.no_grad():
        for mine, its in zip(again.parameters(), model.parameters(), strict=True):
            mine.copy_(its)
    (kept,) = (entry for entry in optimizer.state.values())
    others.state[again.weight].update({key: it.clone() for key, it in kept.items() if isinstance(it, torch.Tensor)})
    second.restore(decoded(reader_of(memory.descriptor), second).captured)
    minimize(model, optimizer, 2)
    minimize(again, others, 2)
    assert torch.equal(model.weight, again.weight)
    assert optimizer.state[model.weight]["n_iter"] == others.state[again.weight]["n_iter"]


def lbfgs() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


def minimize(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x = torch.linspace(-1, 1, 20).view(5, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(x) ** 2 - model(x)).mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)  # type: ignore[arg-type]
