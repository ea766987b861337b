"""The config verb."""

from __future__ import annotations

import os

import click

from phoenix_launch.cli.command import Command
from phoenix_launch.cli.run_options import described, given, parameters
from phoenix_launch.errors import EXIT_OK
from phoenix_launch.options.nodes import check_nodes
from phoenix_launch.options.resolution import Resolved, Source, resolve, settings_from
from phoenix_launch.options.table import OPTIONS, Option
from phoenix_launch.records.view import table
from phoenix_launch.settings import ORDERS, TIMEOUTS, RunSettings

Rows = list[list[str]]


def config(script: str, args: tuple[str, ...], timeouts: bool, markdown: bool, **params: object) -> int:
    """Show every option of a run with its value and where the value comes from.

    Takes all options of `phoenix-run run` too, and checks them as it would.
    """
    resolved = resolve(given(params), os.environ)
    settings = settings_from(resolved, script, args, os.environ)
    check_nodes(settings)
    rows: Rows
    if timeouts:
        heading, rows = ["TIMEOUT", "SECONDS", "OPTION", "MEANING"], _timeouts(settings)
    elif markdown:
        heading, rows = ["OPTION", "ENVIRONMENT", "MEANING [DEFAULT]"], [_documented(option) for option in OPTIONS]
    else:
        heading, rows = ["OPTION", "VALUE", "SOURCE"], [_shown(row) for row in resolved.values()]
    print(_markdown(heading, rows) if markdown else table(heading, rows))
    if timeouts and not markdown:
        for order in ORDERS:
            factor = "" if order.factor == 1 else f"{order.factor:g} x "
            print(f"{factor}{order.shorter} <= {order.longer}: {order.why}")
    return EXIT_OK


def _shown(row: Resolved) -> list[str]:
    source = row.where if row.source is Source.ENVIRONMENT else row.source.value
    return [row.option.name, row.option.value.show(row.value), source]


def _timeouts(settings: RunSettings) -> Rows:
    return [
        [name, f"{seconds:g}", TIMEOUTS[name].option, TIMEOUTS[name].meaning]
        for name, seconds in settings.timeouts().items()
    ]


def _documented(option: Option) -> list[str]:
    flags = f"`{option.flag} {option.value.metavar}`" if option.value.metavar else f"`{option.flag}`"
    return [flags, ", ".join(f"`{name}`" for name in option.environment), described(option)]


def _markdown(heading: list[str], rows: Rows) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


command = Command(
    "config",
    config,
    [
        *parameters(hidden=True),
        click.Option(["--timeouts"], is_flag=True, help="The table of all timeouts instead."),
        click.Option(["--markdown"], is_flag=True, help="As a table for a document."),
    ],
)
command.allow_interspersed_args = False
