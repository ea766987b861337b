"""What can be said about a script without running it: is it there, can it be read, does it parse."""

from __future__ import annotations

import os
import shutil
import warnings

from phoenix_launch.errors import UsageError
from phoenix_launch.hosts.environment import is_text
from phoenix_launch.settings import RunSettings


def check_command(settings: RunSettings) -> None:
    """Raises UsageError when the workers would fail at once, each with the same message.

    The script is the same file on all hosts, so it is read here also when the hosts are others. Modules are looked up
    by the workers themselves: only they have the right path.
    """
    _check_texts(settings)
    if settings.module:
        return
    if settings.no_python:
        if not _on_hosts(settings) and shutil.which(settings.script) is None:
            raise UsageError(
                f"there is no program {settings.script}",
                hint="--no-python runs SCRIPT as it is, found as a shell would",
            )
        return
    check_script(settings.script)


def _check_texts(settings: RunSettings) -> None:
    """What travels to the nodes is text; the folder we are in has to be there as well."""
    try:
        folder = os.getcwd()
    except OSError as error:
        raise UsageError(f"the folder you are in is gone: {error.strerror}", hint="go to one that exists") from None
    for text in (folder, settings.script, *settings.script_args, *settings.env):
        if not is_text(text):
            raise UsageError(
                f"{text!a} is no UTF-8: it cannot be passed on to the workers",
                hint="rename it, or hand it over in a file",
            )


def check_script(path: str) -> None:
    """Raises UsageError when `path` is not a readable file with Python in it."""
    if not os.path.exists(path):
        raise UsageError(f"there is no script {path}", hint=_hint_for_missing(path))
    if os.path.isdir(path):
        raise UsageError(f"the script {path} is a folder", hint="give the file in it, or -m for a module")
    if not os.path.isfile(path):
        raise UsageError(f"the script {path} is no file", hint="every worker has to read it: give a file")
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise UsageError(f"the script {path} cannot be read: {error.strerror}", hint="check its permissions") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers say them
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        place = f"{path}:{error.lineno}" if error.lineno else path
        text = (error.text or "").strip()
        hint = f"the line is: {text}" if text else "is this Python? (--no-python runs any program)"
        raise UsageError(f"{place}: {error.msg}", hint=hint) from None
    except ValueError as error:  # null bytes, on some versions
        raise UsageError(f"{path}: {error}", hint="is this Python? (--no-python runs any program)") from None


def _on_hosts(settings: RunSettings) -> bool:
    return bool(settings.hostfile) or (bool(settings.nodes) and not settings.nodes.isdecimal())


def _hint_for_missing(path: str) -> str:
    if path.startswith("-"):
        return "options stand before the script"
    if "/" not in path and shutil.which(path):
        return f"to run the program {path}: --no-python"
    if not path.endswith(".py") and os.path.exists(f"{path}.py"):
        return f"did you mean {path}.py?"
    return f"looked in {os.getcwd()}" if not os.path.isabs(path) else "check the path"
