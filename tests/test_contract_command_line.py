"""torchrun's contract: the forms of the command line, and what a script finds of itself in each."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract import NO_TORCH, WITNESS, Call, Called, call_all, witness_script
from tests.jobs_under_test import run

ARGS = ["one", "--", "--nproc-per-node", "two words", "${local_rank}", ""]
HEARD = ["one", "--", "--nproc-per-node", "two words", "0", ""]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Called]:
    folder = tmp_path_factory.mktemp("command line")  # a space in every path
    witness = witness_script(folder)
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "witness.py").write_text(WITNESS)
    program = folder / "program"
    program.write_text(f"#!{sys.executable}\n{WITNESS}" if " " not in sys.executable else "")
    program.chmod(0o755)
    module, run_path = ["-m", "package.witness", *ARGS], ["--run-path", witness, *ARGS]
    no_python = ["--no-python", program, *ARGS]
    here = {**NO_TORCH, "PYTHONPATH": f"{NO_TORCH['PYTHONPATH']}:{folder}"}
    return call_all(
        folder,
        {
            "torchrun script": Call([witness, *ARGS], torchrun=True),
            "torchrun module": Call(module, torchrun=True),
            "torchrun run-path": Call(run_path, torchrun=True),
            "torchrun no-python": Call(no_python, torchrun=True),
            "script": Call([witness, *ARGS], NO_TORCH),
            "spawned script": Call(["--start-method", "spawn", witness, *ARGS], NO_TORCH),
            "module": Call(module, here),
            "spawned module": Call(["--start_method=spawn", *module], here),
            "run-path": Call(run_path, NO_TORCH),
            "no-python": Call(no_python, NO_TORCH),
            "dashes": Call(["--nproc_per_node=2", "--", "witness.py", "--", "-m", "--role=x"], NO_TORCH),
            "one host": Call(
                ["--nnodes", "1:1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29400", "--rdzv_id", "7",
                 "--rdzv-conf", "timeout=5,read_timeout=3", "--monitor-interval", "5", "--node-rank", "0",
                 "--master-addr", "localhost", "--event-log-handler", "console", "--logs-specs", "default", witness],
                {**NO_TORCH, "PET_ROLE": "from-the-environment", "PET_MAX_RESTARTS": "2"},
            ),
        },
    )  # fmt: skip


FORMS = ["script", "spawned script", "module", "spawned module", "run-path", "no-python"]


def torchruns(form: str) -> str:
    return f"torchrun {form.removeprefix('spawned ')}"


def test_all_forms_run(calls: dict[str, Called]) -> None:
    assert {name: (call.done.code, call.done.err) for name, call in calls.items() if call.done.code} == {}


@pytest.mark.parametrize("form", FORMS)
def test_the_script_gets_its_arguments_to_the_letter(calls: dict[str, Called], form: str) -> None:
    assert calls[form].witness()["argv"][1:] == HEARD


@pytest.mark.parametrize("form", FORMS)
def test_the_script_sees_itself_as_under_torchrun(calls: dict[str, Called], form: str) -> None:
    def self_seen(seen: dict[str, Any]) -> dict[str, Any]:
        return {key: seen[key] for key in ("argv", "name", "file", "path", "unbuffered", "session", "folder")}

    ours, theirs = self_seen(calls[form].witness()), self_seen(calls[torchruns(form)].witness())
    if form == "run-path":  # there it is a process of multiprocessing, without a session; here all have one
        assert ours.pop("session") and not theirs.pop("session")
        assert ours.pop("path") == "" and theirs.pop("path") == theirs["folder"]
    assert ours == theirs


@pytest.mark.parametrize("form", ["spawned script", "spawned module"])
def test_a_worker_that_is_started_afresh_has_torchruns_command_line(calls: dict[str, Called], form: str) -> None:
    ours, theirs = calls[form].witness()["original"], calls[torchruns(form)].witness()["original"]
    assert ours[1:] == theirs[1:]
    assert ours[1] == "-u"


@pytest.mark.parametrize("form", FORMS)
def test_a_worker_reads_nothing_from_stdin(calls: dict[str, Called], form: str) -> None:
    assert calls[form].witness()["stdin"] == ""


def test_a_literal_double_dash_before_the_script_ends_our_options_and_one_after_it_is_the_scripts(
    calls: dict[str, Called],
) -> None:
    for rank in (0, 1):
        assert calls["dashes"].witness(rank)["argv"] == ["witness.py", "--", "-m", "--role=x"]


def test_options_about_meeting_others_are_accepted_for_one_host(calls: dict[str, Called]) -> None:
    call = calls["one host"]
    environment = call.environment()
    assert (environment["WORLD_SIZE"], environment["GROUP_WORLD_SIZE"], environment["GROUP_RANK"]) == ("1", "1", "0")
    assert environment["TORCHELASTIC_RUN_ID"] == "7"
    assert (environment["ROLE_NAME"], environment["TORCHELASTIC_MAX_RESTARTS"]) == ("from-the-environment", "2")
    assert "--event-log-handler has no effect" in call.done.err
    assert "--logs-specs default has no effect" in call.done.err


def test_local_ranks_are_put_into_arguments_of_each_worker(tmp_path: Path) -> None:
    echo = shutil.which("echo")
    assert echo
    done = run(tmp_path / "home", "--nproc-per-node", 3, "--no-python", echo, "${local_rank}/$local_rank", env=NO_TORCH)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == ["0/$local_rank", "1/$local_rank", "2/$local_rank"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["--rdzv_en", "localhost:1", "x.py"],
            ["no option --rdzv-en", "--rdzv-endpoint"],
        ),  # torchrun takes the abbreviation
        (["--nnodes", "2", "x.py"], ["--rdzv-endpoint", "--master-addr"]),
        (["--no-python", "-m", "x"], ["--no-python", "--module"]),
        (["--nproc-per-node", "many", "x.py"], ["--nproc-per-node"]),
        (["no-such-script.py"], ["no-such-script.py"]),
        (["--use-env", "x.py"], ["no option --use-env", "leave it out", "LOCAL_RANK"]),
        (["--use_env", "x.py"], ["no option --use-env", "leave it out", "LOCAL_RANK"]),
        (["--local-rank=0", "x.py"], ["no option --local-rank", "reads LOCAL_RANK"]),
    ],
)
def test_wrong_use_ends_with_2_one_line_and_one_hint(tmp_path: Path, args: list[str], words: list[str]) -> None:
    done = run(tmp_path / "home", *args)
    assert done.code == 2
    assert all(word in done.err for word in words), done.err
    assert "Traceback" not in done.err
