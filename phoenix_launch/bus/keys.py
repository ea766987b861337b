"""CURVE key pairs: fresh ones, and those that every holder of PHOENIX_JOB_KEY can compute."""

from __future__ import annotations

import msgspec
import zmq

from phoenix_launch.errors import UsageError


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A CURVE key pair, both halves Z85 (40 characters)."""

    public: str
    secret: str


def new_key_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def derived_key_pair(job_key: str, purpose: str) -> KeyPair:
    """The key pair that every holder of PHOENIX_JOB_KEY can compute for a purpose ("supervisor", "join")."""
    if len(job_key) < 32:
        raise UsageError(
            "PHOENIX_JOB_KEY is too short to protect a job",
            hint="make one with `phoenix-run keygen`, give it to every host",
        )
    import hashlib
    import hmac

    from zmq.utils import z85

    secret = z85.encode(hmac.digest(job_key.encode(), b"phoenix-run " + purpose.encode(), hashlib.sha256))
    return KeyPair(zmq.curve_public(secret).decode(), secret.decode())
