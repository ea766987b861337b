"""What an agent makes of its bootstrap on the host where it finds itself: addresses and environment. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from phoenix_launch.bootstrap import AgentBootstrap, OutputSettings
from phoenix_launch.records.folders import jobs_root
from phoenix_launch.takeover_messages import Claim

EVERYWHERE = "0.0.0.0"
_SESSION = ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY", "PHOENIX_JOB_KEY")


def arrived(bootstrap: AgentBootstrap, environ: Mapping[str, str]) -> AgentBootstrap:
    """The bootstrap with what only this host knows put in.

    A supervisor that listens everywhere is dialled where our ssh session came from, and we are known by the address that
    this session reached: both were seen to work (names resolve differently on each host). What the job's environment
    does not say (HOME, USER) this login session does.
    """
    if bootstrap.simulated:
        return bootstrap
    session = environ.get("SSH_CONNECTION", "").split()  # client address, client port, server address, server port
    client, server = (session[0], session[2]) if len(session) == 4 else ("", "")
    here = {name: value for name, value in environ.items() if name not in _SESSION}
    return msgspec.structs.replace(
        bootstrap,
        control_endpoint=_dialled(bootstrap.control_endpoint, client),
        output_endpoint=_dialled(bootstrap.output_endpoint, client),
        address=bootstrap.address or ("" if bootstrap.interface else server),
        environment={**here, **bootstrap.environment},
        output=_placed(bootstrap.output, environ),
    )


def led_to(bootstrap: AgentBootstrap, claim: Claim, caller: str) -> AgentBootstrap:
    """The same for another supervisor, which called from this address."""
    return msgspec.structs.replace(
        bootstrap,
        term=claim.term,
        control_endpoint=_dialled(claim.control_endpoint, caller),
        output_endpoint=_dialled(claim.output_endpoint, caller),
        server_key=claim.server_key,
    )


def _placed(output: OutputSettings, environ: Mapping[str, str]) -> OutputSettings:
    """Folders that are no absolute paths lie where this user's jobs are kept."""
    if os.path.isabs(output.folder):
        return output
    root = jobs_root(environ)
    folder = str(root / output.torchrun_folder) if output.torchrun_folder else ""
    return msgspec.structs.replace(output, folder=str(root / output.folder), torchrun_folder=folder)


def _dialled(endpoint: str, client: str) -> str:
    host = f"[{client}]" if ":" in client else client
    return endpoint.replace(f"//{EVERYWHERE}:", f"//{host}:") if client else endpoint
