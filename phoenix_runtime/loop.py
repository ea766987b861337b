"""`run_step` and `run_section`: whoever calls them only ever sees what is finished; what was aborted is repaired and run again.

Everything here happens on the script's main thread. The thread that brings notices closes the gate and breaks communicators
(`communicators/abort.py`); this one then comes back from whatever it was in, and finds the gate closed at the next safe point.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, Final, NoReturn, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from phoenix_runtime import link, rehearsal
from phoenix_runtime.buckets import fix_bucket_order
from phoenix_runtime.communicators.backend import BACKEND
from phoenix_runtime.communicators.gate import Gate, StepAborted
from phoenix_runtime.communicators.group import NAME
from phoenix_runtime.drills import DRILLS
from phoenix_runtime.errors import ScriptError
from phoenix_runtime.fault_points import FAULT_POINTS
from phoenix_runtime.state import Captured, TrainState
from phoenix_runtime.step_time import Pace

T = TypeVar("T")
GO_BACK: Final = 2  # steps at most that are run again before the caller's own
WATCHED_STEPS: Final = 3  # in so many first steps parameters are watched for changes outside of Optimizer.step


class Promoted(Exception):
    """Why a replacement's first step is aborted: it was run alone, for what it exchanges, and is run again with all others."""


class Repair(Protocol):
    """What makes communicators whole again after an abort: nobody, a rehearsal, or the whole job."""

    @property
    def repairs(self) -> bool:
        """Whether a step that fails now is going to be repaired. If not, errors of collectives are raised where they occur."""

    @property
    def alone(self) -> bool:
        """This process runs its first step without the others: for what the step exchanges, not for what it computes."""

    def begin(self, state: TrainState) -> None:
        """The first step of this state in this process is about to begin: a replacement brings it to where the job is."""

    def entered(self, state: TrainState, function: Callable[[], object], captured: Captured, *, again: bool) -> None:
        """A step or a section (or its repetition) is about to run; its private bundle was captured, or restored."""

    def before_optimizer(self, state: TrainState) -> None:
        """The first optimizer of the step is about to change parameters. May raise StepAborted."""

    def finished(self, state: TrainState) -> None:
        """A step is finished and counted."""

    def repair(self, state: TrainState, reason: BaseException, *, dirty: bool) -> Captured | None:
        """Return when the gate is open again: the private bundle with which to go on, None: the aborted attempt's own.

        `dirty`: an optimizer has stepped, so the state is of no version. Raises `reason`, or an error that tells why not, when
        that cannot be done.
        """

    def passed(self, name: str) -> tuple[object] | None:
        """What this section returned in the process that this one replaces, if that one had passed it already."""

    def section_begins(self, state: TrainState) -> None:
        """A section is about to run."""

    def section_aborted(self, name: str, reason: BaseException) -> NoReturn:
        """A section was aborted. It is repeated by new processes, or `reason` is raised."""

    def section_ended(self, name: str, value: object) -> None:
        """A section is finished."""

    def recall(self, state: TrainState) -> None:
        """A TrainState was made: in a replacement it returns to the script as it was in its predecessor."""


class NoRepair:
    """Without phoenix-run: an error of a collective is the script's, as under torchrun."""

    repairs = False
    alone = False

    def begin(self, state: TrainState) -> None:
        swappable = dist.is_initialized() and dist.get_backend() == NAME  # then why not has been said already
        if "PHOENIX_JOB" in os.environ and os.environ.get("RANK", "0") == "0" and not swappable:
            link.remark("phoenix_runtime.init_process_group was not called: a failure starts all workers again")

    def entered(self, state: TrainState, function: Callable[[], object], captured: Captured, *, again: bool) -> None:
        return None

    def before_optimizer(self, state: TrainState) -> None:
        return None

    def finished(self, state: TrainState) -> None:
        return None

    def repair(self, state: TrainState, reason: BaseException, *, dirty: bool) -> None:
        BACKEND.gate.reopen()
        raise reason

    def passed(self, name: str) -> None:
        return None

    def section_begins(self, state: TrainState) -> None:
        return None

    def section_aborted(self, name: str, reason: BaseException) -> NoReturn:
        BACKEND.gate.reopen()
        raise reason

    def section_ended(self, name: str, value: object) -> None:
        return None

    def recall(self, state: TrainState) -> None:
        return None


class Loop:
    """The loop of one process. `repair` is what happens to it when a step was aborted."""

    def __init__(self, gate: Gate, repair: Repair) -> None:
        self.gate = gate
        self.repair = repair
        self._running = ""  # run_step, or run_section: no piece of the script runs inside another
        self._entries: dict[int, Captured] = {}  # of the caller's step and of those before it, by version
        self._optimizers = 0  # that have begun to step in this attempt
        self._hooked = False
        self._pace = Pace(gate)
        self._prepared: weakref.WeakSet[TrainState] = weakref.WeakSet()  # whose first step was

    # --- the two verbs -----------------------------------------------------------------------------------------------

    def run_step(self, state: TrainState, function: Callable[[], T]) -> T:
        self._refuse_nesting("run_step")
        self._prepare(state)
        DRILLS.at_entry(state)
        link.inside(state.step + 1)
        try:
            value = self._until_whole(state, function)
            self._finish(state)
        finally:
            link.inside(-1)
        return value

    def _finish(self, state: TrainState) -> None:
        if not self._optimizers:
            self._refuse_pending_gradients(state)
        state.step += 1
        state.finish_step()
        FAULT_POINTS.step = state.step
        link.report(step=state.step)
        self._pace.finished(state)
        self.repair.finished(state)

    def run_section(self, state: TrainState, function: Callable[[], T], name: str, seconds: float = 0.0) -> T:
        self._refuse_nesting("run_section")
        self._watch_optimizers()
        before = self.repair.passed(name)
        if before is not None:
            return cast(T, before[0])
        state.watch_safe_points(self.check)
        self.repair.section_begins(state)
        link.allowed(seconds)
        try:
            value, whole = self._attempt("run_section", state, function)
        finally:
            link.allowed(0.0)
        if not whole:
            self.repair.section_aborted(name, self._reason())
        state.finish_step()
        self.repair.section_ended(name, value)
        return cast(T, value)

    @property
    def in_section(self) -> bool:
        """Whether a section is running; any thread may ask."""
        return self._running == "run_section"

    def _until_whole(self, state: TrainState, function: Callable[[], T]) -> T:
        base, entry = state.step, state.capture()  # what the caller's step begins with
        self._entries = {version: kept for version, kept in self._entries.items() if base - GO_BACK < version < base}
        self._entries[base] = entry
        now, again = entry, False
        state.watch_safe_points(self.check)
        while True:
            self.repair.entered(state, function, now, again=again)
            value, whole = self._attempt("run_step", state, function)
            if whole and state.step == base:
                return cast(T, value)
            if whole:  # a step before was run again: what the script did after it is in the entry of the next one
                self._finish(state)
                now = self._entries[state.step]
            else:
                now = self._repaired(state, now)
            state.reset_gradients(now)
            state.restore(now)
            again = True

    def _repaired(self, state: TrainState, now: Captured) -> Captured:
        dirty = self._optimizers > 0
        state.reshard()  # so that parameters are what an optimizer sees, not what a forward has gathered
        resumed = self.repair.repair(state, self._reason(), dirty=dirty)
        return now if resumed is None else resumed

    def _reason(self) -> BaseException:
        return self.gate.reason or RuntimeError("a step was aborted without a reason")

    def _attempt(self, kind: str, state: TrainState, function: Callable[[], T]) -> tuple[T | None, bool]:
        """Run the function once. Returns what it returned, and whether nothing of it was aborted."""
        gate = self.gate
        self._running, self._optimizers = kind, 0
        value: T | None = None
        watched = self._watched_versions(state) if kind == "run_step" else {}
        self._watched = watched
        gate.keeps = self.repair.repairs
        try:
            self.check()
            if kind == "run_step":
                DRILLS.step_begins()
            value = function()
            DRILLS.step_ends()
            if not self._optimizers:
                self._refuse_changed_parameters(state)
        except StepAborted:
            if not gate.closed and not self.repair.alone:
                raise
        except Exception:
            # What a step computes from the outputs of aborted collectives may well make it fail; if it fails again when
            # it is repeated, that was its own doing.
            if not gate.closed and not self.repair.alone:
                raise
        finally:
            try:
                self._settle()
            finally:
                gate.keeps = False
                self._running, self._watched = "", {}
        if self.repair.alone and kind == "run_step":
            gate.close(Promoted())
        if gate.closed:
            untouched = self._optimizers > 0 and not (gate.skipped or gate.failures)
            return value, untouched
        return value, True

    def _settle(self) -> None:
        """The end of a step is the end of all its operations: nothing of it may write into tensors later."""
        for work in self.gate.take_issued():
            cast(torch.distributed.Work, work).wait()

    # --- safe points -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises StepAborted when the step that runs here cannot be finished, and nothing of the state has changed yet."""
        if self.gate.closed and not self._optimizers and self._running:
            raise StepAborted("the step is going to be run again") from self.gate.reason

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Torch's global hook, which runs before all hooks of the optimizer itself."""
        if not self._running:
            return
        if self.in_section:
            raise ScriptError(
                "a section stepped an optimizer",
                hint="what changes parameters belongs into run_step, a section only communicates",
            )
        if not self._optimizers:
            self.check()
            self._refuse_changed_parameters(cast(TrainState, self._state))
            self.repair.before_optimizer(cast(TrainState, self._state))
        self._optimizers += 1

    # --- what a script must not do -----------------------------------------------------------------------------------

    def _refuse_nesting(self, kind: str) -> None:
        if self._running:
            raise ScriptError(
                f"{kind} was called inside {self._running}",
                hint="a step or a section is repeated as a whole: call one after the other",
            )

    def _refuse_pending_gradients(self, state: TrainState) -> None:
        if state.scales_gradients:
            return  # a scaler that saw an overflow skips the optimizer
        for name, parameter in state.parameters():
            if parameter.grad is not None and bool(_local(parameter.grad).any()):
                raise ScriptError(
                    f"step {state.step + 1} ended without an optimizer step and left a gradient in {name}",
                    hint="accumulate within one run_step (several backwards, one optimizer step), or call zero_grad()",
                )

    def _watched_versions(self, state: TrainState) -> dict[str, int]:
        if state.step >= WATCHED_STEPS:
            return {}
        return {name: _local(parameter.detach())._version for name, parameter in state.parameters()}

    def _refuse_changed_parameters(self, state: TrainState) -> None:
        """Not those of the optimizers alone: an average that a step updates is not captured at its entry either."""
        if not self._watched or self.gate.closed:
            return
        for name, parameter in state.parameters():
            before = self._watched.get(name)
            if before is not None and _local(parameter.detach())._version != before:
                raise ScriptError(
                    f"{name} was changed in step {state.step + 1} before any optimizer stepped",
                    hint="parameters may change in Optimizer.step and after it: a repeated step would change them twice",
                )

    # --- the first step ----------------------------------------------------------------------------------------------

    def _prepare(self, state: TrainState) -> None:
        self._state = state
        self._watch_optimizers()
        if state not in self._prepared:
            self._prepared.add(state)
            for remark in fix_bucket_order(state.modules()):
                link.remark(remark)
            self.repair.begin(state)

    def _watch_optimizers(self) -> None:
        if self._hooked:
            return
        self._hooked = True
        register_optimizer_step_pre_hook(self._before_optimizer)
        self._watch_scalers()
        if isinstance(self.repair, NoRepair):
            self.repair = rehearsal.from_environment(BACKEND, os.environ) or self.repair

    def _watch_scalers(self) -> None:
        """A scaler that saw an overflow leaves its optimizer out, but what the script does after that changes the state."""
        original = GradScaler.step

        @functools.wraps(original)
        def step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
            self._before_optimizer(optimizer)
            return original(scaler, optimizer, *args, **kwargs)

        GradScaler.step = step  # type: ignore[assignment,method-assign]

    _state: TrainState | None = None
    _watched: dict[str, int] = {}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return cast(torch.Tensor, tensor.to_local()) if hasattr(tensor, "to_local") else tensor


LOOP: Final = Loop(BACKEND.gate, NoRepair())
TrainState.made = lambda state: LOOP.repair.recall(state)


def run_step(state: TrainState, function: Callable[[], T]) -> T:
    """Run one optimizer step: `function` reads a batch, computes, and steps the optimizers.

    A step that is interrupted by the failure of a process is repaired and run again; the caller only ever sees the finished
    one. Without phoenix-run it calls `function` and counts.

    Args:
        state: everything that the step changes (see TrainState); its `step` is one more afterwards.
        function: called without arguments; may be called several times, its last value is returned.

    Raises:
        ScriptError: when the script breaks a rule that repeating steps needs (nested calls, pending gradients ...).
    """
    return LOOP.run_step(state, function)


def run_section(
    state: TrainState, function: Callable[[], T], name: str = "section", *, timeout: float | None = None
) -> T:
    """Run a piece that communicates but steps no optimizer (an evaluation, a collective save), between two steps.

    If a process fails meanwhile all start again from the copies in memory, and so does the section. In a process that
    takes another's place, a section which that one had passed returns what it returned there, without calling `function`.

    Args:
        state: as in run_step; its `step` stays.
        function: called without arguments. What it returns is pickled; over 1 MiB it is not kept, and a failure until the
            next step is done starts all processes again.
        name: one for each place in the script, the same in all processes.
        timeout: seconds that it may take on any rank before its ranks are taken for hanging (else --hang-timeout).

    Raises:
        ScriptError: what it returns cannot be pickled (where failures are repaired), or it stepped an optimizer.
    """
    if timeout is not None and not timeout > 0:
        raise ScriptError(f"run_section: timeout={timeout!r}", hint="give seconds, more than 0")
    return LOOP.run_section(state, function, name, timeout or 0.0)
