"""How a verb is found, how its help is laid out, and how click's complaints become one line and a hint."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, Final

import click

from phoenix_launch.errors import UsageError

DEFAULT_VERB: Final = "run"
VERBS: Final = {  # and the first line of each verb's docstring, so that the help imports none of the others
    DEFAULT_VERB: "Start a training job: SCRIPT with ARGS in every worker, on this machine or on many hosts.",
    "status": "Show what a job, its nodes and its ranks are doing.",
    "jobs": "List all jobs, the newest last.",
    "logs": "Show what the workers of a job wrote.",
    "stop": "End a job as SIGTERM would, and wait until it has ended.",
    "resume": "Take over a job whose supervisor is gone.",
    "add-host": "Give a running job one more host, as a spare node.",
    "drain": "Move a node's ranks to a spare node and let the node go.",
    "inject-fault": "Harm a running job on purpose: kill, freeze, hang, slow ... a rank or a node.",
    "drill": "Do the drills of a file on a running job, one after the other, and say what became of each.",
    "config": "Show every option of a run with its value and where the value comes from.",
    "keygen": "Print a fresh key for PHOENIX_JOB_KEY.",
    "completion": "Print the completion script of a shell: bash, zsh or fish.",
}
HELP_WIDTH: Final = 110
_LEGACY: Final = {  # options of `python -m torch.distributed.launch`, which torchrun does not have either
    "--use-env": "leave it out: as with torchrun, workers find LOCAL_RANK in their environment",
    "--local-rank": "the script gets no --local-rank: as with torchrun, it reads LOCAL_RANK from its environment",
}
_SETTINGS: Final[dict[str, Any]] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": HELP_WIDTH,
    "token_normalize_func": lambda name: name.replace("_", "-"),  # --nproc_per_node is --nproc-per-node
}


class Command(click.Command):
    """One verb: stops reading options at the first other word, completes nothing, abbreviates nothing."""

    def __init__(self, name: str, callback: Callable[..., object], params: list[click.Parameter], **more: Any) -> None:
        super().__init__(
            name,
            callback=callback,
            params=params,
            help=inspect.getdoc(callback),
            context_settings=_SETTINGS,
            **more,
        )

    def flags(self) -> list[str]:
        return [name for param in self.params if isinstance(param, click.Option) for name in param.opts] + ["--help"]


def load(verb: str) -> Command:
    """Imports the verb's file."""
    command: Command = importlib.import_module(f"phoenix_launch.cli.{verb.replace('-', '_')}").command
    return command


def job_argument() -> click.Argument:
    return click.Argument(["job"], required=False, default="")


_EXAMPLES: Final = {  # what to type where a word or a value is missing
    "inject-fault": "phoenix-run inject-fault kill-worker --rank 0",
    "completion": 'eval "$(phoenix-run completion bash)"',
}


def nearest(word: str, known: list[str]) -> str:
    """The one that `word` begins, or is likely to mean; empty when there is none."""
    import difflib  # only for a mistake

    begun = [name for name in known if name.startswith(word)]
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return begun[0] if len(begun) == 1 else (close or begun or [""])[0]


def usage_error(error: click.UsageError, name: str, command: Command) -> UsageError:
    """What click found wrong, in our own words."""
    hint = f"see `{name} --help`"
    if isinstance(error, click.NoSuchOption):
        option = error.option_name.replace("_", "-")
        meant = nearest(option, command.flags())
        hint = _LEGACY.get(option) or (f"did you mean {meant}?" if meant else hint)
        return UsageError(f"there is no option {option}", hint=hint)
    if isinstance(error, click.MissingParameter) and (example := _EXAMPLES.get(command.name or "")):
        hint = f"for example {example}"
    elif isinstance(error, click.BadOptionUsage):
        value = next((str(p.metavar or "") for p in command.params if error.option_name in p.opts), "")
        hint = f"give it one: {error.option_name} {value}" if value else f"write {error.option_name} alone"
    elif error.ctx is not None and "extra argument" in error.message:
        hint = f"leave it out: {' '.join(error.ctx.get_usage().split()).removeprefix('Usage: ')}"
    text = " ".join(error.format_message().split()).rstrip(".")
    return UsageError(text[:1].lower() + text[1:], hint=hint)
