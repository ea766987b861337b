"""Why a node's process did not come up, in one sentence, from its exit code and its last words; nothing here dials."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Final, Self


class Reason(str):
    """What is wrong, in one sentence; `hint` says what to do about it (may be empty)."""

    hint: str

    def __new__(cls, what: str, hint: str = "") -> Self:
        self = super().__new__(cls, what)
        self.hint = hint
        return self


_LOGIN: Final = "ssh runs in batch mode: `ssh -o BatchMode=yes HOST true` must work without a question"
_CONNECT: Final = (
    "is the host up, its sshd running, and the port right? ssh's configuration or --ssh 'ssh -F FILE' say it"
)

# ssh's own words, exit code 255. HOST in a hint is replaced.
_SSH: Final = (
    (r"Could not resolve hostname", "cannot resolve the host name", "is it spelled right? `getent hosts HOST` shows"),
    (r"Connection refused", "connection refused", _CONNECT),
    (r"timed out during banner exchange", "timed out: sshd accepts connections but says nothing", "is the host hung?"),
    (r"[Tt]imed out|Timeout, server .* not responding", "timed out", _CONNECT),
    (r"No route to host|Network is unreachable|Host is down", "there is no route to it", _CONNECT),
    (
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
        "host key verification failed",
        "connect once by hand, or put its key into known_hosts: `ssh-keyscan HOST`",
    ),
    (r"Permission denied \(([^)]*)\)", "permission denied ({0})", _LOGIN),
    (r"Too many authentication failures", "permission denied (too many keys were tried)", "set IdentitiesOnly for it"),
    (r"(Bad configuration option: \S+|Can't open user config file \S+)", "ssh: {0}", "is --ssh right?"),
    (r"Identity file (\S+) not accessible", "the identity file {0} cannot be read", _LOGIN),
    (
        r"kex_exchange_identification|Connection (closed|reset) by|Connection reset",
        "the connection was closed before the login",
        "sshd may refuse more logins for now (MaxStartups), or an address is not allowed: see its log",
    ),
)
_MODULE: Final = re.compile(r"No module named '?(phoenix_launch|msgspec|zmq|psutil)\b")
_UNREACHABLE: Final = re.compile(r"cannot reach the supervisor at \S+: .+")
_NO_LOGIN: Final = re.compile(
    r"This account is currently not available|nologin|account has expired|password has expired"
)


def explain(code: int | None, lines: Sequence[str], *, host: str, python: str) -> Reason:
    """The reason why a guardian is not there.

    Args:
        code: how ssh (or, with an empty `host`, the guardian itself) ended; None: it had to be ended by us.
        lines: its last lines.
        host: the destination; empty for a node of this machine.
        python: the interpreter that was to run there.
    """
    text = "\n".join(lines)
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if host and code in (255, None):
        for pattern, what, hint in _SSH:
            found = re.search(pattern, text)
            if found:
                return Reason(what.format(*(group or "" for group in found.groups())), hint.replace("HOST", host))
        if code == 255:
            return Reason(f"ssh failed: {last}" if last else "ssh failed and said nothing", f"try `ssh {host} true`")
    unreachable = _UNREACHABLE.search(text)
    if unreachable:
        return Reason(unreachable[0], "a firewall, or the wrong network: see --interface and --port-range")
    if code is None:
        said = f"; its last words: {last}" if last else ""
        return Reason(
            f"no word came from its agent{said}", "can it reach this machine? see --interface and --port-range"
        )
    return _interpreter(code, text, last, python)


def _interpreter(code: int, text: str, last: str, python: str) -> Reason:
    install = f"install it there: {python} -m pip install phoenix-run (the same version as here)"
    missing = _MODULE.search(text)
    if missing:
        what = "phoenix-run" if missing[1] == "phoenix_launch" else f"{missing[1]}, which phoenix-run needs,"
        return Reason(f"{what} is not installed in {python}", install)
    if _NO_LOGIN.search(text):
        return Reason(f"no login is possible: {last}", "name another user: user@host")
    if code == 127:
        return Reason(f"there is no interpreter {python}", "give its path there with python= in a --hostfile")
    if code == 126:
        return Reason(f"the interpreter {python} cannot be executed", "give another with python= in a --hostfile")
    if "unknown option: -p" in text.lower():
        return Reason(f"{python} is older than Python 3.11", "give another with python= in a --hostfile")
    if code < 0:
        return Reason(f"its agent was killed by {_signal_name(-code)}{_quoted(last)}")
    return Reason(f"its agent ended with exit code {code}{_quoted(last)}")


def _quoted(last: str) -> str:
    return f": {last}" if last else " and said nothing"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
