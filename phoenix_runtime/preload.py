"""Which modules a fork server loads before the script starts: found by reading the script, never by running it."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import re
import site
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phoenix_launch.bootstrap import Command, RunMode
from phoenix_runtime.imports import Import, read, statements, top_level_imports, with_own_modules

# The first optimizer step and the first DDP wrap import torch._dynamo: seconds that a spare should have behind it.
_NEEDS_DYNAMO: Final = re.compile(
    r"torch\.optim\b|from\s+torch\s+import\s[^\n]*\boptim\b|DistributedDataParallel|FullyShardedDataParallel|fully_shard"
)
# Read when torch or its thread pools are loaded, so that setting them afterwards changes nothing.
_READ_AT_IMPORT: Final = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "NUMEXPR_",
    "TORCHINDUCTOR_",
    "TORCHDYNAMO_",
    "TORCH_COMPILE_",
    "TORCH_LOGS",
    "TORCH_TRACE",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_DISTRIBUTED_DEBUG",
    "PYTORCH_JIT",
)

# Neither built in nor frozen, and still imported before sys.path[0] counts.
_AT_STARTUP: Final = frozenset({"encodings", "sitecustomize", "usercustomize", "__main__", "__mp_main__"})


ALWAYS: Final = (Import("torch"), Import("torch.distributed"))  # a store host needs them whatever the script does


@dataclass(frozen=True, slots=True)
class Preload:
    """What to load, in this order, and what the user should know about it."""

    imports: tuple[Import, ...] = ALWAYS
    remarks: tuple[str, ...] = ()


def script_folder(command: Command, cwd: str) -> str:
    """What `sys.path[0]` is while the script runs."""
    if command.mode is RunMode.MODULE:
        return cwd
    target = os.path.realpath(os.path.join(cwd, command.target))
    return target if os.path.isdir(target) else os.path.dirname(target)


def choose(command: Command, path: Sequence[str], cwd: str) -> Preload:
    """Decide from the source of what `command` runs.

    Args:
        command: the worker's command; its `preload` is "auto", "none" or a comma-separated list of modules.
        path: `sys.path` without its first entry.
        cwd: the working directory of the job.
    """
    folder = script_folder(command, cwd)
    script = read(_source_file(command, folder, path))
    if command.preload == "none":
        return Preload(remarks=_late_environment(script.tree))
    sources = with_own_modules(script, folder)
    imports = [item for source in sources for item in top_level_imports(source.tree)]
    if command.preload == "auto":
        found = [item for item in imports if _installed(item.module, folder, path)]
        found = [item for item in found if item.module != command.target]
    else:
        found = [Import(name.strip()) for name in command.preload.split(",") if name.strip()]
    wanted = [*ALWAYS, *found]
    mentions = any(_NEEDS_DYNAMO.search(source.text) for source in sources)
    if mentions and any(item.module.split(".")[0] == "torch" for item in found):
        wanted.append(Import("torch._dynamo"))
    if any(item.module.split(".")[0] == "phoenix_runtime" for item in imports):
        wanted.append(Import("phoenix_runtime.distributed"))  # its rooms are loaded when they are asked for
    return Preload(imports=tuple(dict.fromkeys(wanted)), remarks=_late_environment(script.tree))


def hidden_modules(loaded: Mapping[str, str | None], folder: str) -> list[str]:
    """Which loaded top-level modules a file of the script's folder would hide in a fresh interpreter.

    Args:
        loaded: name and file of the top-level modules in this process.
        folder: the script's.
    """
    try:
        entries = set(os.listdir(folder))
    except OSError:
        return []
    suspects = {name: file for name, file in loaded.items() if f"{name}.py" in entries or name in entries}
    return sorted(name for name, file in suspects.items() if _hides(name, folder, file))


def _hides(name: str, folder: str, loaded_from: str | None) -> bool:
    before_path = (importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter)
    if name in _AT_STARTUP or any(finder.find_spec(name) for finder in before_path):
        return False
    spec = importlib.machinery.PathFinder.find_spec(name, [folder])
    if spec is None or spec.origin is None:  # a folder without __init__.py hides nothing that is found further on
        return False
    return loaded_from is None or not _inside(loaded_from, folder)


def _inside(file: str, folder: str) -> bool:
    return os.path.realpath(file).startswith(os.path.join(os.path.realpath(folder), ""))


def _source_file(command: Command, folder: str, path: Sequence[str]) -> str | None:
    if command.mode is not RunMode.MODULE:
        return os.path.join(folder, "__main__.py") if os.path.isdir(command.target) else command.target
    spec = None
    places: Sequence[str] | None = [folder, *path]
    for part in command.target.split("."):  # one level after the other: find_spec on the whole name would run packages
        name = part if spec is None else f"{spec.name}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(name, places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.machinery.PathFinder.find_spec(f"{spec.name}.__main__", spec.submodule_search_locations)
    return spec.origin if spec is not None else None


def _installed(module: str, folder: str, path: Sequence[str]) -> bool:
    """Whether the script would get this module from site-packages, not from its own folder."""
    top = module.split(".")[0]
    if top in sys.builtin_module_names:
        return False
    spec = importlib.machinery.PathFinder.find_spec(top, [folder, *path])
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return any(_inside(place, folder) for place in places if place for folder in _site_folders(path))


def _site_folders(path: Sequence[str]) -> set[str]:
    named = {entry for entry in path if os.path.basename(entry) in ("site-packages", "dist-packages")}
    return named | {*site.getsitepackages(), site.getusersitepackages()}


def _late_environment(tree: ast.Module) -> tuple[str, ...]:
    """One remark about variables that the script sets before it imports torch, and which act no more."""
    names: list[str] = []
    for statement in statements(tree.body):
        if isinstance(statement, (ast.Import, ast.ImportFrom)) and _imports_torch(statement):
            break
        if isinstance(statement, (ast.Assign, ast.Expr)):
            names += [name for name in _variables_set(statement) if name.startswith(_READ_AT_IMPORT)]
    if not names:
        return ()
    listed = ", ".join(dict.fromkeys(names))
    return (
        f"the script sets {listed} before it imports torch, which is loaded already when it starts: no effect; "
        "set it with --env NAME=VALUE, or use --start-method spawn",
    )


def _imports_torch(statement: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return (statement.module or "").split(".")[0] == "torch"
    return any(alias.name.split(".")[0] == "torch" for alias in statement.names)


def _variables_set(statement: ast.Assign | ast.Expr) -> Iterator[str]:
    """NAME in `os.environ[NAME] = x`, `os.environ.setdefault(NAME, x)`, `.update({NAME: x})`, `os.putenv(NAME, x)`."""
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                yield from _strings([target.slice])
    elif isinstance(statement.value, ast.Call) and isinstance(statement.value.func, ast.Attribute):
        call, owner, method = statement.value, statement.value.func.value, statement.value.func.attr
        if (method == "setdefault" and _is_environ(owner)) or method == "putenv":
            yield from _strings(call.args[:1])
        elif method == "update" and _is_environ(owner):
            yield from (keyword.arg for keyword in call.keywords if keyword.arg)
            for argument in call.args:
                if isinstance(argument, ast.Dict):
                    yield from _strings(argument.keys)


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _strings(nodes: Sequence[ast.expr | None]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
