"""The run verb's options as click knows them, made from the table of options; `config` takes the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import click

from phoenix_launch.options.resolution import Given
from phoenix_launch.options.table import OPTIONS, Group, Option, default


def parameters(*, hidden: bool = False) -> list[click.Parameter]:
    """All options of the table, and SCRIPT with everything after it."""
    return [
        *(_click_option(option, hidden) for option in OPTIONS),
        click.Argument(["script"], required=False, default="", type=click.UNPROCESSED),
        click.Argument(["args"], nargs=-1, type=click.UNPROCESSED),
    ]


def _click_option(option: Option, hidden: bool) -> click.Option:
    names = [option.field, option.flag, *([option.short] if option.short else [])]
    if option.value.switch:
        return click.Option(names, is_flag=True, default=None, hidden=hidden)
    return click.Option(
        names,
        type=click.UNPROCESSED,
        default=None,
        multiple=option.value.repeated,
        metavar=option.value.metavar,
        hidden=hidden,
    )


def given(params: Mapping[str, object]) -> dict[str, Given]:
    """What the command line really said, by field."""
    flags: dict[str, Given] = {}
    for option in OPTIONS:
        value = params[option.field]
        if isinstance(value, str) or value is True or (isinstance(value, tuple) and value):
            flags[option.field] = value
    return flags


def help_sections() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Heading and rows of each group."""
    for group in Group:
        yield group.value, [(_names(option), described(option)) for option in OPTIONS if option.group is group]


def _names(option: Option) -> str:
    names = f"{option.short}, {option.flag}" if option.short else option.flag
    return f"{names} {option.value.metavar}".rstrip()


def described(option: Option) -> str:
    shown = "" if option.value.switch else option.value.show(default(option))
    return f"{option.help} [{shown}]" if shown else option.help
