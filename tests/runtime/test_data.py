"""The same batches come again when a step is repeated, and another process continues where its predecessor stood."""

from __future__ import annotations

import collections
import copy
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import interrupted
import pytest
import torch
from interrupted import Training, bits
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from phoenix_runtime import randomness
from phoenix_runtime.data import Batches
from phoenix_runtime.errors import ScriptError
from phoenix_runtime.state import TrainState

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's


class Noisy(Dataset[Tensor]):
    """Augmentations draw from torch's and python's global generators, wherever they run."""

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(1).item(), random.random()])


class Counted(Noisy):
    """Draws nothing."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Streamed(IterableDataset[Tensor]):
    """Has epochs of its own and no length."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(7, generator=torch.Generator().manual_seed(self.epoch))
        return iter([torch.tensor([index, torch.rand(1).item()]) for index in order.tolist()])


class Stateful:
    """A loader with a state of its own, as torchdata's: where it stands, and the order of its epoch."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.at = 0
        self.loaded = False
        self.fetched = 0

    def __iter__(self) -> Iterator[int]:
        if not self.loaded:
            self.order, self.at = torch.randperm(5).tolist(), 0
        self.loaded = False
        while self.at < len(self.order):
            self.at += 1
            self.fetched += 1
            yield self.order[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at, self.loaded = state["order"], state["at"], True


def with_own_generator() -> DataLoader[Tensor]:
    return DataLoader(Noisy(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5))


def with_replacement() -> DataLoader[Tensor]:
    data = Noisy()
    return DataLoader(data, batch_size=2, sampler=RandomSampler(data, replacement=True, num_samples=40))


def distributed() -> DataLoader[Tensor]:
    data = Noisy(11)
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=1, seed=3))


def in_batch_sampler() -> DataLoader[Tensor]:
    data = Noisy(11)
    sampler = DistributedSampler(data, num_replicas=2, rank=0, seed=3)
    return DataLoader(data, batch_sampler=BatchSampler(sampler, 2, drop_last=True))


def with_workers(**options: Any) -> DataLoader[Tensor]:
    return DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=1, **options)


def torchdatas(workers: int) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    data = Counted() if workers else Noisy()  # what workers have drawn is in no state of torchdata's
    return module.StatefulDataLoader(data, batch_size=2, shuffle=True, num_workers=workers)


LOADERS: dict[str, Callable[[], Any]] = {
    "a list": lambda: [torch.ones(1) * index for index in range(4)],
    "a function": lambda: lambda: (torch.rand(1) for _ in range(3)),
    "shuffled": lambda: DataLoader(Noisy(), batch_size=3, shuffle=True),
    "own generator": with_own_generator,
    "with replacement": with_replacement,
    "DistributedSampler": distributed,
    "batch sampler": in_batch_sampler,
    "iterable dataset": lambda: DataLoader(Streamed(), batch_size=2),
    "workers": with_workers,
    "persistent workers": lambda: with_workers(persistent_workers=True),
    "a loader with a state": Stateful,
    "StatefulDataLoader": lambda: torchdatas(0),
    "StatefulDataLoader with a worker": lambda: torchdatas(1),
}


def training_on(make: Callable[[], Any]) -> Callable[[], Training]:
    """Two batches a step, and dropout, which draws from the same generator as the data."""

    def build() -> Training:
        model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        state = TrainState(model=model, optimizer=optimizer, data=Batches(make()))
        training = Training(state, lambda stop: None)

        def step(stop: Callable[[], None]) -> None:
            optimizer.zero_grad()
            for _ in range(2):
                batch = torch.as_tensor(next(state.data), dtype=torch.float32)
                training.seen.append(batch)
                torch.rand(1)
                model(batch.reshape(-1, 1)).square().sum().backward()
            stop()
            optimizer.step()

        training.step = step
        return training

    return build


@pytest.mark.parametrize("name", LOADERS)
def test_interrupted_steps_see_the_same_batches_and_draw_the_same_numbers(name: str) -> None:
    build = training_on(LOADERS[name])
    interrupted.assert_same(interrupted.run(build, 5, interruptions=2), interrupted.run(build, 5, interruptions=0))


@pytest.mark.parametrize("steps", [0, 2, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_another_process_continues_with_the_same_batches(name: str, steps: int) -> None:
    here, there = interrupted.moved(training_on(LOADERS[name]), steps, 4)
    interrupted.assert_same(there, here)


@pytest.mark.parametrize("name", ["own generator", "workers"])
def test_a_loaders_generator_that_is_part_of_the_state_is_left_as_after_the_fetch(name: str) -> None:
    def build() -> Training:
        training = training_on(LOADERS[name])()
        loader = training.state.data.loader
        loader.generator = loader.sampler.generator = torch.Generator().manual_seed(5)
        training.state.own = loader.generator
        return training

    interrupted.assert_same(interrupted.run(build, 8, interruptions=1), interrupted.run(build, 8, interruptions=0))
    here, there = interrupted.moved(build, 4, 4)
    interrupted.assert_same(there, here)


def test_it_never_ends_and_tells_everybody_the_epoch_once() -> None:
    told: list[tuple[str, int]] = []

    class Told(SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            told.append(("sampler", epoch))

    class Data(Noisy):
        def set_epoch(self, epoch: int) -> None:
            told.append(("dataset", epoch))

    data = Data(2)
    batches = Batches(DataLoader(data, sampler=Told(data)), epoch=3)
    assert told == []
    assert [int(next(batches)[0, 0]) for _ in range(5)] == [0, 1, 0, 1, 0]
    assert told == [(who, epoch) for epoch in (3, 4, 5) for who in ("sampler", "dataset")]
    assert batches.epoch == 5


@pytest.mark.parametrize("loader", [[], {}, iter([])])
def test_a_loader_that_gives_nothing_is_an_error(loader: Any) -> None:
    with pytest.raises(ScriptError, match="the loader gave no batch in epoch 0"):
        next(Batches(loader))


def test_a_generator_can_be_read_only_once() -> None:
    batches = Batches(number for number in range(2))
    assert [next(batches), next(batches)] == [0, 1]
    for _ in range(2):
        with pytest.raises(ScriptError, match=r"no batch in epoch 1(.|\n)*give the function that makes it"):
            next(batches)


def test_something_that_cannot_be_iterated_is_refused() -> None:
    with pytest.raises(TypeError, match="wants a data loader"):
        Batches(3)


# --- what a repeated batch is made of ------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Tensor
    y: list[Any]


@dataclass
class Sample:
    x: Tensor
    names: list[str]


class Bag:
    """A batch class of the script's own."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.extra = x, {"deep": [x]}


def repeated(batch: Any, use: Callable[[Any], object]) -> tuple[Any, Any]:
    """What a step gets first, after which it does something to it, and what it gets when it is repeated."""
    batches = Batches([batch])
    start = batches.capture()
    first = next(batches)
    use(first)
    batches.restore(start)
    return first, next(batches)


def test_a_repeated_batch_has_fresh_containers_around_the_same_tensors() -> None:
    x, loop = torch.ones(2), []
    loop.append(loop)
    batch = {
        "list": [x, "text"],
        "pair": Pair(x, [1]),
        "sample": Sample(x, ["a"]),
        "bag": Bag(x),
        "ordered": collections.OrderedDict(a=x),
        "user": collections.UserDict(a=x),
        "loop": loop,
        "again": x,
    }

    def use(given: dict[str, Any]) -> None:
        given["list"].append(given.pop("again"))
        given["pair"].y.clear()
        given["sample"].x = None
        given["sample"].names.append("b")
        given["bag"].x = None
        given["bag"].extra["deep"].clear()
        del given["ordered"]["a"]
        del given["user"]["a"]

    _, second = repeated(batch, use)
    assert second["list"] == [x, "text"] and second["list"][0] is x and second["again"] is x
    assert second["pair"].x is x and second["pair"].y == [1] and type(second["pair"]) is Pair
    assert second["sample"].x is x and second["sample"].names == ["a"]
    assert second["bag"].x is x and second["bag"].extra["deep"] == [x]
    assert second["ordered"]["a"] is x and type(second["ordered"]) is collections.OrderedDict
    assert second["user"]["a"] is x
    assert second["loop"][0] is second["loop"] and second["loop"] is not loop


def test_a_tensor_that_was_changed_in_place_is_named() -> None:
    def use(batch: dict[str, Any]) -> None:
        batch["images"][0].mul_(2)

    with pytest.raises(ScriptError, match=r"batch 0 cannot be given again: its tensor images\.0 was changed in place"):
        repeated({"images": [torch.ones(2)]}, use)


def test_a_batch_that_asks_for_gradients_comes_again_without() -> None:
    def attack(batch: Tensor) -> None:
        batch.requires_grad_()
        batch.square().sum().backward()  # type: ignore[no-untyped-call]

    _, second = repeated(torch.ones(2), attack)
    assert not second.requires_grad and second.grad is None


def test_arrays_and_tensors_without_a_version_are_copied() -> None:
    numpy = pytest.importorskip("numpy")
    with torch.inference_mode():
        tensor = torch.ones(2)

    def use(batch: list[Any]) -> None:
        batch[0] *= 2
        with torch.inference_mode():
            batch[1].mul_(2)

    _, (array, again) = repeated([numpy.ones(2), tensor], use)
    assert array.tolist() == [1, 1] and again.tolist() == [1, 1]


def test_finished_batches_are_dropped() -> None:
    batches = Batches([torch.ones(1), torch.zeros(1)])
    next(batches)
    assert len(batches._fetched) == 1
    batches.finish_step()
    assert not batches._fetched
    start = batches.capture()
    assert next(batches).item() == 0
    batches.restore(start)
    assert batches.position().place() == start.place()
    batches.finish_step()  # what was not given again stays
    assert next(batches).item() == 0 and next(batches).item() == 1


def test_a_safe_point_comes_before_anything_is_fetched() -> None:
    batches = Batches(iter([1, 2]))

    def stop() -> None:
        raise interrupted.Interrupted

    batches.safe_point = stop
    with pytest.raises(interrupted.Interrupted):
        next(batches)
    batches.safe_point = lambda: None
    assert next(batches) == 1


# --- positions -----------------------------------------------------------------------------------------------------------


def test_a_loaders_own_state_is_used_instead_of_fetching_again() -> None:
    first = Batches(Stateful())
    drawn = [next(first) for _ in range(3)]
    first.finish_step()
    position = pickle.loads(pickle.dumps(first.capture()))
    second = Batches(Stateful())
    second.load(position)
    assert second.loader.fetched == 0
    assert sorted([*drawn, next(second), next(second)]) == [0, 1, 2, 3, 4]
    assert second.position().place() == (0, 5, 5)


def test_a_state_is_not_asked_for_before_the_loader_was_read() -> None:
    """torchdata's loader begins an epoch when it is asked, which draws random numbers."""
    loader = Stateful()
    loader.state_dict = lambda: pytest.fail("asked")  # type: ignore[method-assign]
    batches = Batches(loader)
    assert batches.capture().begin is None


def test_loading_a_position_leaves_the_global_generators_alone() -> None:
    batches = Batches(DataLoader(Noisy(), shuffle=True))
    for _ in range(3):
        next(batches)
    batches.finish_step()
    position = copy.deepcopy(batches.capture())
    before = bits(randomness.capture())
    other = Batches(DataLoader(Noisy(), shuffle=True))
    other.load(position)
    assert bits(randomness.capture()) == before
    assert int(next(other)[0, 0]) == int(next(batches)[0, 0])


def test_a_shorter_loader_cannot_continue() -> None:
    batches = Batches([1, 2, 3])
    for _ in range(3):
        next(batches)
    batches.finish_step()
    with pytest.raises(ScriptError, match="epoch 0 ended after 2 batches; in the process before it had at least 3"):
        Batches([1, 2]).load(batches.capture())


def test_an_older_position_of_its_own_is_loaded_too() -> None:
    """A survivor that is one step ahead has dropped the batches of the step before."""
    torch.manual_seed(1)
    batches = Batches(DataLoader(Noisy(4), batch_size=1, shuffle=True))
    positions, seen = [], []
    for _ in range(6):
        positions.append(batches.capture())
        seen.append(int(next(batches)[0, 0]))
        batches.finish_step()
    for index in (5, 1, 3):
        batches.restore(positions[index])
        rest = 4 - index % 4  # the next epoch's order depends on what is drawn until then
        assert [int(next(batches)[0, 0]) for _ in range(rest)][: len(seen) - index] == seen[index : index + rest]
