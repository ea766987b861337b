"""The command line: finds the verb, which stands first or not at all; what goes wrong is one line and a hint."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from phoenix_launch.cli.loading import loading
from phoenix_launch.errors import EXIT_OK, EXIT_SIGNAL_BASE, PhoenixError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` is without the program's name."""
    _open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _shown(words[1:]) if words[:1] == ["status"] else None
        if code is None:
            code = _called(words)
        if sys.stdout is not None:  # it was closed when we were started (`>&-`)
            sys.stdout.flush()
        return code
    except PhoenixError as error:
        print(error.show(), file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_SIGNAL_BASE + signal.SIGINT
    except BrokenPipeError:
        # `phoenix-run logs | head`: nobody reads any more, also not what the interpreter flushes when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_SIGNAL_BASE + signal.SIGPIPE


def _shown(words: list[str]) -> int | None:
    """`status` without click; None when click has to read the words."""
    with loading():
        from phoenix_launch.cli.showing import plain, status
    wish = plain(words)
    return None if wish is None else status(*wish)


def _called(words: list[str]) -> int:
    with loading():
        import click

        from phoenix_launch.cli.command import DEFAULT_VERB, VERBS, load, usage_error

        verb, rest = (words[0], words[1:]) if words and words[0] in VERBS else (DEFAULT_VERB, words)
        command = load(verb)
    name = "phoenix-run" if verb == DEFAULT_VERB else f"phoenix-run {verb}"
    try:
        with command.make_context(name, rest) as context:
            code = command.invoke(context)
    except click.exceptions.Exit as ended:  # --help, --version
        code = ended.exit_code
    except click.UsageError as error:
        raise usage_error(error, name, command) from None
    return code if isinstance(code, int) else EXIT_OK


def _open_standard_streams() -> None:
    """Where one is closed, the next file or socket would get its number, and with it what is written there."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
