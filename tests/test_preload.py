"""A fork server loads what the script surely imports from site-packages, found by reading, and nothing of its own."""

from __future__ import annotations

import site
import sys
from pathlib import Path

import pytest

from phoenix_launch.bootstrap import Command, RunMode
from phoenix_runtime import preload
from phoenix_runtime.imports import Import
from phoenix_runtime.preload import ALWAYS

PATH = [entry for entry in sys.path if entry]


def chosen(folder: Path, source: str, preload_option: str = "auto") -> preload.Preload:
    (folder / "script.py").write_text(source)
    command = Command(mode=RunMode.SCRIPT, target=str(folder / "script.py"), args=(), python="", preload=preload_option)
    return preload.choose(command, PATH, str(folder))


def beyond_torch(folder: Path, source: str, preload_option: str = "auto") -> list[Import]:
    return [item for item in chosen(folder, source, preload_option).imports if item not in ALWAYS]


def test_torch_is_loaded_even_for_a_script_that_does_without(tmp_path: Path) -> None:
    assert chosen(tmp_path, "print('plain')\n").imports == ALWAYS
    assert chosen(tmp_path, "import numpy\n", "none").imports == ALWAYS


def test_only_top_level_imports_of_installed_packages_are_taken(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    source = """
import os, numpy
import model
import no_such_package_anywhere
from torch.nn import functional as F, parallel
from . import sibling
try:
    import msgspec
except ImportError:
    import click
if DEBUG:
    import psutil
def later():
    import rich
if __name__ == "__main__":
    import zmq
"""
    assert beyond_torch(tmp_path, source) == [
        Import("numpy"),
        Import("torch.nn", ("functional", "parallel")),
        Import("msgspec"),
        Import("zmq"),
    ]


def test_what_its_own_modules_import_counts_as_if_it_stood_in_the_script(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import msgspec\nimport model\nraise SystemExit('never run')\n")
    package = tmp_path / "parts"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("from . import layers\nfrom .deep.er import x\nimport no_such_thing\n")
    (package / "layers.py").write_text("import psutil\nfrom torch.optim import AdamW\nfrom .. import model\n")
    (package / "deep" / "er.py").write_text("import click\ndef later():\n    import rich\n")
    (package / "unused.py").write_text("import zmq\n")
    (tmp_path / "broken.py").write_text("def (")
    assert beyond_torch(tmp_path, "import model, broken\nfrom parts import deep\n") == [
        Import("msgspec"),
        Import("psutil"),
        Import("torch.optim", ("AdamW",)),
        Import("click"),
        Import("torch._dynamo"),
    ]


def test_the_scripts_own_folder_wins_over_site_packages(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("")
    assert beyond_torch(tmp_path, "import numpy\n") == []


def test_a_list_is_taken_as_it_is(tmp_path: Path) -> None:
    assert beyond_torch(tmp_path, "", "model, json.tool,") == [Import("model"), Import("json.tool")]


@pytest.mark.parametrize(
    "line",
    [
        "optimizer = torch.optim.SGD([])",
        "from torch import nn, optim",
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "from torch.distributed.fsdp import fully_shard",
    ],
)
def test_what_the_first_step_needs_is_loaded_when_the_source_mentions_it(tmp_path: Path, line: str) -> None:
    assert Import("torch._dynamo") in beyond_torch(tmp_path, f"import torch\n{line}\n")
    assert Import("torch._dynamo") not in beyond_torch(tmp_path, "import torch\ntorch.ones(1)\n")
    assert Import("torch._dynamo") not in beyond_torch(tmp_path, f"import torch\n{line}\n", "none")


@pytest.mark.parametrize("source", ["x = (", "x = '\0'", "# coding: nonsense\n", "\xff"])
def test_a_script_that_cannot_be_read_is_the_workers_affair(tmp_path: Path, source: str) -> None:
    (tmp_path / "script.py").write_bytes(source.encode("latin-1"))
    command = Command(mode=RunMode.SCRIPT, target=str(tmp_path / "script.py"), args=(), python="")
    assert preload.choose(command, PATH, str(tmp_path)) == preload.Preload()


def test_a_module_is_found_without_running_its_packages(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "outer" / "__init__.py").write_text("raise SystemExit\n")
    (inner / "__init__.py").write_text("raise SystemExit\n")
    (inner / "__main__.py").write_text("import numpy\n")
    (inner / "train.py").write_text("import msgspec\n")
    found = {}
    for target in ("outer.inner", "outer.inner.train", "outer.nothing", "nothing"):
        command = Command(mode=RunMode.MODULE, target=target, args=(), python="")
        found[target] = [item.module for item in preload.choose(command, PATH, str(tmp_path)).imports[2:]]
    assert found == {"outer.inner": ["numpy"], "outer.inner.train": ["msgspec"], "outer.nothing": [], "nothing": []}


def test_environment_set_too_late_is_named_once(tmp_path: Path) -> None:
    source = """
import os
os.environ["OMP_NUM_THREADS"] = "4"
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.update({"TORCHINDUCTOR_CACHE_DIR": "x"}, KMP_BLOCKTIME="0")
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
import torch
os.environ["OMP_PLACES"] = "after it, so never heard by anybody"
"""
    (remark,) = chosen(tmp_path, source).remarks
    names = "OMP_NUM_THREADS, MKL_NUM_THREADS, KMP_BLOCKTIME, TORCHINDUCTOR_CACHE_DIR"
    assert remark.startswith(f"the script sets {names} before it imports torch")
    assert "--env" in remark


def test_a_file_that_would_hide_a_loaded_module_is_found(tmp_path: Path) -> None:
    for name in ("random.py", "time.py", "os.py", "utils.py", "own.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "numpy").mkdir()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    elsewhere = site.getsitepackages()[0]
    loaded = {
        "random": "/usr/lib/python/random.py",
        "time": None,  # built in: never looked for in a folder
        "os": "/usr/lib/python/os.py",  # frozen
        "numpy": f"{elsewhere}/numpy/__init__.py",  # a data folder without __init__.py hides nothing
        "torch": f"{elsewhere}/torch/__init__.py",
        "own": str(tmp_path / "own.py"),
    }
    assert preload.hidden_modules(loaded, str(tmp_path)) == ["random", "torch"]
