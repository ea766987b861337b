"""How a process of a job that can be repaired goes through its steps, and through a swap: the loop's Repair under phoenix-run.

Everything here happens on the script's main thread, but for `outside`, which holds whichever thread is in a collective that
nobody would run again. In a swap a survivor leaves its step, restores what it lacks, connects its communicators anew and goes
on; a replacement comes in at the same point, after it has run the script's start alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final, NoReturn

from phoenix_launch.checkpoint.pairs import SlotRefusedError
from phoenix_launch.copies import SourceKind, Stamp
from phoenix_launch.local_messages import WorkerPlan
from phoenix_launch.messages import PlanPhase
from phoenix_launch.timeouts import timeout
from phoenix_launch.wire import Generation
from phoenix_runtime import link
from phoenix_runtime.checkpoint import bundles, restore
from phoenix_runtime.checkpoint.copier import Copier
from phoenix_runtime.checkpoint.disk import Disk
from phoenix_runtime.checkpoint.filling import NO_COPIES, Footing
from phoenix_runtime.checkpoint.fingerprints import withdrawal
from phoenix_runtime.checkpoint.private import Private
from phoenix_runtime.communicators.backend import PhoenixBackend
from phoenix_runtime.communicators.gate import StepAborted
from phoenix_runtime.communicators.recording import Recorder
from phoenix_runtime.communicators.shadow import Shadow
from phoenix_runtime.control import AgentGoneError, Control, SupersededError
from phoenix_runtime.errors import ScriptError
from phoenix_runtime.fault_points import FAULT_POINTS
from phoenix_runtime.late_groups import LateGroups
from phoenix_runtime.loop import GO_BACK, Promoted
from phoenix_runtime.resuming import (
    can_connect,
    can_copy,
    can_restore,
    neighbours,
    open_slots,
    other_nodes,
    packed,
    put_back,
    unpacked,
)
from phoenix_runtime.sections import SectionResults, TooLargeError
from phoenix_runtime.state import Captured, TrainState

IN_SECTION: Final = "it was in a section, which new processes repeat"


@dataclass(frozen=True, slots=True)
class _Left:
    """What must not change between two steps if the first of them is to be run again without what came between.

    `versions`: how often each tensor was changed in place; `communicated`: operations outside of steps so far.
    """

    step: int
    versions: tuple[int, ...]
    communicated: int

    @classmethod
    def seen(cls, step: int, held: Iterable[bundles.Bundle], backend: PhoenixBackend) -> _Left:
        versions = tuple([tensor._version for bundle in held for _, tensor in bundle.tensors])
        return cls(step, versions, backend.gate.between)


class Swaps:
    """One a process. `rank`, `world`: of the job; `check`: the loop's, which raises when the step cannot be finished."""

    repairs = True

    def __init__(
        self,
        backend: PhoenixBackend,
        control: Control,
        copier: Copier,
        *,
        rank: int,
        world: int,
        check: Callable[[], None],
        disk: Disk | None = None,
    ) -> None:
        self._backend, self._control, self._copier, self._disk = backend, control, copier, disk
        self._rank, self._world, self._check = rank, world, check
        first = control.plan
        self.generation = first.generation  # whose communicators this process has; a replacement: will have
        # All processes of the generation are new, and load what their predecessors have left in the slots.
        self._inherits = first if not first.alone and first.phase is PlanPhase.RUN and can_restore(first) else None
        self._stamp: Stamp | None = None  # of the state at the entry of the step under way, None: of no version
        self._captured: Captured | None = None  # its private bundle
        self._startup = b""  # the startup record, once it is final
        self._results = SectionResults()
        self._said_holds = False
        self._groups = LateGroups(control)
        self._copies = True  # in memory
        self._left: _Left | None = None  # by the step that was finished last
        self._at = -1  # the version at whose entry the script stands
        self._returns = 0  # how many steps before the one under way can be run again in place
        self._state: TrainState | None = None  # the one that steps are run with
        self.callbacks: list[Callable[[], None]] = []  # on_swap

    @property
    def alone(self) -> bool:
        return self._backend.alone

    # --- the loop's questions, in a job that is well -----------------------------------------------------------------

    def recall(self, state: TrainState) -> None:
        """A replacement's script finds the state as it was, and with it the step at which its loop begins."""
        if self._state is None and (self.alone or self._inherits is not None):
            self._load(state)
            self._stamp = self._captured = None  # it is brought there once more, right before its first step
            if self.alone:
                self._results.begin_to_pass()
            link.report(step=state.step)
        elif self._state is None and self._disk is not None and self._disk.load_into(state):
            link.report(step=state.step)

    def begin(self, state: TrainState) -> None:
        """What the script did since it made the state is undone: it did so before its predecessor's first step, too."""
        shadow = self._backend.startup
        if isinstance(shadow, Shadow):
            self._state = state
            if not shadow.first_step_differs:
                shadow.enter_step()
                put_back(state, self._come_in(state))
            return
        if self._inherits is not None:
            self._load(state)
        elif self._disk is not None:
            self._disk.load_into(state)
        self._state, self._inherits = state, None
        ground = self._control.plan.ground
        if ground is not None and ground.interval == 0:
            self._without_copies("copies in memory are off (--snapshot-interval 0)", state.step)
            return
        try:
            self._resume(self._control.wait_for(can_copy, timeout("copies_ready")), state.step)
        except TimeoutError:
            self._without_copies("not all nodes can keep copies in memory", state.step)

    def _without_copies(self, why: str, step: int) -> None:
        self._copies = False
        if self._disk is not None:
            self._copier.resume(Footing(self.generation, NO_COPIES, step, ""))
        if self._rank == 0:
            link.remark(f"{why}: a failure starts the script again")
        self._control.report(outside=why)

    def entered(self, state: TrainState, function: Callable[[], object], captured: Captured, *, again: bool) -> None:
        if self._state is not None and state is not self._state:
            raise ScriptError(
                "run_step was called with a second TrainState",
                hint="put everything that training changes into one TrainState",
            )
        FAULT_POINTS.step = state.step
        FAULT_POINTS.reached("entry")
        startup = self._backend.startup
        if isinstance(startup, Shadow):
            startup.enter_step()
            return
        if isinstance(startup, Recorder):
            startup.enter_step(state.step)
        if self._stamp is None or self._stamp.version != state.step:
            self._stamp = Stamp(self.generation, state.step)
        self._captured = captured
        held = bundles.bundled(state, self._rank, self._world)
        if not again:
            unchanged = self._left is not None and self._left == _Left.seen(state.step, held, self._backend)
            self._at, self._returns = state.step, min(GO_BACK, self._returns + 1) if unchanged else 0
        if not self._said_holds:
            self._say_holds(held)
            self._said_holds = True
            self._backend.late = self._groups.made
        self._groups.look()
        if not self._copies and self._disk is None:
            return
        alone = bundles.withdrawn(state)
        private_part = Private(captured, state.step, self._record(), self._results.to_keep(), alone)
        self._copier.begin(self._stamp, held, private_part, partial(self._withdraw, state))

    def _withdraw(self, state: TrainState, found: Mapping[str, tuple[str, ...]]) -> Sequence[bundles.Bundle]:
        """On the copier's thread: ranks were said to hold the same, and do not."""
        held = {bundle.key: bundle for bundle in bundles.bundled(state, self._rank, self._world)}
        if any(held[key].holders[0] == self._rank for key in found):
            link.remark(withdrawal(found))
        bundles.withdraw(state, chain.from_iterable(found.values()))
        anew = bundles.bundled(state, self._rank, self._world)
        self._say_holds(anew)
        return anew

    def _say_holds(self, held: Iterable[bundles.Bundle]) -> None:
        private = bundles.private_bundle(self._rank).key
        self._control.report(holds=(*(bundle.key for bundle in held), private), private=private)

    def before_optimizer(self, state: TrainState) -> None:
        FAULT_POINTS.reached("before-optimizer")
        if self.alone:
            raise StepAborted("the step was run alone")
        if self._copies or self._disk is not None:
            self._copier.wait(self._check)
        FAULT_POINTS.reached("optimizer")

    def finished(self, state: TrainState) -> None:
        FAULT_POINTS.reached("finished")
        self._results.step_finished()
        if self._control.said.stepped != self.generation:
            self._control.report(stepped=self.generation)
        self._left = _Left.seen(state.step, bundles.bundled(state, self._rank, self._world), self._backend)

    # --- sections ----------------------------------------------------------------------------------------------------

    def passed(self, name: str) -> tuple[object] | None:
        """A replacement runs no section: the others are past it."""
        if not self.alone:
            return None
        try:
            return (self._results.passed(name),)
        except TooLargeError:
            self._control.end_outside(f"the result of the section {name!r} was too large to be kept")

    def section_begins(self, state: TrainState) -> None:
        """Its entry is of no version: what all go back to if it is interrupted is the entry of the step before."""
        FAULT_POINTS.step = state.step
        FAULT_POINTS.reached("section")
        self._stamp = self._captured = self._left = None
        self._returns = 0

    def section_aborted(self, name: str, reason: BaseException) -> NoReturn:
        self._await_notice(reason)
        self._control.end_outside(IN_SECTION)

    def section_ended(self, name: str, value: object) -> None:
        remark = self._results.add(name, value, at_start=self._state is None)
        if remark:
            link.remark(remark)

    # --- a swap ------------------------------------------------------------------------------------------------------

    def repair(self, state: TrainState, reason: BaseException, *, dirty: bool) -> Captured | None:
        if isinstance(reason, Promoted):
            return self._come_in(state)
        if dirty:
            self._stamp = self._captured = None
        entry = self._captured
        while True:
            try:
                self._swap(state, self._await_notice(reason))
                break
            except SupersededError:
                continue
        for callback in self.callbacks:
            callback()
        return None if self._captured is entry else self._captured

    def _await_notice(self, reason: BaseException) -> Generation:
        """The generation that begins. A collective may fail before its cause is known here; without a cause it is an error."""
        own = self.generation
        try:
            return self._control.wait_for(lambda plan: plan.generation > own, timeout("notice")).generation
        except TimeoutError:
            self._backend.gate.reopen()
            raise reason from None

    def _come_in(self, state: TrainState) -> Captured:
        """A replacement, which was alone so far, joins the others."""
        self._stamp = self._captured = None
        FAULT_POINTS.step = state.step
        FAULT_POINTS.reached("coming in")
        while self._captured is None or self.alone:
            try:
                self._swap(state, self._control.plan.generation)
            except SupersededError:
                continue
        return self._captured

    def _swap(self, state: TrainState, generation: Generation) -> None:
        """Go through this generation's swap to its end. Raises SupersededError as soon as there is a later one."""
        control = self._control
        control.wait_in(generation, lambda plan: control.said.aborted == generation or self.alone)
        control.report(joined=generation, live=self._stamp, address="", at=self._at, returns=self._returns)
        construction = self._backend.construct(
            lambda addresses: control.report_in(generation, address=packed(addresses))
        )
        try:
            FAULT_POINTS.reached("joined")
            self._copier.release()  # while the others leave their step
            self._restore(state, control.wait_in(generation, can_restore))
            FAULT_POINTS.reached("restored")
            plan = control.wait_in(generation, can_connect)
            assert plan.resumption is not None and plan.resumption.stamp is not None
            for address in plan.resumption.addresses.values():
                construction.deliver(unpacked(address))
            construction.wait(timeout("rebuild"))
            self._resume(plan, plan.resumption.stamp.version)
            control.exchange(generation, lambda: self._backend.adopt(construction, timeout("rebuild")))
            self.generation = generation
            control.report(restored=generation)
            FAULT_POINTS.reached("connected")
            control.wait_in(generation, lambda plan: plan.phase is PlanPhase.RUN)
        except SupersededError:
            construction.abandon()
            raise
        except Exception as error:
            construction.abandon()
            if control.superseded(generation):  # nearly always: another process has just died
                raise SupersededError from None
            if isinstance(error, (OSError, SlotRefusedError)):
                control.end_outside(f"its state could not be loaded: {error}")
            raise

    # --- versions ----------------------------------------------------------------------------------------------------

    def _load(self, state: TrainState) -> None:
        """Bring the state to the version at which the generation resumes, or, if it is over already, did resume."""
        while self._captured is None:
            plan = self._inherits or self._control.wait_for(can_restore)
            try:
                self._restore(state, plan)
            except (OSError, SlotRefusedError) as error:
                if self._inherits is not None:
                    raise
                if not self._control.superseded(plan.generation):
                    self._control.end_outside(f"its state could not be loaded: {error}")
        put_back(state, self._captured)

    def _restore(self, state: TrainState, plan: WorkerPlan) -> None:
        """Load what this rank does not hold. Afterwards its parameters and optimizer state are of the plan's version."""
        assert plan.resumption is not None and plan.resumption.stamp is not None
        stamp = plan.resumption.stamp
        if all(source.kind is SourceKind.ITSELF for source in plan.sources):
            return
        self._stamp = self._captured = None
        with contextlib.closing(open_slots(plan)) as slots:
            private = restore.restore(
                state, plan.sources, stamp, slots, rank=self._rank, world=self._world, nodes=other_nodes(plan),
                beside=neighbours(plan, self._rank),
            )  # fmt: skip
        if private is None:
            raise RuntimeError(f"the plan names no copy of the private bundle of rank {self._rank}")
        self._stamp, self._captured = stamp, private.captured
        self._results.take(private.more)
        self._startup = private.startup

    def _resume(self, plan: WorkerPlan, version: int) -> None:
        assert plan.ground is not None
        if self._disk is not None:
            self._disk.durable.resume(version)
        self._copier.resume(Footing(plan.generation, plan.ground, version, plan.slots))

    def _record(self) -> bytes:
        startup = self._backend.startup
        if self._startup or not isinstance(startup, Recorder):
            return self._startup
        record = startup.record.to_bytes()
        if startup.over:
            self._startup = record
        return record

    # --- what cannot be repeated -------------------------------------------------------------------------------------

    def outside(self, error: BaseException) -> None:
        """A collective outside of a step failed. If that is the job's fault this never returns: the process is replaced."""
        own = self.generation
        try:
            self._control.wait_for(lambda plan: plan.generation > own, timeout("notice"))
        except TimeoutError:
            return
        self._control.end_outside("it was in a collective outside of run_step and run_section")

    def leave(self) -> None:
        """The script is over: wait for all others."""
        if self._disk is not None:
            self._disk.finish(timeout("last_checkpoint"))
        self._control.report(leaving=True, finished=0 if self._state is None else self._state.step)
        FAULT_POINTS.reached("leave")
        with contextlib.suppress(AgentGoneError):
            self._control.wait_for(lambda plan: plan.leave)
        self._copier.end()
        if self._disk is not None:
            self._disk.durable.end()

    def stop(self) -> None:
        """The script has failed: no thread of this process goes on."""
        if not self.alone:
            self._backend.abort(RuntimeError("the script has failed"), timeout("abort"))
        self._copier.end()
        if self._disk is not None:
            self._disk.durable.end()
