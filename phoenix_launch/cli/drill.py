"""The drill verb."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from phoenix_launch.cli.asking import ask, current_status
from phoenix_launch.cli.command import Command, job_argument
from phoenix_launch.errors import EXIT_OK, EXIT_WORKER_FAILED, PhoenixError, UsageError
from phoenix_launch.records.folders import JobFolder, choose, jobs_root, wait_for_end

if TYPE_CHECKING:
    from phoenix_launch.job.drills import DrillPlan
    from phoenix_launch.job.schedules import Drilled

LOOK: Final = 0.25  # seconds between two looks at the job
PATIENCE: Final = 300.0


def drill(job: str, plan: str, patience: str) -> int:
    """Do the drills of a file on a running job, one after the other, and say what became of each.

    FILE has one drill a line, in the syntax of --drill: "kill-node --node 1 --after 20" begins 20 seconds after the one
    before was over, "hang --rank 0 --at-step 300" when all ranks have done 300 steps. # begins a comment. The next one begins
    when the one before is over: all ranks run, and the job is as redundant as it was.

    The job must have been started with --allow-drills. Exits with 0 if the job recovered from all of them.
    """
    if not plan:
        raise UsageError("drill needs a file of drills", hint="for example phoenix-run drill --plan drills.txt")
    from phoenix_launch.job.schedules import read_plans, summary

    try:
        text = Path(plan).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{plan} cannot be read: {error}", hint="give a text file with one drill a line") from None
    plans, seconds = read_plans(text, plan), _seconds(patience)
    folder = choose(jobs_root(os.environ), job)
    if not folder.is_running():
        raise UsageError(
            f"job {folder.job} does not run: there is nothing to drill",
            hint="start one with `phoenix-run --allow-drills SCRIPT`",
        )
    done = []
    for each in plans:
        done.append(_one(folder, each, seconds))
        print(done[-1].line(), flush=True)
    print(summary(done))
    return EXIT_OK if all(each.recovered for each in done) else EXIT_WORKER_FAILED


def _one(folder: JobFolder, plan: DrillPlan, patience: float) -> Drilled:
    from phoenix_launch.command_messages import Answer
    from phoenix_launch.job.schedules import Drilled, is_ready

    name = plan.kind.value
    record, since = folder.read_record(), time.monotonic()
    try:
        while folder.is_running() and not is_ready(plan, current_status(folder), time.monotonic() - since):
            if time.monotonic() - since > plan.after + patience:
                return Drilled(name, why=f"not all ranks came to step {plan.at_step} in {patience:g} s")
            wait_for_end(record, LOOK)
        asked = time.time()
        answer = ask(folder, "control", plan.request)
    except PhoenixError as error:
        return Drilled(name, why=error.message if folder.is_running() else "the job has ended")
    target = answer.text.removeprefix(f"{name} ") if isinstance(answer, Answer) else ""
    return _until_over(folder, plan, target, asked, patience)


def _until_over(folder: JobFolder, plan: DrillPlan, target: str, asked: float, patience: float) -> Drilled:
    from phoenix_launch.job.drills import CUTS, HARMLESS
    from phoenix_launch.job.schedules import Drilled
    from phoenix_launch.records.journal import DrillEnded, read_events

    kind, record = plan.kind.value, folder.read_record()
    name, end = f"{kind} {target}", time.monotonic() + plan.duration + patience
    while True:
        ended = wait_for_end(record, LOOK)
        for event in read_events(folder.journal_path):
            if isinstance(event, DrillEnded) and (event.kind, event.target) == (kind, target) and event.t >= asked:
                harmless = plan.kind in HARMLESS or (plan.kind in CUTS and event.detection is None)
                why = "the job has ended" if ended and event.recovery is None else ""
                return Drilled(
                    name, event.detection, event.recovery, event.redundancy, event.lost_steps, True, harmless, why
                )
        if ended:
            return Drilled(name, why="the job has ended")
        if time.monotonic() > end:
            return Drilled(name)


def _seconds(text: str) -> float:
    try:
        seconds = float(text or PATIENCE)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--patience {text!r}: must be seconds, more than 0", hint="for example --patience 300")
    return seconds


command = Command(
    "drill",
    drill,
    [
        job_argument(),
        click.Option(["--plan"], metavar="FILE", default="", help="The drills, one a line."),
        click.Option(
            ["--patience"], metavar="T", default="", help=f"Seconds until a drill must be over. [{PATIENCE:g}]"
        ),
    ],
)
