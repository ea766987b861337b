"""What a script imports whenever it runs: found by reading it and the modules of its own folder, never by running them."""

from __future__ import annotations

import ast
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

_MOST_FILES: Final = 300  # of the script's own that are read


@dataclass(frozen=True, slots=True)
class Import:
    """`import module`, or `from module import names`: a name may be a submodule."""

    module: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """One file of the user's. `file`: None when it cannot be found."""

    file: str | None
    text: str
    tree: ast.Module


def read(file: str | None) -> Source:
    """A file that cannot be read, or is no Python, is an empty one: the worker itself says what is wrong with it."""
    text = _read(file)
    return Source(file, text, _parse(text))


def with_own_modules(script: Source, folder: str) -> list[Source]:
    """The script, and the modules of its folder that are imported whenever it runs, as far as these names say."""
    found, waiting, seen = [script], [script], {script.file}
    while waiting and len(found) < _MOST_FILES:
        for file in _own_files(waiting.pop(0), folder):
            if file not in seen:
                seen.add(file)
                found.append(read(file))
                waiting.append(found[-1])
    return found


def _own_files(source: Source, folder: str) -> Iterator[str]:
    for statement in statements(source.tree.body):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield from _files(folder, alias.name.split("."), ())
        elif isinstance(statement, ast.ImportFrom):
            start = folder
            if statement.level and source.file is not None:
                start = os.path.join(os.path.dirname(source.file), *[os.pardir] * (statement.level - 1))
            parts = statement.module.split(".") if statement.module else []
            yield from _files(os.path.normpath(start), parts, [alias.name for alias in statement.names])


def _files(start: str, parts: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Those that run when `parts` is imported from there: packages on the way, the module, submodules among `names`."""
    for part in parts:
        start = os.path.join(start, part)
        if os.path.isfile(f"{start}.py"):
            yield f"{start}.py"
            return
        if not os.path.isdir(start):
            return
        yield from filter(os.path.isfile, [os.path.join(start, "__init__.py")])
    for name in names if parts or names else ():
        for file in (f"{name}.py", os.path.join(name, "__init__.py")):
            yield from filter(os.path.isfile, [os.path.join(start, file)])


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run whenever the script does: not those of branches, handlers and functions."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.Try, ast.With)) or (
            isinstance(statement, ast.If) and _asks_for_main(statement.test)
        ):
            yield from statements(statement.body)


def _asks_for_main(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and test.left.id == "__name__"
        and isinstance(test.ops[0], ast.Eq)
    )


def top_level_imports(tree: ast.Module) -> Iterator[Import]:
    for statement in statements(tree.body):
        if isinstance(statement, ast.Import):
            yield from (Import(alias.name) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
            yield Import(statement.module, tuple(alias.name for alias in statement.names if alias.name != "*"))


def _read(file: str | None) -> str:
    try:
        if file is None:
            return ""
        with open(file, "rb") as opened:
            return importlib.util.decode_source(opened.read())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""  # the worker itself says what is wrong with its script


def _parse(source: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])
