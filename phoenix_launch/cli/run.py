"""The run verb: from the command line to the settings of a job, checked as far as can be before anything starts."""

from __future__ import annotations

import os

import click

from phoenix_launch import __version__
from phoenix_launch.cli.command import DEFAULT_VERB, VERBS, Command, nearest
from phoenix_launch.cli.loading import loading
from phoenix_launch.cli.run_options import given, help_sections, parameters
from phoenix_launch.errors import UsageError
from phoenix_launch.options.resolution import resolve, settings_from
from phoenix_launch.options.script import check_command
from phoenix_launch.settings import RunSettings


class RunCommand(Command):
    """Its help shows the options by group, and the other verbs."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS] SCRIPT [ARGS...]"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, rows in help_sections():
            with formatter.section(heading):
                formatter.write_dl(rows, col_max=34)
        with formatter.section("Other verbs"):
            formatter.write_dl([(name, text) for name, text in VERBS.items() if name != DEFAULT_VERB])
        formatter.write_paragraph()
        formatter.write_text(
            "Each option is also read from the environment: torchrun's own from PET_NAME, ours from PHOENIX_NAME "
            "(`phoenix-run config` shows what holds and why). `--version` and `--help` do what they always do."
        )


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        print(f"phoenix-run {__version__}")
        ctx.exit()


def run(script: str, args: tuple[str, ...], **params: object) -> int:
    """Start a training job: SCRIPT with ARGS in every worker, on this machine or on many hosts.

    Everything after SCRIPT belongs to the script. A script that is called like a verb: `phoenix-run run status`.
    """
    settings = settings_of(script, args, params)
    with loading():
        from phoenix_launch.supervision.launch import launch
    return launch(settings, os.environ)


def settings_of(script: str, args: tuple[str, ...], params: dict[str, object]) -> RunSettings:
    """Raises UsageError for everything that is seen to be wrong before a process is started."""
    if not script:
        raise UsageError("no SCRIPT is given", hint="phoenix-run [OPTIONS] SCRIPT [ARGS...], see `phoenix-run --help`")
    settings = settings_from(resolve(given(params), os.environ), script, args, os.environ)
    if script and not os.path.exists(script) and (meant := nearest(script, list(VERBS))):
        raise UsageError(f"there is no script {script}", hint=f"did you mean `phoenix-run {meant}`?")
    from phoenix_launch.options.nodes import check_nodes  # `--help` and completion have no need of host lists

    check_nodes(settings)
    check_command(settings)
    return settings


command = RunCommand(
    "run",
    run,
    [
        *parameters(),
        click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_show_version),
    ],
)
command.allow_interspersed_args = False
