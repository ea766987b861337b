"""The only rank of a job, as far as copies of its state go: it copies to nodes that a test has started, and restores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from checkpoint_nodes import G1, JOB, CheckpointNode
from torch import Tensor, nn

from phoenix_launch.checkpoint.client import SlotsLink
from phoenix_launch.copies import Source, SourceKind, Stamp
from phoenix_launch.messages import Ground
from phoenix_runtime import TrainState
from phoenix_runtime.checkpoint.bundles import bundled, private_bundle
from phoenix_runtime.checkpoint.copier import Copier
from phoenix_runtime.checkpoint.filling import Footing
from phoenix_runtime.checkpoint.private import Private
from phoenix_runtime.checkpoint.restore import restore
from phoenix_runtime.communicators.gate import Gate


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 2)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.drop(torch.relu(self.first(x))))
        return found


class Rank:
    """The only rank of a job, with copies of the versions that `step` is told to copy."""

    def __init__(
        self,
        node: CheckpointNode,
        make: Callable[[nn.Module], torch.optim.Optimizer],
        seed: int = 0,
        change: Callable[[nn.Module], None] = lambda model: None,
        others: Sequence[CheckpointNode] = (),
    ) -> None:
        torch.manual_seed(seed)
        self.others = others
        self.node, self.model = node, Model()
        change(self.model)
        self.optimizer = make(self.model)
        self.state = TrainState(model=self.model, optimizer=self.optimizer)
        self.copier = Copier(JOB, 0, Gate(), None)
        every = [node, *others]
        domains = tuple((each.index, f"domain {each.index}") for each in every)
        ground = Ground({0: node.index}, domains, tuple(each.peer for each in every), replicas=len(others))
        self.copier.resume(Footing(G1, ground, 0, node.path))

    def step(self) -> None:
        captured, version = self.state.capture(), self.state.step
        self.copier.begin(Stamp(G1, version), bundled(self.state, 0, 1), Private(captured, version))
        self.copier.wait(lambda: None)
        self.optimizer.zero_grad()
        (self.model(torch.ones(3, 6)) ** 2).mean().backward()
        self.optimizer.step()
        self.state.step += 1

    def restore(
        self, version: int, kind: SourceKind = SourceKind.OWN_NODE, where: int = 0, nodes: Sequence[int] | None = None
    ) -> None:
        """`where`: the node that is named; `nodes`: the others that may have a copy, here those that this rank copies to."""
        sources = [Source(bundle.key, kind, where) for bundle in bundled(self.state, 0, 1)]
        sources.append(Source(private_bundle(0).key, kind, where))
        link = SlotsLink(self.node.path, JOB, self.node.index)
        link.generation = G1
        try:
            nodes = [other.index for other in self.others] if nodes is None else nodes
            private = restore(self.state, sources, Stamp(G1, version), link, rank=0, world=1, nodes=nodes)
        finally:
            link.close()
        if private is not None:
            assert private.step == version
            self.state.restore(private.captured)

    def bits(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: it.tolist() for name, it in self.model.named_parameters()}
        for index, parameter in enumerate(self.model.parameters()):
            for key, item in self.optimizer.state.get(parameter, {}).items():
                found[f"{index}.{key}"] = item.tolist() if isinstance(item, Tensor) else repr(item)
        return found


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True)


MAKES: Final[dict[str, Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "adam": adam,
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "numbers": lambda model: torch.optim.ASGD(model.parameters(), lr=0.1),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.1),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
}
