"""A rehearsal repeats the first steps, finds nothing where all is listed, and names what is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phoenix_runtime import Batches, RehearsalError, TrainState
from phoenix_runtime.communicators.backend import PhoenixBackend
from phoenix_runtime.loop import Loop, NoRepair
from phoenix_runtime.rehearsal import Rehearsal, from_environment

STEPS = 5


def loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(64.0).view(16, 4)), batch_size=2, shuffle=True)


@dataclass
class Script:
    """A training script: `step` reads a batch, adds what `noise` gives, and steps."""

    model: nn.Module
    noise: Callable[[], Tensor | float]
    listed: dict[str, Any]

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.state = TrainState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, data=Batches(loader()), **self.listed
        )

    def step(self) -> Tensor:
        (batch,) = next(self.state.data)
        loss: Tensor = (self.model(batch) + self.noise()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.detach()


def run(script: Script, rehearsed: int, seed: int = 3) -> tuple[list[str], list[float], Tensor]:
    """What was said, the losses, and the parameters at the end."""
    said: list[str] = []
    backend = PhoenixBackend()
    loop = Loop(backend.gate, Rehearsal(backend, rehearsed, said.append) if rehearsed else NoRepair())
    torch.manual_seed(seed)
    losses = [float(loop.run_step(script.state, script.step)) for _ in range(STEPS)]
    assert script.state.step == STEPS
    return said, losses, torch.cat([parameter.detach().flatten() for parameter in script.model.parameters()])


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))


def test_a_script_that_lists_everything_repeats_bit_for_bit_and_trains_as_without_a_rehearsal() -> None:
    generators = {"draws": torch.Generator().manual_seed(2), "dice": random.Random(4)}

    def noise(draws: torch.Generator, dice: random.Random) -> Tensor:
        return torch.randn(2, generator=draws) * dice.random()

    said, losses, parameters = run(Script(model(), lambda: noise(*generators.values()), generators), rehearsed=3)
    assert said == ["3 steps rehearsed: aborted, repaired and repeated bit for bit"]
    generators = {"draws": torch.Generator().manual_seed(2), "dice": random.Random(4)}
    _, calm, expected = run(Script(model(), lambda: noise(*generators.values()), generators), rehearsed=0)
    assert losses == calm and torch.equal(parameters, expected)


def test_a_hidden_counter_is_named() -> None:
    calls = 0

    def noise() -> float:
        nonlocal calls
        calls += 1
        return float(calls)

    with pytest.raises(RehearsalError, match=r"gradient of model\.0\.weight") as error:
        run(Script(model(), noise, {}), rehearsed=2)
    assert "calls (0 -> 1)" in str(error.value) and "TrainState" in str(error.value)


def test_a_hidden_counter_in_the_scripts_own_object_is_named() -> None:
    class Noise:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self) -> float:
            self.calls += 1
            return float(self.calls)

    with pytest.raises(RehearsalError, match=r"noise\.calls \(0 -> 1\)"):
        run(Script(model(), Noise(), {}), rehearsed=1)


def test_an_unlisted_generator_is_named() -> None:
    draws = torch.Generator().manual_seed(2)
    with pytest.raises(RehearsalError, match=r"not restored: .*draws"):
        run(Script(model(), lambda: torch.randn(2, generator=draws), {}), rehearsed=2)


def test_an_unlisted_buffer_is_named() -> None:
    class Running(nn.Module):
        """Its running mean should have been registered as a buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)
            self.mean = torch.zeros(2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            return y - self.mean

    with pytest.raises(RehearsalError, match=r"not restored: .*model\.mean"):
        run(Script(Running(), lambda: 0.0, {}), rehearsed=2)


def test_what_changes_without_an_effect_is_mentioned_and_no_error() -> None:
    seen: list[int] = []

    def noise() -> float:
        seen.append(len(seen))
        return 0.0

    said, _, _ = run(Script(model(), noise, {}), rehearsed=2)
    assert said[0] == "2 steps rehearsed: aborted, repaired and repeated bit for bit"
    assert said[1].startswith("changed in a step and not restored, without a visible effect: ") and "seen" in said[1]


def test_an_error_of_the_script_is_no_rehearsed_fault() -> None:
    def noise() -> float:
        raise ZeroDivisionError("of the script")

    with pytest.raises(ZeroDivisionError, match="of the script"):
        run(Script(model(), noise, {}), rehearsed=1)


@pytest.mark.parametrize(("asked", "rehearses"), [("", False), ("0", False), ("2", True), ("two", False)])
def test_the_environment_asks_for_a_rehearsal(asked: str, rehearses: bool) -> None:
    assert (from_environment(PhoenixBackend(), {"PHOENIX_REHEARSE": asked}) is not None) is rehearses
