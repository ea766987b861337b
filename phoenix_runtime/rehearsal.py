"""`--rehearse N`: the first N steps are aborted after their backward, repaired and repeated, and the bits are compared.

It answers the question that matters before a job relies on repeated steps: is everything that a step reads, and changes,
part of TrainState? What differs is named, and with it what changed in the script's reach without being restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from phoenix_runtime import link, randomness
from phoenix_runtime.communicators.backend import PhoenixBackend
from phoenix_runtime.communicators.gate import StepAborted
from phoenix_runtime.errors import RehearsalError
from phoenix_runtime.state import Captured, TrainState
from phoenix_runtime.suspects import Suspects

VARIABLE: Final = "PHOENIX_REHEARSE"
ABORT_SECONDS: Final = 10.0  # generous: nothing is lost when a rehearsal is slow
WAIT_FOR_ALL: Final = timedelta(minutes=30)  # as torch's own collectives would wait


class Rehearsed(Exception):
    """Why a rehearsed step is aborted."""


@dataclass(slots=True)
class Evidence:
    """What a step has made of its entry when its first optimizer is about to step."""

    values: dict[str, bytes | Tensor] = field(default_factory=dict)

    @classmethod
    def collect(cls, state: TrainState) -> Evidence:
        return cls(dict(_evidence(state)))

    def differences(self, other: Evidence) -> list[str]:
        names = {**self.values, **other.values}
        return [name for name in names if not _same(self.values.get(name), other.values.get(name))]


class Rehearsal:
    """A Repair that makes its own faults. `steps`: how many to rehearse; `say`: where findings go."""

    def __init__(self, backend: PhoenixBackend, steps: int, say: Callable[[str], None]) -> None:
        self._backend, self._left, self._say = backend, steps, say
        self._first: Evidence | None = None  # of the step under way, once its first run has come to its optimizer
        self._suspects: Suspects | None = None
        self._different: dict[str, None] = {}  # in the order in which they were found
        self._unrestored: dict[str, None] = {}
        self._done = 0

    # --- what the loop asks ------------------------------------------------------------------------------------------

    @property
    def repairs(self) -> bool:
        return self._left > 0

    alone = False

    def begin(self, state: TrainState) -> None:
        return None

    def entered(self, state: TrainState, function: Callable[[], object], captured: Captured, *, again: bool) -> None:
        if self._left <= 0:
            return
        if not again:
            self._first, self._suspects = None, Suspects.seen_from(function, state)
        elif self._suspects is not None:
            for text in self._suspects.changed():
                self._unrestored[text] = None

    def before_optimizer(self, state: TrainState) -> None:
        if self._left <= 0:
            return
        evidence = Evidence.collect(state)
        if self._first is None:
            self._first = evidence
            self._wait_for_all()
            stuck = self._backend.abort(Rehearsed("a rehearsed fault"), ABORT_SECONDS)
            if stuck:
                raise RehearsalError(f"after {ABORT_SECONDS:g} s these were still not aborted: {', '.join(stuck)}")
            raise StepAborted("a rehearsed fault")
        for name in self._first.differences(evidence):
            self._different[name] = None
        self._first, self._left, self._done = None, self._left - 1, self._done + 1
        if not self._left:
            self._conclude()

    def repair(self, state: TrainState, reason: BaseException, *, dirty: bool) -> None:
        if not isinstance(reason, Rehearsed):
            self._backend.gate.reopen()
            raise reason
        self._backend.rebuild(f"rehearsal{self._done}")

    def finished(self, state: TrainState) -> None:
        return None

    def passed(self, name: str) -> None:
        return None

    def section_begins(self, state: TrainState) -> None:
        return None

    def section_aborted(self, name: str, reason: BaseException) -> NoReturn:
        self._backend.gate.reopen()
        raise reason

    def section_ended(self, name: str, value: object) -> None:
        return None

    def recall(self, state: TrainState) -> None:
        return None

    def _wait_for_all(self) -> None:
        """Not by a collective: whoever breaks its communicators breaks with them what the others have not received yet."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        store = dist.distributed_c10d._get_default_store()
        name = f"phoenix/rehearsal/{self._done}"
        if store.add(f"{name}/here", 1) == dist.get_world_size():
            store.set(f"{name}/all", "")
        store.wait([f"{name}/all"], WAIT_FOR_ALL)

    # --- the verdict -------------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        count = f"{self._done} step{'s' * (self._done != 1)}"
        unrestored = "; ".join(self._unrestored)
        if self._different:
            raise RehearsalError(
                f"{count} rehearsed: a repeated step differs from its first run in {_listed(list(self._different))}"
                + (f"\n  changed in the step and not restored: {unrestored}" if unrestored else "")
                + "\n  hint: name what the step reads and changes in TrainState(...)"
            )
        self._say(f"{count} rehearsed: aborted, repaired and repeated bit for bit")
        if unrestored:
            self._say(f"changed in a step and not restored, without a visible effect: {unrestored}")


def _evidence(state: TrainState) -> Iterator[tuple[str, bytes | Tensor]]:
    for name, parameter in state.parameters():
        if parameter.grad is not None:
            yield f"the gradient of {name}", _kept(parameter.grad)
    for name, buffer in state.buffers():
        yield f"the buffer {name}", _kept(buffer)
    for name, value in randomness.fingerprints():
        yield f"the state of {name}", value
    for name, value in state.fingerprints():
        yield name, value


def _kept(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    copied: Tensor = local.detach().clone()
    return copied


def _same(one: bytes | Tensor | None, other: bytes | Tensor | None) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
    return type(one) is type(other) and one == other


def _listed(names: list[str]) -> str:
    shown = names[:8]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def asked(environ: Mapping[str, str]) -> int:
    """How many steps are to be rehearsed."""
    number = environ.get(VARIABLE, "")
    return int(number) if number.isdecimal() else 0


def from_environment(backend: PhoenixBackend, environ: Mapping[str, str]) -> Rehearsal | None:
    """The rehearsal that `--rehearse N` asks this process for, if it does."""
    if not asked(environ):
        return None
    speaks = (
        environ.get("RANK", "0") == "0"
    )  # all is well on every rank or on none; what differs is raised where it is found
    return Rehearsal(backend, asked(environ), link.remark if speaks else lambda text: None)
