"""`inject-fault --every` and `--mtbf`: the same fault again and again, until the job ends."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from phoenix_launch.cli.asking import ask, current_status
from phoenix_launch.errors import EXIT_OK, PhoenixError, UsageError
from phoenix_launch.records.folders import JobFolder, wait_for_end

if TYPE_CHECKING:
    from phoenix_launch.command_messages import FaultRequest
    from phoenix_launch.job.schedules import Schedule

SHOWN: Final = 5  # by --dry-run, of a schedule without an end


@dataclass(frozen=True, slots=True)
class Times:
    """The words of --every, --count, --mtbf, --seed; empty: not given."""

    every: str = ""
    count: str = ""
    mtbf: str = ""
    seed: str = ""

    @property
    def given(self) -> bool:
        return bool(self.every or self.mtbf)

    def schedule(self) -> Schedule:
        """Raises UsageError."""
        from phoenix_launch.job.schedules import Schedule

        if self.every and self.mtbf:
            raise UsageError("--every and --mtbf are two ways to say when", hint="give one of them")
        return Schedule(
            every=_number("--every", self.every) if self.every else 0.0,
            mtbf=_number("--mtbf", self.mtbf) if self.mtbf else 0.0,
            seed=int(_number("--seed", self.seed, whole=True)) if self.seed else 0,
            count=int(_number("--count", self.count, whole=True, least=1)) if self.count else 0,
        )

    def check(self) -> None:
        """Raises UsageError."""
        if self.given:
            self.schedule()
        for name, text in (("--count", self.count), ("--seed", self.seed)):
            if text and not self.given:
                raise UsageError(f"{name} belongs to --every or --mtbf", hint="for example --every 60 --count 3")


def run(folder: JobFolder, request: FaultRequest, times: Times) -> int:
    """Until the job ends, or all are done. A fault that cannot be done now is said, and the next one comes in its turn."""
    from phoenix_launch.job.schedules import Aim

    schedule, record = times.schedule(), folder.read_record()
    aim = None if request.rank >= 0 or request.node or request.kind.value == "kill-supervisor" else Aim(schedule.seed)
    at = 0.0
    delays = schedule.delays()
    if request.dry_run and not schedule.count:
        delays = itertools.islice(delays, SHOWN)
    for delay in delays:
        at += delay
        if not request.dry_run and wait_for_end(record, delay):
            print(f"job {folder.job} has ended")
            break
        try:
            print(f"{at:9.1f} s  {_once(folder, request, aim)}", flush=True)
        except PhoenixError as error:
            if not folder.is_running():
                print(f"job {folder.job} has ended")
                break
            print(f"{at:9.1f} s  not done: {error.message}", flush=True)
            if "--allow-drills" in error.message:
                return error.exit_code
    return EXIT_OK


def _once(folder: JobFolder, request: FaultRequest, aim: object) -> str:
    from phoenix_launch.command_messages import Answer
    from phoenix_launch.job.schedules import Aim

    if isinstance(aim, Aim):
        found = aim.choose(request.kind, current_status(folder))
        if found is None:
            raise PhoenixError(f"there is nobody for {request.kind.value} to hit")
        request = msgspec.structs.replace(request, rank=found[0], node=found[1])
    answer = ask(folder, "control", request)
    return answer.text if isinstance(answer, Answer) else ""


def _number(name: str, text: str, *, whole: bool = False, least: float = 0.0) -> float:
    kind = "a whole number" if whole else "seconds, more than 0"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    wrong = not least <= value < float("inf") or (whole and not value.is_integer()) or (not whole and value == 0)
    if wrong:
        raise UsageError(f"{name} {text!r}: must be {kind}", hint=f"for example {name} {3 if whole else 60}")
    return value
