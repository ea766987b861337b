"""The keygen verb."""

from __future__ import annotations

from phoenix_launch.cli.command import Command
from phoenix_launch.errors import EXIT_OK


def keygen() -> int:
    """Print a fresh key for PHOENIX_JOB_KEY.

    A job that is started by the same command on every host needs the same key on each of them.
    """
    import secrets  # loads OpenSSL; `completion` imports every verb

    print(secrets.token_hex(32))
    return EXIT_OK


command = Command("keygen", keygen, [])
