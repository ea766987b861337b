"""What all tests share: waiting for a condition, a home of their own, and the check that no process is left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import psutil
import pytest
from hypothesis import settings

settings.register_profile("noisy machines", deadline=None)  # how long an example takes says nothing there
settings.load_profile("noisy machines")

T = TypeVar("T")

PR_SET_CHILD_SUBREAPER: Final = 36
POLL_SECONDS: Final = 0.01
FIRST: Final = (
    "tests/hosts",
    "tests/swaps/test_failures.py",
    "tests/swaps/test_swaps.py",
    "tests/swaps/test_state_swaps.py",
    "tests/runtime/test_repeated_steps.py",
    "tests/communicators/test_feature_matrix.py",
    "tests/communicators/test_shadow.py",
)
LEFTOVER_GRACE: Final = 3.0  # seconds that processes which were told to end may take after a module's last test


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that one of several workers is not left alone with it at the end."""
    items.sort(key=lambda item: FIRST.index(_scope(item.nodeid)) if _scope(item.nodeid) in FIRST else len(FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """For runs on several workers: a file stays together, since its tests share processes; so do all tests of the hosts."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    config.option.loadscopereorder = False
    return ByFile(config, log)


def _scope(nodeid: str) -> str:
    file = nodeid.split("::")[0]
    return "tests/hosts" if file.startswith("tests/hosts/") else file


@pytest.fixture(scope="session")
def eventually() -> Callable[..., object]:
    """`eventually(check, seconds=10.0, what="")` returns the first true value of `check()`, or fails the test."""
    pause = threading.Event()

    def wait(check: Callable[[], T], seconds: float = 10.0, what: str = "") -> T:
        deadline = time.monotonic() + seconds
        while True:
            value = check()
            if value:
                return value
            if time.monotonic() >= deadline:
                pytest.fail(f"not within {seconds:g} s: {what or getattr(check, '__name__', check)} (last: {value!r})")
            pause.wait(POLL_SECONDS)

    return wait


@pytest.fixture
def phoenix_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PHOENIX_HOME that nobody else uses."""
    home = tmp_path / "phoenix-home"
    monkeypatch.setenv("PHOENIX_HOME", str(home))
    return home


@pytest.fixture(scope="session", autouse=True)
def _clean_environment() -> Iterator[None]:
    """Nothing that the developer's shell says about jobs is heard by the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("PET_", "PHOENIX_", "TORCHELASTIC_", "TORCH_ELASTIC_")):
                patch.delenv(name)
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # thousands of processes would compile our modules anew
        yield


@pytest.fixture(scope="session", autouse=True)
def _signals_are_heard() -> None:
    """Shells ignore signals for what they put into the background, nohup does: inherited by all processes of the tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _subreaper() -> None:
    """Orphans of the tests' processes come to pytest instead of init, so that they are found."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left(_subreaper: None) -> Iterator[None]:
    before = {(process.pid, process.create_time()) for process in psutil.Process().children(recursive=True)}
    yield
    deadline = time.monotonic() + LEFTOVER_GRACE
    pause = threading.Event()
    while (left := _living_since(before)) and time.monotonic() < deadline:
        pause.wait(POLL_SECONDS)
    if left:
        named = [_described(process) for process in left]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=LEFTOVER_GRACE)
        pytest.fail("processes are left behind:\n" + "\n".join(named))


def _living_since(before: set[tuple[int, float]]) -> list[psutil.Process]:
    living = []
    for process in psutil.Process().children(recursive=True):
        try:
            if (process.pid, process.create_time()) in before or _is_resource_tracker(process):
                continue
            if os.readlink(f"/proc/{process.pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
                continue  # it runs in a test host, which looks after its own
            if process.status() == psutil.STATUS_ZOMBIE:
                if process.ppid() == os.getpid():
                    os.waitpid(process.pid, os.WNOHANG)
                continue
            living.append(process)
        except (psutil.NoSuchProcess, ChildProcessError, FileNotFoundError):
            continue
    return living


def _is_resource_tracker(process: psutil.Process) -> bool:
    """multiprocessing's own bookkeeper ends with pytest."""
    return process.ppid() == os.getpid() and "multiprocessing.resource_tracker" in " ".join(process.cmdline())


def _described(process: psutil.Process) -> str:
    try:
        return f"  {process.pid} (parent {process.ppid()}): {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return f"  {process.pid}: gone meanwhile"
