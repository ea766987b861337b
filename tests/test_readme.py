"""The README says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phoenix_launch.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def part(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", README, re.DOTALL)
    assert found, name
    return found[1]


@pytest.mark.parametrize(("name", "flags"), [("options", []), ("timeouts", ["--timeouts"])])
def test_the_tables_are_printed_from_the_code(name: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--markdown", *flags]) == 0
    assert capsys.readouterr().out.strip() == part(name).strip(), "paste what `phoenix-run config --markdown` prints"


def test_the_first_command_names_files_that_are_there() -> None:
    for word in part("try").split():
        if word.startswith("examples/"):
            assert (ROOT / word).is_file()


def test_every_variable_of_ours_that_the_code_reads_or_sets_is_in_the_readme() -> None:
    sources = [*ROOT.glob("phoenix_*/**/*.py"), *ROOT.glob("examples/*.py")]
    names = {name for path in sources for name in re.findall(r"\bPHOENIX_[A-Z_]*[A-Z]\b", path.read_text())}
    assert not {name for name in names - {"PHOENIX_NAME"} if name not in README}


def test_every_room_is_named_in_the_design() -> None:
    named = set(re.findall(r"\w+", (ROOT / "DESIGN.md").read_text()))
    modules = [path for package in ("phoenix_launch", "phoenix_runtime") for path in (ROOT / package).rglob("*.py")]
    rooms = {path.stem for path in modules if path.parent.name != "cli"}
    assert len(rooms) > 60
    assert not {room for room in rooms if not room.startswith("__")} - named
