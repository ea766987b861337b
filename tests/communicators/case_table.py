"""The cases of the feature matrix: functions marked with `@case`, each run by all ranks under gloo and under phoenix.

Without torch: pytest reads from the sources which cases there are, only the ranks import them.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

BACKENDS: Final = ("gloo", "phoenix")  # in this order: first the yardstick
FOLDER: Final = Path(__file__).parent
MODULES: Final = tuple(sorted(path.stem for path in FOLDER.glob("*_cases.py")))


@dataclass
class Rank:
    """What a case is told: its place among the ranks, a fresh store for each group it begins itself, a shared folder."""

    number: int
    size: int
    folder: Path
    backend: str = ""
    begin: Callable[[], None] = field(default=lambda: None)  # init_process_group with this backend

    @property
    def next(self) -> int:
        return (self.number + 1) % self.size

    @property
    def previous(self) -> int:
        return (self.number - 1) % self.size


@dataclass(frozen=True)
class Case:
    name: str
    only: str = ""  # the one backend that the case is about; else both are run and compared
    slow: bool = False

    @property
    def backends(self) -> tuple[str, ...]:
        return (self.only,) if self.only else BACKENDS


Body = Callable[[Rank], object]
BODIES: Final[dict[str, Body]] = {}


def case(*, only: str = "", slow: bool = False) -> Callable[[Body], Body]:
    """Mark a case. What it returns (tensors, values, lists and dicts of these) is compared bit for bit.

    The arguments are literals, since `declared` reads them from the source.
    """

    def mark(body: Body) -> Body:
        assert body.__name__ not in BODIES, f"two cases are called {body.__name__}"
        BODIES[body.__name__] = body
        return body

    return mark


def declared() -> list[Case]:
    """The cases of all modules, in the order of the sources, without importing any."""
    return [found for module in MODULES for found in _cases_of(FOLDER / f"{module}.py")]


def _cases_of(path: Path) -> Iterator[Case]:
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "case":
                arguments: dict[str, Any] = {str(word.arg): ast.literal_eval(word.value) for word in mark.keywords}
                yield Case(node.name, **arguments)


def refusal(operation: Callable[..., object], *arguments: object, **named: object) -> str:
    """The error that an operation is answered with. An operation that succeeds is no refusal."""
    try:
        answer = operation(*arguments, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"nothing was refused, the answer is {answer!r}")


@contextlib.contextmanager
def recorded(found: dict[str, object], name: str) -> Iterator[None]:
    """An error in this part of a case becomes a result of its own, to be compared like any other."""
    try:
        yield
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
