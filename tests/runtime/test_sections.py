"""What sections returned reaches a process that takes another's place; and what a section, or a step, must not do."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from phoenix_runtime import ScriptError, TrainState
from phoenix_runtime.communicators.backend import PhoenixBackend
from phoenix_runtime.loop import Loop, NoRepair
from phoenix_runtime.sections import LARGEST, SectionResults, TooLargeError


def replacement(results: SectionResults) -> SectionResults:
    """As it comes out of the private bundle, in another process."""
    other = SectionResults()
    other.take(pickle.loads(pickle.dumps(results.to_keep())))
    other.begin_to_pass()
    return other


def test_a_replacement_passes_sections_in_their_order() -> None:
    results = SectionResults()
    for number in range(2):
        assert results.add("evaluate", number, at_start=False) == ""
    results.add("save", None, at_start=False)
    other = replacement(results)
    assert [other.passed("evaluate"), other.passed("evaluate"), other.passed("save")] == [0, 1, None]
    with pytest.raises(ScriptError, match=r"did not come to the section 'save' here \(but to: none\)"):
        other.passed("save")


def test_sections_of_the_start_are_passed_by_every_later_replacement_those_of_the_loop_until_a_step_is_done() -> None:
    results = SectionResults()
    results.add("load", "weights", at_start=True)
    results.step_finished()
    results.add("evaluate", 0.5, at_start=False)
    other = replacement(results)
    assert [other.passed("load"), other.passed("evaluate")] == ["weights", 0.5]
    results.step_finished()
    other = replacement(results)
    assert other.passed("load") == "weights"
    with pytest.raises(ScriptError, match="'evaluate'"):
        other.passed("evaluate")


def test_a_replacement_may_leave_out_sections_of_the_start_and_hands_on_what_it_got() -> None:
    results = SectionResults()
    results.add("load", 1, at_start=True)
    results.step_finished()
    results.add("evaluate", 2, at_start=False)
    other = replacement(results)
    assert other.passed("evaluate") == 2
    assert replacement(other).passed("load") == 1 and replacement(other).passed("evaluate") == 2


def test_what_is_larger_than_a_mebibyte_is_said_and_not_kept() -> None:
    results = SectionResults()
    assert f"more than the {LARGEST} that are kept" in results.add("gather", b"1" * LARGEST, at_start=False)
    assert len(pickle.dumps(results.to_keep())) < 200
    with pytest.raises(TooLargeError):
        replacement(results).passed("gather")


def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(
        ScriptError, match=r"what the section 'evaluate' returns cannot be kept: (.|\n)*hint: return plain"
    ):
        SectionResults().add("evaluate", lambda: 0, at_start=False)


# --- the loop ------------------------------------------------------------------------------------------------------------


class Waits(NoRepair):
    """Says when the copy of this version has to be whole."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def before_optimizer(self, state: TrainState) -> None:
        self.heard.append(f"optimizer after {state.step}")


class Script:
    def __init__(self, **more: Any) -> None:
        self.model = nn.Linear(2, 2)
        self.average = nn.Linear(2, 2).requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.state = TrainState(
            model=self.model, average=self.average, optimizer=self.optimizer, scaler=self.scaler, **more
        )
        self.repair = Waits()
        self.loop = Loop(PhoenixBackend().gate, self.repair)

    def update(self) -> None:
        with torch.no_grad():
            self.average.weight.lerp_(self.model.weight, 0.5)

    def step(self, factor: float, before: Callable[[], object], after: Callable[[], object]) -> None:
        before()
        self.scaler.scale(self.model(torch.ones(2)).sum() * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        after()
        self.optimizer.zero_grad()


def nothing() -> None:
    return None


def test_a_step_that_the_scaler_leaves_out_waits_for_its_copy_too() -> None:
    """An average that is updated then would change under the copy's hands."""
    script = Script()
    at: list[int] = []
    for factor in (1.0, float("inf"), 1.0):
        before = script.model.weight.detach().clone()
        script.loop.run_step(
            script.state,
            lambda factor=factor: script.step(factor, nothing, lambda: at.append(len(script.repair.heard))),
        )
        assert torch.equal(before, script.model.weight) is (factor != 1.0)
    assert script.repair.heard == ["optimizer after 0", "optimizer after 1", "optimizer after 2"]
    assert at == [1, 2, 3], "the script went on only after it"


def test_an_average_that_is_updated_before_the_optimizer_is_refused_by_name() -> None:
    script = Script()
    with pytest.raises(ScriptError, match=r"average\.weight was changed in step 1 before any optimizer stepped"):
        script.loop.run_step(script.state, lambda: script.step(1.0, script.update, nothing))


def test_an_average_that_is_updated_in_a_step_without_an_optimizer_is_refused_by_name() -> None:
    script = Script()
    with pytest.raises(ScriptError, match=r"average\.weight was changed in step 1"):
        script.loop.run_step(script.state, script.update)


def test_a_section_that_steps_an_optimizer_is_refused_before_it_does() -> None:
    script = Script()
    before = script.model.weight.detach().clone()
    with pytest.raises(ScriptError, match="a section stepped an optimizer"):
        script.loop.run_section(script.state, lambda: script.step(1.0, nothing, nothing), "evaluate")
    assert torch.equal(before, script.model.weight)
    assert not script.loop.in_section


def test_a_section_may_come_before_the_first_step_and_raises_what_its_function_raises() -> None:
    script = Script()
    assert script.loop.run_section(script.state, lambda: script.loop.in_section, "start") is True
    with pytest.raises(ZeroDivisionError):
        script.loop.run_section(script.state, lambda: 1 // 0, "evaluate")
    script.loop.run_step(script.state, lambda: script.step(1.0, nothing, script.update))
    assert script.state.step == 1
