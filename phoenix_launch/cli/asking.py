"""How a verb talks to the supervisor of a running job, and what is known of one that does not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from phoenix_launch.cli.loading import loading
from phoenix_launch.errors import PhoenixError
from phoenix_launch.records.folders import JobFolder, KeyKind, is_here
from phoenix_launch.status import JobState, JobStatus, decode_status
from phoenix_launch.timeouts import timeout

if TYPE_CHECKING:
    from phoenix_launch.command_messages import FromCommand, ToCommand


def ask(folder: JobFolder, kind: KeyKind, body: FromCommand) -> ToCommand:
    """One question to the supervisor; raises PhoenixError when it does not answer, or answers no."""
    with loading():  # zmq only when there is somebody to ask
        from phoenix_launch.bus.client import ClientLink
        from phoenix_launch.bus.keys import KeyPair
        from phoenix_launch.command_messages import ANSWERS, Answer

    record = folder.read_record()
    keys = folder.read_client_keys(kind)
    pair = KeyPair(keys.public, keys.secret)
    link = ClientLink(record.job, record.control_endpoint, record.server_key, pair, timeout("command"), ANSWERS)
    try:
        answer = link.ask(body)
    finally:
        link.close()
    if isinstance(answer, Answer) and not answer.ok:
        raise PhoenixError(answer.text or f"the supervisor of job {record.job} refuses")
    return answer


def current_status(folder: JobFolder) -> JobStatus:
    """From the supervisor while it lives, else what it left behind; orphaned when it left no last word."""
    if folder.is_running():
        from phoenix_launch.command_messages import StatusReply, StatusRequest

        try:
            answer = ask(folder, "status", StatusRequest())
        except PhoenixError:
            if folder.is_running():  # else it ended meanwhile, and its keys are gone
                raise
        else:
            if isinstance(answer, StatusReply):
                return decode_status(answer.status)
            raise PhoenixError(f"the supervisor of job {folder.job} answers something else than its status")
    return last_status(folder)


def last_status(folder: JobFolder) -> JobStatus:
    """What is known of a job whose supervisor is gone."""
    saved = folder.read_status() or JobStatus(job=folder.job, state=JobState.ORPHANED)
    if saved.state.final:
        return saved
    return msgspec.structs.replace(saved, state=JobState.ORPHANED, reason=_why_orphaned(folder))


def _why_orphaned(folder: JobFolder) -> str:
    record = folder.read_record()
    patience = float(record.settings.get("orphan_timeout", timeout("orphan")))
    if is_here(record):
        gone = f"supervisor is gone (pid {record.pid} died)"
    else:
        gone = f"supervisor cannot be reached (pid {record.pid} on {record.hostname})"
    return (
        f"{gone}: training goes on until the next fault, its nodes end by themselves {patience:g} s after that; "
        f"`phoenix-run resume {record.job}` takes over"
    )
