"""Training states that are not a stack of float matrices come back bit for bit, or are refused by name at the first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checkpoint_nodes import G1, JOB, CheckpointNode
from torch import Tensor, nn

from phoenix_launch.checkpoint.client import SlotsLink
from phoenix_launch.copies import Source, SourceKind, Stamp
from phoenix_launch.messages import Ground
from phoenix_runtime import ScriptError, StepAborted, TrainState
from phoenix_runtime.checkpoint.bundles import bundled, private_bundle
from phoenix_runtime.checkpoint.copier import Copier
from phoenix_runtime.checkpoint.filling import Footing
from phoenix_runtime.checkpoint.private import Private
from phoenix_runtime.checkpoint.restore import restore
from phoenix_runtime.communicators.gate import Gate

SMALL = 10_000


class Odd(nn.Module):
    """Parameters of every shape and kind, one of them under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.waves = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.brief = nn.Parameter(torch.randn(5).to(torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.image = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.embedding = nn.Embedding(7, 4, sparse=True)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.counts = nn.Parameter(torch.arange(4), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)

    def loss(self) -> Tensor:
        parts = [self.scalar, self.empty, self.waves.abs(), self.brief, self.wide, self.image, self.transposed]
        total = torch.stack([(part.to(torch.float64) ** 2).sum() for part in parts]).sum()
        return total + (self.embedding(torch.tensor([1, 3])) ** 2).sum()


class Job:
    """The only rank of a job, with or without a past."""

    def __init__(
        self, node: CheckpointNode, model: nn.Module, optimizers: list[torch.optim.Optimizer], **more: Any
    ) -> None:
        self.node, self.model, self.optimizers = node, model, optimizers
        named = {f"optimizer{index}": each for index, each in enumerate(optimizers)}
        self.state = TrainState(model=model, **named, **more)
        self.gate = Gate()
        self.copier = Copier(JOB, 0, self.gate, None)
        self.copier.resume(Footing(G1, Ground({0: 0}, ((0, "a"),), (node.peer,)), 0, node.path))

    def copy(self) -> None:
        captured, version = self.state.capture(), self.state.step
        self.copier.begin(Stamp(G1, version), bundled(self.state, 0, 1), Private(captured, version))
        self.copier.wait(self.check)

    def check(self) -> None:
        if self.gate.closed:
            raise StepAborted from self.gate.reason

    def step(self, loss: Callable[[], Tensor]) -> None:
        self.copy()
        for each in self.optimizers:
            each.zero_grad()
        loss().backward()
        for each in self.optimizers:
            each.step()
        self.state.step += 1

    def restore(self, version: int) -> None:
        keys = [*(bundle.key for bundle in bundled(self.state, 0, 1)), private_bundle(0).key]
        sources = [Source(key, SourceKind.OWN_NODE, 0) for key in keys]
        link = SlotsLink(self.node.path, JOB, 0)
        link.generation = G1
        try:
            private = restore(self.state, sources, Stamp(G1, version), link, rank=0, world=1)
        finally:
            link.close()
        assert private is not None
        self.state.restore(private.captured)

    def bits(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: it.detach().clone() for name, it in self.model.named_parameters()}
        for number, each in enumerate(self.optimizers):
            for index, parameter in enumerate(each.param_groups[0]["params"]):
                for key, item in each.state.get(parameter, {}).items():
                    found[f"{number}.{index}.{key}"] = item.detach().clone() if isinstance(item, Tensor) else item
        return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) and value.stride() == other[name].stride() and value.dtype == other[name].dtype
        if isinstance(value, Tensor) else value == other[name]
        for name, value in one.items()
    )  # fmt: skip


@pytest.fixture
def made(start_node: Callable[..., CheckpointNode]) -> Iterator[Callable[..., Job]]:
    node = start_node(0)
    node.follow(G1)
    jobs: list[Job] = []

    def make(*arguments: Any, **options: Any) -> Job:
        jobs.append(Job(node, *arguments, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.copier.end()


def odd(made: Callable[..., Job], seed: int, **more: Any) -> Job:
    torch.manual_seed(seed)
    model = Odd()
    dense = [p for name, p in model.named_parameters() if p.requires_grad and "embedding" not in name]
    optimizers = [torch.optim.Adam(dense, lr=0.1), torch.optim.SparseAdam([model.embedding.weight], lr=0.1)]
    return made(model, optimizers, **more)


def test_parameters_of_every_shape_and_type_come_back_tied_ones_too(made: Callable[..., Job]) -> None:
    job = odd(made, 0)
    for _ in range(2):
        job.step(job.model.loss)
    expected = job.bits()
    job.step(job.model.loss)
    after = job.bits()
    job.restore(2)
    assert same(job.bits(), expected), "in place, a step back"
    new = odd(made, 1)
    new.restore(2)
    assert same(new.bits(), expected), "in a new process"
    assert new.model.head.weight is new.model.embedding.weight
    new.step(new.model.loss)
    assert same(new.bits(), after)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
@pytest.mark.parametrize(
    "make",
    [
        lambda seed: torch.sparse_coo_tensor([[0, 2]], [1.0 + seed, 2.0], (4,)),
        lambda seed: torch.quantize_per_tensor(torch.randn(5) + seed, 0.1, 0, torch.qint8),
        lambda seed: torch.tensor(1.5 + seed),
        lambda seed: torch.empty(0),
        lambda seed: torch.randn(3, dtype=torch.complex128) + seed,
    ],
    ids=["sparse", "quantized", "scalar", "empty", "complex"],
)
def test_tensors_of_the_state_itself_may_be_of_any_kind(
    made: Callable[..., Job], make: Callable[[int], Tensor]
) -> None:
    """Restored in place, or refused by name when the state is made."""
    torch.manual_seed(5)
    model, tensor = nn.Linear(2, 2), make(0)
    try:
        job = made(model, [torch.optim.SGD(model.parameters(), lr=0.1)], extra=tensor)
    except (TypeError, ScriptError) as error:
        assert "extra" in str(error)
        return
    job.copy()
    dense = (lambda t: t.dequantize() if t.is_quantized else t.to_dense() if t.is_sparse else t)(tensor).clone()
    with torch.no_grad():
        tensor.copy_(make(1))
    job.restore(0)
    again = (lambda t: t.dequantize() if t.is_quantized else t.to_dense() if t.is_sparse else t)(job.state.extra)
    assert torch.equal(again, dense)


def test_ten_thousand_small_tensors_are_copied_in_a_fraction_of_a_second(
    made: Callable[..., Job], record_property: Callable[[str, object], None]
) -> None:
    model = nn.ParameterList([nn.Parameter(torch.full((3,), float(number))) for number in range(SMALL)])
    job = made(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    job.copy()  # everything that is looked up once
    job.state.step = 1
    began = time.thread_time()
    job.copy()
    main_thread = time.thread_time() - began
    record_property("microseconds of the main thread a tensor", 1e6 * main_thread / SMALL)
    assert main_thread < 0.5
    expected = job.bits()
    with torch.no_grad():
        for parameter in model:
            parameter.zero_()
    job.restore(1)
    assert same(job.bits(), expected)


def test_an_object_that_cannot_be_copied_is_named_before_the_first_step() -> None:
    with pytest.raises(TypeError, match=r"state\.note\.callback is a .*generator, which cannot be captured"):
        TrainState(note={"callback": (number for number in range(3))})


def test_a_state_whose_shapes_change_between_steps_is_copied_as_it_is_each_time(made: Callable[..., Job]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = made(model, [optimizer], history=[torch.zeros(1)])

    def loss() -> Tensor:
        total: Tensor = model(torch.ones(3, 2)).square().mean()
        return total

    for _ in range(3):
        job.step(loss)
        job.state.history.append(torch.full((len(job.state.history) + 1,), 2.0))
    job.copy()
    job.state.history.clear()
    job.restore(3)
    assert [len(each) for each in job.state.history] == [1, 2, 3, 4]
