"""A step that is interrupted, put back and repeated leaves the same bits as one that was not."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import interrupted
import pytest
import torch
from interrupted import Interrupted, Training
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from phoenix_runtime.errors import ScriptError
from phoenix_runtime.state import TrainState

# The tests step schedulers before the optimizer, where an interruption has to undo it; torch warns of that order.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)`:UserWarning")


class Net(nn.Module):
    """Everything that a forward changes: BatchNorm, dropout, a buffer in place, a buffer that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.Linear(8, 3),
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.register_buffer("empty", None)
        self.calls: Tensor
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        self.calls += 1
        self.mean = 0.9 * self.mean + hidden.detach().mean(0)
        return torch.as_tensor(self.last(hidden + self.mean * 0.1))


def batch() -> Tensor:
    return torch.randn(5, 6)


def simple(make_scheduler: Callable[[torch.optim.Optimizer], Any], metric: bool = False) -> Callable[[], Training]:
    def build() -> Training:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = make_scheduler(optimizer)
        state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler)
        training = Training(state, lambda stop: None)

        def step(stop: Callable[[], None]) -> None:
            optimizer.zero_grad()
            loss = model(batch()).square().sum()
            scheduler.step(
                loss.item()
            ) if metric else scheduler.step()  # before the optimizer, where it has to be undone
            loss.backward()
            stop()
            optimizer.step()
            training.seen.append((loss.detach(), optimizer.param_groups[0]["lr"]))

        training.step = step
        return training

    return build


SCHEDULERS: dict[str, Callable[[], Training]] = {
    "LambdaLR": simple(lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch)),
    "OneCycleLR": simple(lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=20, cycle_momentum=False)),
    "CosineAnnealingLR": simple(lambda o: lr_scheduler.CosineAnnealingLR(o, 5)),
    "SequentialLR": simple(
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.CosineAnnealingLR(o, 6)], milestones=[2]
        )
    ),
    "ReduceLROnPlateau": simple(lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0), metric=True),
}


def scaled() -> Training:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    state = TrainState(model=model, optimizer=optimizer, scaler=scaler)

    def step(stop: Callable[[], None]) -> None:
        optimizer.zero_grad()
        scaler.scale(model(batch()).square().sum()).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stop()
        scaler.step(optimizer)
        scaler.update()

    return Training(state, step)


def averaged() -> Training:
    model = Net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = TrainState(model=model, average=average, optimizer=optimizer)

    def step(stop: Callable[[], None]) -> None:
        model(batch()).square().sum().backward()
        stop()
        optimizer.step()
        average.update_parameters(model)
        optimizer.zero_grad(set_to_none=False)

    return Training(state, step)


def several_optimizers() -> Training:
    """Two of them, a learning rate that is a tensor, one that the script sets between steps, lists and plain values."""
    generator, critic = Net(), Net()
    rate = torch.tensor(0.01)
    first = torch.optim.Adam(generator.parameters(), lr=rate, foreach=False)
    second = torch.optim.SGD([{"params": [p]} for p in critic.parameters()], lr=0.1, momentum=0.9)
    state = TrainState(
        models=[generator, critic], optimizers={"first": first, "second": second}, best=float("inf"), log=[]
    )

    def step(stop: Callable[[], None]) -> None:
        critic.requires_grad_(False)
        loss = (critic(batch()) - generator(batch())).square().sum()
        rate.mul_(0.5)
        second.param_groups[0]["seen"] = state.step
        state.best = min(state.best, loss.item())
        state.log.append(loss.item())
        loss.backward()
        stop()
        critic.requires_grad_(True)
        critic(batch()).square().sum().backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
        rate.mul_(2)

    def between() -> None:
        for group in second.param_groups:
            group["lr"] = 0.1 / (1 + state.step)
        state.count = state.step * 2

    return Training(state, step, between)


def generators() -> Training:
    """Global ones of python and torch (and numpy), and named ones."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch_one, python_one = torch.Generator().manual_seed(3), random.Random(3)
    named: dict[str, Any] = {"torch": torch_one, "python": python_one}
    draws: list[Callable[[], float]] = [random.random, python_one.gauss]
    try:
        import numpy
    except ImportError:
        pass
    else:
        named["numpy"], named["old"] = numpy.random.default_rng(3), numpy.random.RandomState(3)
        draws += [numpy.random.normal, named["numpy"].normal, named["old"].normal]
    state = TrainState(model=model, optimizer=optimizer, generators=named)
    training = Training(state, lambda stop: None)

    def step(stop: Callable[[], None]) -> None:
        optimizer.zero_grad()
        drawn = [draw() for draw in draws]
        noise = torch.randn(5, 6, generator=torch_one) + sum(drawn)
        model(noise).square().sum().backward()
        stop()
        optimizer.step()
        training.seen.append(drawn)

    training.step = step
    return training


RECIPES = {
    **SCHEDULERS,
    "GradScaler": scaled,
    "AveragedModel": averaged,
    "several optimizers": several_optimizers,
    "generators": generators,
}


@pytest.mark.parametrize("name", RECIPES)
def test_interrupted_steps_leave_the_same_bits_as_calm_ones(name: str) -> None:
    interrupted.assert_same(
        interrupted.run(RECIPES[name], 6, interruptions=2), interrupted.run(RECIPES[name], 6, interruptions=0)
    )


@pytest.mark.parametrize("name", [*SCHEDULERS, "GradScaler", "generators"])
def test_another_process_goes_on_with_the_same_bits(name: str) -> None:
    here, there = interrupted.moved(RECIPES[name], 4, 3)
    interrupted.assert_same(there, here)


def test_a_forgotten_generator_gives_other_bits() -> None:
    """The comparison of these tests sees what is not part of a state."""
    hidden = random.Random()

    def build() -> Training:
        training = scaled()
        hidden.seed(1)
        inner = training.step
        training.step = lambda stop: (training.seen.append(hidden.random()), inner(stop))
        return training

    assert interrupted.run(build, 2, interruptions=1) != interrupted.run(build, 2, interruptions=0)


def test_objects_stay_the_same_objects() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    weights, nested = torch.ones(2), {"list": [torch.zeros(1)]}
    state = TrainState(model=model, optimizer=optimizer, weights=weights, nested=nested)
    mean, rate = model.mean, optimizer.param_groups[0]["lr"]
    inner, tensor = nested["list"], nested["list"][0]
    entry = state.capture()
    model(batch())
    assert model.mean is not mean
    rate.mul_(3)
    weights.add_(1)
    tensor.add_(1)
    inner.append(torch.ones(3))
    nested["more"] = []
    state.restore(entry)
    assert state.model is model
    assert model.mean is mean and not mean.any()
    assert optimizer.param_groups[0]["lr"] is rate and rate == torch.tensor(0.1)
    assert state.weights is weights and weights.tolist() == [1, 1]
    assert state.nested is nested and list(nested) == ["list"]
    assert nested["list"] is inner and len(inner) == 1 and inner[0] is tensor and tensor.item() == 0


def test_absent_gradients_are_absent_again_and_present_ones_are_zeros() -> None:
    model = nn.Linear(2, 2)
    state = TrainState(model=model)
    entry = state.capture()
    model(torch.ones(1, 2)).sum().backward()
    state.reset_gradients(entry)
    assert model.weight.grad is None and model.bias.grad is None
    model(torch.ones(1, 2)).sum().backward()
    gradient = model.weight.grad
    entry = state.capture()
    model.bias.grad = None
    state.reset_gradients(entry)
    assert model.weight.grad is gradient and not gradient.any()
    assert model.bias.grad is not None and not model.bias.grad.any()


def test_what_a_step_takes_away_or_adds_is_undone() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(model=model, optimizer=optimizer, best=1.0)
    entry = state.capture()
    model.eval()
    model.register_buffer("late", torch.ones(1), persistent=False)
    model.first.weight.requires_grad_(False)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    optimizer.param_groups[0]["new"] = 1
    del optimizer.param_groups[0]["momentum"]
    state.found = [1, 2]
    del state.best
    state.restore(entry)
    assert model.training and model.norm.training
    assert "late" not in dict(model.named_buffers())
    model.register_buffer("late", torch.ones(1))
    assert model.first.weight.requires_grad
    assert len(optimizer.param_groups) == 1 and optimizer.param_groups[0]["momentum"] == 0
    assert "new" not in optimizer.param_groups[0]
    assert state.best == 1.0 and not hasattr(state, "found")


def test_plain_values_live_on_the_state() -> None:
    state = TrainState(best_loss=float("inf"), names=["a"])
    assert state.step == 0
    state.capture()
    state.best_loss = 1.5
    state.note = {"seen": (1, 2)}
    assert (state.best_loss, state.note, state.names) == (1.5, {"seen": (1, 2)}, ["a"])
    with pytest.raises(AttributeError, match="no 'best', only step, best_loss"):
        state.best  # noqa: B018


def test_objects_have_to_be_there_before_the_first_step() -> None:
    state = TrainState(value=None)
    state.model = nn.Linear(1, 1)
    state.capture()
    for name, value in {
        "other": nn.Linear(1, 1),
        "value": torch.ones(1),
        "model": nn.Linear(1, 1),
        "lists": [torch.ones(1)],
    }.items():
        with pytest.raises(ScriptError, match=rf"state\.{name} was assigned .* after the first step"):
            setattr(state, name, value)
    with pytest.raises(ScriptError, match=r"state\.model .* was an object"):
        state.model = 3
    with pytest.raises(ScriptError, match="deleted"):
        del state.model
    state.model = state.model  # the same one


@pytest.mark.parametrize("name", ["capture", "parameters", "parts", "_hidden"])
def test_names_of_its_own_are_refused(name: str) -> None:
    with pytest.raises(ScriptError, match=f"cannot call anything '{name}'"):
        TrainState(**{name: 1})


def test_parameters_come_once_and_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    extra = nn.Parameter(torch.ones(1))
    state = TrainState(model=model, again={"inner": model[0]}, extra=extra)
    state.optimizer = torch.optim.SGD([*model.parameters(), extra, nn.Parameter(torch.ones(1))])
    assert [name for name, _ in state.parameters()] == ["model.0.weight", "extra"]
    assert [name for name, _ in state.optimized_parameters()] == [
        "model.0.weight",
        "extra",
        "optimizer.param_groups[0][2]",
    ]
    assert [name for name, _ in state.named_modules()] == ["model", "again.inner"]
    assert [name for name, _ in state.named_optimizers()] == ["optimizer"]


def test_a_module_that_changed_between_steps_is_looked_through_again() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    state = TrainState(model=model)
    state.capture()
    model.append(nn.BatchNorm1d(3))
    assert "model.1.running_mean" in dict(state.buffers())
    model[1].running_mean = torch.full((3,), 2.0)
    entry = state.capture()
    model[1].running_mean = None
    state.restore(entry)
    assert model[1].running_mean.tolist() == [2.0] * 3
    assert "model.1.weight" in dict(state.parameters())


def test_a_captured_state_is_small_and_can_be_pickled() -> None:
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.Adam(model.parameters())
    state = TrainState(model=model, optimizer=optimizer)
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    assert len(pickle.dumps(state.capture())) < 30_000
    assert {name for name, _ in state.parts["optimizer"].tensors()} == {
        f"{index}.{key}" for index in (0, 1) for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_the_safe_point_of_the_data_can_end_a_step() -> None:
    from phoenix_runtime.data import Batches

    state = TrainState(sets={"train": Batches([1, 2, 3])})

    def stop() -> None:
        raise Interrupted

    state.watch_safe_points(stop)
    with pytest.raises(Interrupted):
        next(state.sets["train"])
    state.watch_safe_points(lambda: None)
    assert next(state.sets["train"]) == 1


def test_fingerprints_name_what_differs() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler, best=1.0, own=torch.Generator())
    before = dict(state.fingerprints())
    scheduler.step()
    torch.rand(1, generator=state.own)
    state.best = 2.0
    after = dict(state.fingerprints())
    different = {name for name in after if after[name] != before.get(name)}
    assert {"scheduler.last_epoch", "state.best", "own"} <= different
    assert any(name.startswith("optimizer") and name.endswith("lr") for name in different)
    assert "state.step" not in different
