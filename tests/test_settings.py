"""Every option means what the table says, whether a flag or the environment says it, and contradictions are refused."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from phoenix_launch.cli import main
from phoenix_launch.errors import UsageError
from phoenix_launch.options.resolution import Source, resolve, settings_from
from phoenix_launch.options.table import BY_FIELD, OPTIONS, Option, Origin, default
from phoenix_launch.settings import AUTO, ORDERS, TIMEOUTS, RunSettings, check_timeouts, parse_endpoint, timeout

Start = Callable[..., RunSettings]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """`start("--flag", "value", PET_X="1")`: what would be launched by these words before a script."""
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    launched: list[RunSettings] = []
    fake = ModuleType("phoenix_launch.supervision.launch")

    def launch(settings: RunSettings, environ: Mapping[str, str]) -> int:
        launched.append(settings)
        return 0

    fake.launch = launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "phoenix_launch.supervision.launch", fake)

    def started(*words: str, after: Sequence[str] = (), target: str = "", **environ: str) -> RunSettings:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        try:
            code = main([*words, target or str(script), *after])
        finally:
            for name in environ:
                monkeypatch.delenv(name)
        assert code == 0, code
        return launched.pop()

    return started


@pytest.fixture
def refused(start: Start, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Like `start`, for words that exit 2: what is shown, which is one line and at most one hint."""

    def shown(*words: str, **more: str) -> str:
        with pytest.raises(AssertionError) as error:
            start(*words, **more)
        assert error.value.args[0].startswith("2"), error.value
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert lines[0].startswith("phoenix-run: ") and "Traceback" not in captured.err
        assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("  hint: "))
        return captured.err

    return shown


# option, text as typed, value; every row of torchrun's table and every option of ours
VALUES: list[tuple[str, str, object]] = [
    ("nproc-per-node", "4", "4"),
    ("nproc-per-node", "gpu", "gpu"),
    ("nproc-per-node", "auto", "auto"),
    ("start-method", "spawn", "spawn"),
    ("start-method", "forkserver", "fork"),
    ("preload", "numpy, scipy.linalg", "numpy,scipy.linalg"),
    ("env", "A=b c", ("A=b c",)),
    ("job-name", "exp.1", "exp.1"),
    ("nodes", "2", "2"),
    ("nodes", "h1,gpu[03-16]", "h1,gpu[03-16]"),
    ("spares", "1", "1"),
    ("local-spares", "2", 2),
    ("interface", "eth0", "eth0"),
    ("port-range", "4000-4100", (4000, 4100)),
    ("ssh", "ssh -F file", "ssh -F file"),
    ("nnodes", "1", (1, 1)),
    ("nnodes", "1:1", (1, 1)),
    ("node-rank", "0", 0),
    ("rdzv-backend", "c10d", "c10d"),
    ("rdzv-endpoint", "localhost:0", "localhost:0"),
    ("rdzv-id", "42", "42"),
    ("rdzv-conf", "timeout=9,is_host=1", {"timeout": "9", "is_host": "1"}),
    ("master-addr", "[::1]", "::1"),
    ("master-port", "29501", 29501),
    ("local-addr", "10.0.0.1", "10.0.0.1"),
    ("role", "trainer", "trainer"),
    ("monitor-interval", "5", 5.0),
    ("event-log-handler", "console", "console"),
    ("checkpoint-dir", "ck", "ck"),
    ("checkpoint-interval", "100", 100),
    ("keep", "5", 5),
    ("max-restarts", "3", 3),
    ("max-failures-per-host", "1", 1),
    ("signals-to-handle", "SIGTERM,usr1", ("SIGTERM", "SIGUSR1")),
    ("shutdown-timeout", "0", 0.0),
    ("heartbeat-timeout", "2.5", 2.5),
    ("hang-timeout", "45", 45.0),
    ("spare-timeout", "0", 0.0),
    ("orphan-timeout", "600", 600.0),
    ("join-timeout", "30", 30.0),
    ("rehearse", "2", 2),
    ("snapshot-interval", "10", 10),
    ("snapshot-interval", "0", 0),
    ("snapshot-interval", "auto", AUTO),
    ("replicas", "2", 2),
    ("replica-distance", "3", 3),
    ("verify-replicas", "50", 50),
    ("replica-bandwidth", "2G", 2 << 30),
    ("replica-bandwidth", "1M/s", 1 << 20),
    ("copy-memory", "64G", 64 << 30),
    ("copy-memory", "1.5 GiB", 3 << 29),
    ("copy-memory", "500000", 500_000),
    ("exit-code", "worker", "worker"),
    ("log-dir", "/dev/null", "/dev/null"),
    ("redirects", "3", {-1: 3}),
    ("redirects", "0", {}),
    ("redirects", "0:1,12:2", {0: 1, 12: 2}),
    ("tee", "10:3", {10: 3}),
    ("local-ranks-filter", "2,0,2", (0, 2)),
    ("duplicate-stdout-filters", "apple,oran,,ge,", ("apple", "oran,ge")),
    ("duplicate-stderr-filters", "a,,,b", ("a,", "b")),
    ("prefix", "always", "always"),
]
FLAG_ONLY: list[tuple[str, str, object]] = [
    ("numa-binding", "core-complex", "core-complex"),
    ("logs-specs", "mine", "mine"),
]
SWITCHES = [option for option in OPTIONS if option.value.switch]


def field(name: str) -> str:
    return name.replace("-", "_")


def test_the_rows_below_leave_no_option_out() -> None:
    tested = {name for name, _, _ in VALUES + FLAG_ONLY} | {option.name for option in SWITCHES} | {"hostfile", "drill"}
    assert tested == {option.name for option in OPTIONS}


def test_the_table_and_the_settings_have_the_same_fields() -> None:
    computed = {"script", "script_args", "given", "remarks"}
    assert set(BY_FIELD) | computed == {item.name for item in dataclasses.fields(RunSettings)}


@pytest.mark.parametrize(("name", "text", "value"), VALUES + FLAG_ONLY)
def test_a_flag_is_read_in_both_spellings(start: Start, name: str, text: str, value: object) -> None:
    for flag in (f"--{name}", f"--{field(name)}"):
        assert getattr(start(flag, text), field(name)) == value
        assert getattr(start(f"{flag}={text}"), field(name)) == value


@pytest.mark.parametrize(("name", "text", "value"), VALUES)
def test_the_environment_is_asked_when_there_is_no_flag(start: Start, name: str, text: str, value: object) -> None:
    variable = BY_FIELD[field(name)].environment[0]
    said = f"'{text}'" if name == "env" else text
    assert getattr(start(**{variable: said}), field(name)) == value
    assert getattr(start(**{variable: ""}), field(name)) == default(BY_FIELD[field(name)]), "empty counts as not set"


def test_torchruns_options_are_read_from_pet_and_ours_from_phoenix() -> None:
    assert BY_FIELD["nproc_per_node"].environment == ("PET_NPROC_PER_NODE",)
    assert BY_FIELD["spares"].environment == ("PHOENIX_SPARES",)
    assert all(option.environment == () for option in OPTIONS if option.origin is Origin.TORCHRUN_FLAG_ONLY)


@pytest.mark.parametrize("name", ["module", "no-python", "run-path", "virtual-local-rank", "standalone"])
@pytest.mark.parametrize("word", ["1", "true", "YES", "on", "2"])
def test_a_switch_in_the_environment_takes_words_and_numbers(start: Start, name: str, word: str) -> None:
    target = "" if name != "no-python" else "sh"
    assert getattr(start(target=target, **{f"PET_{field(name).upper()}": word}), field(name)) is True


@pytest.mark.parametrize("option", SWITCHES, ids=lambda option: option.name)
def test_a_switch_is_off_until_its_flag_is_given(start: Start, option: Option) -> None:
    name = option.name
    target = "sh" if name == "no-python" else ""
    assert getattr(start(), field(name)) is False
    assert getattr(start(f"--{name}", target=target), field(name)) is True
    assert getattr(start(f"--{field(name)}", target=target), field(name)) is True
    assert getattr(start(**{option.environment[0]: "no"}), field(name)) is False


def test_short_options_are_torchruns(start: Start) -> None:
    settings = start("-m", "-r", "3", "-t2", target="pkg.train")
    assert (settings.module, settings.redirects, settings.tee, settings.script) == (True, {-1: 3}, {-1: 2}, "pkg.train")


def test_a_flag_wins_over_the_environment_which_wins_over_the_file() -> None:
    environ = {"PET_MAX_RESTARTS": "2", "PHOENIX_SPARES": "2"}
    file = {"max_restarts": "1", "spares": "1", "prefix": "never"}
    resolved = resolve({"max_restarts": "3"}, environ, file, "phoenix.toml")
    said = {
        name: (resolved[name].value, resolved[name].source) for name in ("max_restarts", "spares", "prefix", "role")
    }
    assert said == {
        "max_restarts": (3, Source.FLAG),
        "spares": ("2", Source.ENVIRONMENT),
        "prefix": ("never", Source.FILE),
        "role": ("default", Source.DEFAULT),
    }


def test_the_last_of_a_repeated_flag_counts_and_lists_grow(start: Start) -> None:
    settings = start("--max-restarts", "1", "--max-restarts", "2", "--env", "A=1", "--env", "B=x\ny 'z'")
    assert settings.max_restarts == 2
    assert settings.env == ("A=1", "B=x\ny 'z'")


def test_a_list_in_the_environment_is_split_as_by_a_shell(start: Start) -> None:
    assert start(PHOENIX_ENV="A=1 'B=x y'").env == ("A=1", "B=x y")
    assert start(PHOENIX_DRILL="'kill-node --node 1 --after 20' 'kill-worker --rank 0 --after 3'").drills == (
        "kill-node --node 1 --after 20",
        "kill-worker --rank 0 --after 3",
    )


def test_the_older_variable_for_the_shutdown_timeout_is_asked_second(start: Start) -> None:
    assert start(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").shutdown_timeout == 7
    assert start(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7", PET_SHUTDOWN_TIMEOUT="8").shutdown_timeout == 8
    assert start("--shutdown-timeout", "9", PET_SHUTDOWN_TIMEOUT="8").shutdown_timeout == 9


WRONG = [
    ("nproc-per-node", ["0", "-1", "gpus", "1.5", ""]),
    ("nnodes", ["0", "2:1", "a", "1:2:3", ":", "-1"]),
    ("nodes", ["0", "-1", ""]),
    ("spares", ["-1"]),
    ("max-restarts", ["-1", "many"]),
    ("node-rank", ["-1", "x"]),
    ("rdzv-backend", ["etcd", "zookeeper"]),
    ("rdzv-endpoint", ["host:port", "host:70000", ":29400", "a b:1"]),
    ("rdzv-conf", ["timeout", "timeout=", "=3", "join_timeout=soon", "timeout=-1"]),
    ("master-addr", ["", "a/b"]),
    ("master-port", ["65536", "http"]),
    ("monitor-interval", ["0", "fast", "nan"]),
    ("start-method", ["thread"]),
    ("preload", ["numpy;torch", ","]),
    ("event-log-handler", ["mine"]),
    ("numa-binding", ["socks"]),
    ("redirects", ["4", "0:4", "0:3,", "a:1", "-1:3"]),
    ("tee", ["10", "x"]),
    ("local-ranks-filter", ["0,", "a", "-1"]),
    ("signals-to-handle", ["SIGFOO", "SIGKILL", ","]),
    ("shutdown-timeout", ["-1", "inf"]),
    ("heartbeat-timeout", ["0"]),
    ("port-range", ["9-1", "80", "1-70000"]),
    ("ssh", ["", "ssh 'x"]),
    ("env", ["=x", ""]),
    ("job-name", ["a/b", "../x", ""]),
    ("prefix", ["sometimes"]),
    ("exit-code", ["both"]),
    ("log-dir", [""]),
    ("max-failures-per-host", ["0"]),
]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRONG for text in texts])
def test_a_value_an_option_does_not_take_is_named(refused: Callable[..., str], name: str, text: str) -> None:
    assert f"--{name} {text!r}: " in refused(f"--{name}", text)


def test_a_wrong_value_in_the_environment_names_the_variable(refused: Callable[..., str]) -> None:
    assert "PET_STANDALONE 'maybe': must be 1, true, yes or 0, false, no" in refused(PET_STANDALONE="maybe")


def test_no_python_and_module_exclude_each_other_but_run_path_wins(start: Start, refused: Callable[..., str]) -> None:
    assert "--no-python and --module" in refused("--no-python", "-m")
    settings = start("--run-path", "--no-python", "-m")
    assert (settings.run_path, settings.no_python, settings.module) == (True, False, False)


def test_standalone_ignores_what_is_said_about_meeting_others(start: Start) -> None:
    settings = start(
        "--standalone", "--master-port", "1", "--rdzv-endpoint", "x:1", "--rdzv-id", "7", "--nnodes", "1:4"
    )
    assert (settings.rdzv_backend, settings.rdzv_endpoint, settings.rdzv_id) == ("c10d", "", "none")
    assert (settings.master_port, settings.nnodes, settings.joins) == (None, (1, 1), False)


def test_standalone_is_for_one_host(refused: Callable[..., str]) -> None:
    assert "--standalone is for one host" in refused("--standalone", "--nnodes", "2")
    assert "--standalone is for one host" in refused("--standalone", "--nodes", "h1,h2")


KEY = {"PHOENIX_JOB_KEY": "0123456789abcdef" * 4}


def test_several_hosts_need_to_know_where_they_meet(start: Start, refused: Callable[..., str]) -> None:
    assert "--rdzv-endpoint HOST:PORT" in refused("--nnodes", "2", **KEY)
    assert "port 0" in refused("--nnodes", "2", "--rdzv-endpoint", "h:0", **KEY)
    assert start("--nnodes", "2", "--rdzv-endpoint", "h:1", **KEY).join_endpoint == ("h", 1)
    assert start("--nnodes", "2:4", "--rdzv-endpoint", "h", **KEY).join_endpoint == ("h", 29400)
    assert start("--nnodes", "2", "--master-addr", "h", **KEY).join_endpoint == ("h", 29500)
    assert start("--nnodes", "2", "--master_addr=[::1]", "--master_port=9", **KEY).join_endpoint == ("::1", 9)


def test_several_hosts_need_a_key(refused: Callable[..., str]) -> None:
    assert "phoenix-run keygen" in refused("--nnodes", "2", "--rdzv-endpoint", "h:1")


def test_a_node_rank_must_exist(start: Start, refused: Callable[..., str]) -> None:
    assert "--node-rank 2" in refused("--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "h:1", **KEY)
    assert start("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "h:1", **KEY).node_rank == 1


def test_nodes_and_nnodes_must_agree(start: Start, refused: Callable[..., str], tmp_path: Path) -> None:
    assert start("--nodes", "2", "--nnodes", "2").joins is False
    assert "--nnodes 3 does not go with --nodes 2" in refused("--nodes", "2", "--nnodes", "3")
    assert "--nnodes 2 does not go with --nodes h1,h2" in refused("--nodes", "h1,h2", "--nnodes", "2")
    hosts = tmp_path / "hosts"
    hosts.write_text("h1\nh2\n")
    assert start("--hostfile", str(hosts), "--nodes", "1").hostfile == str(hosts)
    assert "not from both" in refused("--hostfile", str(hosts), "--nodes", "h1,h2")


def test_the_join_timeout_may_come_from_rdzv_conf(start: Start) -> None:
    assert start().join_timeout == 600
    assert start("--rdzv-conf", "timeout=900").join_timeout == 900
    assert start("--rdzv-conf", "timeout=900,join_timeout=30").join_timeout == 30
    assert start("--rdzv-conf", "join_timeout=30", "--join-timeout", "5").join_timeout == 5


def test_a_drill_implies_that_drills_are_allowed(start: Start) -> None:
    assert start("--drill", "kill-node --node 1 --after 20").allow_drills is True
    assert start().allow_drills is False


def test_a_variable_without_a_value_must_be_set_here(start: Start, refused: Callable[..., str]) -> None:
    assert start("--env", "MINE", MINE="1").env == ("MINE",)
    assert "--env MINE: it is not set here" in refused("--env", "MINE")
    assert "the key is kept from the workers" in refused("--env", "PHOENIX_JOB_KEY", **KEY)


def test_options_without_effect_are_remarked_upon(start: Start) -> None:
    assert start().remarks == ()
    assert len(start("--logs-specs", "mine", "--event-log-handler", "console").remarks) == 2


def test_a_run_knows_which_fields_were_given(start: Start) -> None:
    assert start("--spares", "0", PET_ROLE="x").given == {"spares", "role"}


def test_the_order_between_timeouts_holds_by_default_and_is_checked(refused: Callable[..., str]) -> None:
    for order in ORDERS:
        assert timeout(order.shorter) * order.factor <= timeout(order.longer)
        with pytest.raises(UsageError, match="is too short for"):
            check_timeouts({order.longer: timeout(order.shorter) * order.factor * 0.99})
    assert "--heartbeat-timeout of 0.6 s is too short" in refused("--heartbeat-timeout", "0.6")
    assert "--orphan-timeout of 2 s is too short for --heartbeat-timeout of 3 s" in refused("--orphan-timeout", "2")


def test_defaults_of_options_come_from_the_table_of_timeouts() -> None:
    settings = RunSettings(script="x")
    for row in TIMEOUTS.values():
        if row.option:
            assert getattr(settings, field(row.option[2:])) == row.seconds == settings.timeouts()[row.name]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_a_value_that_is_shown_can_be_typed_again(option: Option) -> None:
    kind = option.value
    for name, text, value in VALUES + FLAG_ONLY:
        if name == option.name and not kind.repeated:
            assert kind.parse(kind.show(kind.parse(text))) == value


def test_settings_need_no_flags_at_all() -> None:
    assert settings_from(resolve({}, {}), "train.py", ("a",), {}) == RunSettings(script="train.py", script_args=("a",))


def test_an_endpoint_is_read_as_torch_reads_it() -> None:
    assert parse_endpoint("h:5", 1) == ("h", 5)
    assert parse_endpoint("[fe80::1]:5", 1) == ("fe80::1", 5)
    assert parse_endpoint("[fe80::1]", 1) == ("fe80::1", 1)
    assert parse_endpoint("h", 1) == ("h", 1)
