"""A forked worker is in nothing different from `python -u script.py`; parked processes end with their agent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from phoenix_launch import channel
from phoenix_launch.bootstrap import Command, RunMode
from phoenix_launch.local_messages import (
    Become,
    BecomeStore,
    ForkServerReady,
    ForkServerSettings,
    NodeLocal,
    Park,
    Parked,
    StoreUp,
)
from phoenix_launch.progress import ProgressPage

Eventually = Callable[..., object]
DEADLINE = 30.0


def received(sock: socket.socket) -> NodeLocal | None:
    answer = channel.receive(sock)
    return None if answer is None else answer[0]


@dataclass
class Child:
    """A process forked for us, seen as its agent sees it: our child, with two pipes and a control socket."""

    control: socket.socket
    streams: dict[str, int]
    pid: int = 0
    output: dict[str, bytes] = field(default_factory=dict)

    def become(self, *args: str, **environment: str) -> None:
        channel.send(self.control, Become(environment=environment, args=args))

    def read_all(self, name: str) -> None:
        with os.fdopen(self.streams[name], "rb") as opened:
            self.output[name] = opened.read()

    def wait(self) -> Ended:
        readers = [threading.Thread(target=self.read_all, args=(name,)) for name in self.streams]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(DEADLINE)
        self.control.close()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return Ended(code, *(self.output[name].decode(errors="replace") for name in ("stdout", "stderr")))


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str


@dataclass
class Server:
    """A fork server as an agent keeps it."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    ready: ForkServerReady
    folder: Path
    command: Command

    def write(self, source: str) -> None:
        (self.folder / "script.py").write_text(textwrap.dedent(source))

    def park(self) -> Child:
        ours, theirs = socket.socketpair()
        ours.settimeout(DEADLINE)
        out, err = os.pipe(), os.pipe()
        channel.send(self.link, Park(slot=0), [theirs.fileno(), out[1], err[1]])
        theirs.close()
        os.close(out[1])
        os.close(err[1])
        child = Child(ours, {"stdout": out[0], "stderr": err[0]})
        parked = received(ours)
        assert isinstance(parked, Parked)
        child.pid = parked.pid
        return child

    def run(self, *args: str, **environment: str) -> Ended:
        child = self.park()
        child.become(*args, **environment)
        return child.wait()

    def python(self, *args: str, **environment: str) -> Ended:
        """The same by a fresh interpreter."""
        flags = ["-u", "-m"] if self.command.mode is RunMode.MODULE else ["-u"]
        done = subprocess.run(
            [sys.executable, *flags, self.command.target, *args],
            cwd=self.folder,
            env=worker_environment() | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DEADLINE,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def check_same(self, *args: str, **environment: str) -> Ended:
        ended = self.run(*args, **environment)
        assert ended == self.python(*args, **environment)
        return ended


def worker_environment() -> dict[str, str]:
    return os.environ | {"PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "2"}


@contextlib.contextmanager
def signals_as_a_guardian_has_them() -> Iterator[None]:
    """Ignored and blocked signals are inherited by every process it starts, through exec too."""
    ignored = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    }
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in ignored.items():
            signal.signal(number, handler)


def start(folder: Path, command: Command, path: str = "", stderr: int | None = None) -> Server:
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE)
    with signals_as_a_guardian_has_them():
        process = subprocess.Popen(
            [sys.executable, "-m", "phoenix_runtime.fork_server", str(theirs.fileno())],
            cwd=folder,
            env=worker_environment() | {"PYTHONPATH": os.pathsep.join([path, *sys.path] if path else sys.path)},
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=[theirs.fileno()],
        )
    theirs.close()
    channel.send(ours, ForkServerSettings(command=command, agent_pid=os.getpid()))
    ready = received(ours)
    assert isinstance(ready, ForkServerReady)
    return Server(process, ours, ready, folder, command)


def stop(server: Server) -> None:
    server.link.close()
    assert server.process.wait(DEADLINE) == 0


def script(target: str = "script.py", preload: str = "auto", mode: RunMode = RunMode.SCRIPT) -> Command:
    return Command(mode=mode, target=target, args=(), python=sys.executable, preload=preload)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text("import numpy\nimport torch\n")
    started = start(folder, script())
    yield started
    stop(started)


# --- the worker is a plain python -------------------------------------------------------------------------------------


def test_torch_and_the_scripts_imports_are_loaded(server: Server) -> None:
    assert server.ready.fork_unsafe == ""
    assert server.ready.remarks == ()
    assert server.ready.loaded == ("torch", "torch.distributed", "numpy")


def test_where_numpy_is_missing_torchs_one_warning_is_not_shown_and_all_filters_stay(tmp_path: Path) -> None:
    without = tmp_path / "numpy"
    without.mkdir()
    (without / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')\n")
    (tmp_path / "script.py").write_text("import torch, warnings; print(warnings.filters)\n")
    reader, writer = os.pipe()
    server = start(tmp_path, script(), str(tmp_path), writer)
    os.close(writer)
    try:
        forked, fresh = server.run(), server.python(PYTHONPATH=str(tmp_path))
    finally:
        stop(server)
    with os.fdopen(reader) as said:
        assert (said.read(), forked.stderr) == ("", "")
    assert "Failed to initialize NumPy" in fresh.stderr, "torch says it no more: nothing is left to hide"
    assert forked.stdout == fresh.stdout


def test_the_main_module_is_that_of_a_fresh_interpreter(server: Server) -> None:
    server.write("""
        import io, os, signal, sys
        print(sys.argv, sys.orig_argv, sys.path[0], __file__, sorted(globals()), __name__, __doc__, __package__)
        print(__spec__, __loader__.path, __builtins__, __cached__, __annotations__)
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            print(stream, type(stream.buffer), stream.errors, stream.line_buffering, stream.write_through)
            print(stream.fileno(), stream.buffer.name, stream.isatty())
        print({n: str(signal.getsignal(n)) for n in signal.valid_signals()}, signal.pthread_sigmask(0, ()))
        print(os.getcwd(), sys.excepthook is sys.__excepthook__, sorted(os.listdir("/proc/self/fd")))
        assert sys.modules["__main__"].__dict__ is globals() and "fork_server" not in repr(sys.modules["__main__"])
    """)
    server.check_same("--", "-u", "a b\nc", "")


def test_bits_and_threads_of_a_computation_are_those_of_a_fresh_interpreter(server: Server) -> None:
    server.write("""
        import hashlib, os
        import numpy, torch
        print(torch.get_num_threads())
        for threads in (2, 1):
            torch.set_num_threads(threads)
            torch.manual_seed(7)
            model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.GELU(), torch.nn.Linear(500, 300))
            for _ in range(3):
                model(torch.randn(400, 300)).square().mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad
            numbers = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
            print(threads, hashlib.sha256(numbers).hexdigest())
            matrix = numpy.random.RandomState(3).rand(600, 600)
            print(hashlib.sha256((matrix @ matrix).tobytes()).hexdigest(), len(os.listdir("/proc/self/task")))
    """)
    server.check_same()


def test_siblings_draw_different_numbers(server: Server) -> None:
    server.write("import numpy, random, torch; print(numpy.random.rand(), random.random(), torch.rand(1).item())")
    first, second = (server.run().stdout.split() for _ in range(2))
    assert len(first) == len(second) == 3
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_pickling_late_threads_atexit_and_loader_processes_work(server: Server) -> None:
    server.write("""
        import atexit, dataclasses, multiprocessing, pickle, sys, threading
        import torch

        @dataclasses.dataclass
        class Item:
            number: int

        class Numbers(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return Item(index)

        def same(batch):
            return batch

        def double(item):
            return Item(2 * item.number)

        def late(where, done):
            done.wait()
            print(where, pickle.loads(pickle.dumps(Item(3))), flush=True)

        if __name__ == "__main__":
            over = threading.Event()
            atexit.register(late, "at exit", over)
            for method in ("fork", "spawn"):
                loader = torch.utils.data.DataLoader(
                    Numbers(), batch_size=2, num_workers=1, multiprocessing_context=method, collate_fn=same
                )
                print(method, list(loader))
            with multiprocessing.get_context("fork").Pool(1) as pool:
                print(pool.map(double, [Item(1)]))
            threading.Thread(target=late, args=("thread", over)).start()
            threading.Timer(0.1, over.set).start()
    """)
    ended = server.run()
    items = "[[{0}(number=0), {0}(number=1)], [{0}(number=2), {0}(number=3)]]"
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == [
        "fork " + items.format("Item"),
        "spawn " + items.format("Item"),
        "[Item(number=2)]",
        "thread Item(number=3)",
        "at exit Item(number=3)",
    ]
    assert ended.code == 0


EXITS = {
    "falls off the end": ("print('x')", 0),
    "int": ("raise SystemExit(7)", 7),
    "none": ("import sys; sys.exit()", 0),
    "text": ("import sys; sys.exit('enough')", 1),
    "too big": ("import sys; sys.exit(256 + 3)", 3),
    "negative": ("import sys; sys.exit(-1)", 255),
    "os._exit": ("import os; os._exit(9)", 9),
    "exception": ("def f():\n    1 / 0\n\ntry:\n    f()\nexcept ZeroDivisionError:\n    {}['x']", 1),
    "exception group": ("raise ExceptionGroup('several', [ValueError(1), KeyError('k')])", 1),
    "syntax error": ("x = (", 1),
    "signal": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "abort": ("import os; os.abort()", -signal.SIGABRT),
    "ctrl-c": ("import signal; signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    "own hook": (
        "import sys, traceback\nsys.excepthook = lambda *a: print('mine', len(traceback.extract_tb(a[2])))\n1 / 0",
        1,
    ),
    "hook that looks back": (
        "import atexit, sys, traceback\n"
        "def late():\n"
        "    print(traceback.extract_tb(sys.last_traceback), sys.excepthook is sys.__excepthook__)\n"
        "atexit.register(late)\n"
        "1 / 0",
        1,
    ),
    "error at exit": ("import atexit, operator; atexit.register(operator.floordiv, 1, 0)", 0),
    "error in thread": ("import threading; t = threading.Thread(target=lambda: 1 / 0); t.start()", 0),
    "broken text": ("print('\\udc80\\u20ac')", 0),
}


@pytest.mark.parametrize("name", EXITS)
def test_exit_code_and_last_words_are_pythons(server: Server, name: str) -> None:
    source, code = EXITS[name]
    server.write(source)
    ended = server.run()
    reference = server.python()
    assert ended.code == reference.code == code
    assert ended.stdout == reference.stdout
    if name != "error in thread":  # names a Thread-N and its address
        assert ended.stderr == reference.stderr


def test_a_missing_script_is_reported_as_python_does(server: Server) -> None:
    (server.folder / "script.py").unlink()
    assert server.check_same().code == 2


def test_the_environment_is_set_for_c_and_for_children_too(server: Server) -> None:
    server.write("""
        import ctypes, os, subprocess
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        print(getenv(b"RANK"), os.environ["RANK"], subprocess.check_output(["printenv", "RANK"]))
    """)
    assert server.run(RANK="3").stdout == "b'3' 3 b'3\\n'\n"


def test_a_worker_reports_to_the_page_that_its_environment_names(server: Server) -> None:
    server.write("import phoenix_runtime; phoenix_runtime.report(step=8, tokens=3)")
    descriptor, page = ProgressPage.create()
    assert server.run(PHOENIX_PROGRESS=f"/proc/{os.getpid()}/fd/{descriptor}") == Ended(0, "", "")
    assert (page.read().step, page.read().tokens) == (8, 3)
    page.close()
    os.close(descriptor)


def test_output_is_there_before_a_kill(server: Server) -> None:
    server.write("""
        import ctypes, os, signal
        print("python", end=" ")
        ctypes.CDLL(None).printf(b"c ")
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert server.run() == Ended(-signal.SIGKILL, "python c ", "")


def test_a_worker_leads_its_own_session_and_is_the_agents_child(server: Server) -> None:
    server.write("import os; print(os.getsid(0) == os.getpgrp() == os.getpid(), os.getppid())")
    assert server.run().stdout == f"True {os.getpid()}\n"


def test_the_data_folder_next_to_the_script_can_hold_modules_written_later(server: Server) -> None:
    server.write("import neighbour; print(neighbour.__file__)")
    (server.folder / "neighbour.py").write_text("")
    assert server.run().stdout == f"{server.folder / 'neighbour.py'}\n"


# --- parked processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_parked_process_can_be_ended_by_a_signal(server: Server, number: signal.Signals) -> None:
    child = server.park()
    os.kill(child.pid, number)
    assert child.wait() == Ended(-number, "", "")


def test_a_parked_process_ends_when_its_control_socket_closes(server: Server) -> None:
    child = server.park()
    child.control.close()
    assert child.wait() == Ended(0, "", "")


def test_parked_processes_outlive_nothing_of_each_other(server: Server) -> None:
    first, second = server.park(), server.park()
    first.control.close()
    assert first.wait().code == 0  # the second does not hold the first one's descriptors
    server.write("print('still here')")
    second.become()
    assert second.wait().stdout == "still here\n"


def test_a_parked_process_hosts_a_store(server: Server) -> None:
    child = server.park()
    channel.send(child.control, BecomeStore(address="127.0.0.1", port=0))
    answer = received(child.control)
    assert isinstance(answer, StoreUp) and answer.error == ""
    socket.create_connection(("127.0.0.1", answer.port), timeout=5).close()
    child.control.close()
    assert child.wait() == Ended(0, "", "")


# --- other commands, other preloads -----------------------------------------------------------------------------------


def test_a_module_runs_as_under_python_m(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("print('package', __name__)\n")
    (package / "__main__.py").write_text(
        "import sys\nfrom . import part\n"
        "print(sys.argv, sys.orig_argv, sys.path[0], __spec__.name, __package__, sorted(globals()), part.__name__)\n"
        "raise ValueError('as planned')\n"
    )
    (package / "part.py").write_text("")
    (tmp_path / "script.py").write_text("")
    server = start(tmp_path, script("package", preload="none", mode=RunMode.MODULE))
    try:
        assert server.ready.loaded == ("torch", "torch.distributed")
        assert server.check_same("a", "-b").code == 1
        package.rename(tmp_path / "moved")
        assert server.check_same().code == 1
    finally:
        stop(server)


def test_modules_unfit_for_a_fork_are_left_out_and_the_worker_loads_them_itself(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nover = threading.Event()\nthreading.Thread(target=over.wait, daemon=True).start()\n"
    )
    (tmp_path / "with_child.py").write_text(
        "import subprocess\nchild = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)\n"
    )
    (tmp_path / "sharing.py").write_text("import mmap\nshared = mmap.mmap(-1, 4096)\n")
    (tmp_path / "broken.py").write_text("import os\nos.environ['LEFT_OVER'] = '1'\nraise SystemExit('not\\nhere')\n")
    (tmp_path / "fine.py").write_text("")
    (tmp_path / "script.py").write_text(
        "import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport sys, threading, torch\n"
        "print(sorted({'threaded', 'with_child', 'sharing', 'fine'} & set(sys.modules)), threading.active_count())\n"
        "import threaded\nprint(threading.active_count())\n"
    )
    server = start(tmp_path, script(preload="threaded, with_child,sharing,broken,fine"))
    try:
        assert server.ready.fork_unsafe == ""
        assert server.ready.loaded == ("torch", "torch.distributed", "fine")
        assert server.ready.remarks[:4] == (
            "module threaded starts threads: not preloaded",
            "module with_child starts processes: not preloaded",
            "module sharing maps memory that processes share: not preloaded",
            "module broken cannot be imported, not preloaded: SystemExit: not",
        )
        assert "OMP_NUM_THREADS" in server.ready.remarks[4]
        assert all(ended(child) for child in psutil.Process(server.process.pid).children())
        assert server.run() == Ended(0, "['fine'] 1\n2\n", "")
    finally:
        stop(server)


def test_a_folder_that_hides_a_loaded_module_is_not_forked_for(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("")
    (tmp_path / "script.py").write_text("import numpy\nimport torch\noptimizer = torch.optim.SGD\n")
    server = start(tmp_path, script())
    try:
        assert server.ready.loaded == ("torch", "torch.distributed", "torch._dynamo")  # which itself is fit for a fork
        assert "numpy" in server.ready.fork_unsafe
        ours, theirs = socket.socketpair()
        ours.settimeout(DEADLINE)
        channel.send(server.link, Park(slot=0), [theirs.fileno(), 1, 2])
        theirs.close()
        assert received(ours) is None
        ours.close()
    finally:
        stop(server)


# --- ownership --------------------------------------------------------------------------------------------------------

AGENT = """
import os, socket, subprocess, sys
from phoenix_launch import channel
from phoenix_launch.bootstrap import *
from phoenix_launch.wire import *
from phoenix_launch.local_messages import *
import ctypes
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
ours, theirs = socket.socketpair()
end = theirs.fileno()
server = subprocess.Popen([sys.executable, "-m", "phoenix_runtime.fork_server", str(end)], pass_fds=[end])
command = Command(mode=RunMode.SCRIPT, target="script.py", args=(), python=sys.executable, preload="none")
channel.send(ours, ForkServerSettings(command=command, agent_pid=os.getpid()))
assert isinstance(channel.receive(ours)[0], ForkServerReady)
controls = []
for orders in (None, Become(environment={}, args=()), BecomeStore(address="127.0.0.1", port=0)):
    control, end = socket.socketpair()
    channel.send(ours, Park(slot=0), [end.fileno(), 1, 2])
    end.close()
    assert isinstance(channel.receive(control)[0], Parked)
    if orders is not None:
        channel.send(control, orders)
    controls.append(control)
assert isinstance(channel.receive(control)[0], StoreUp)
print("all up", flush=True)
sys.stdin.read()
"""


def test_an_agent_killed_takes_fork_server_parked_workers_and_store_with_it(
    tmp_path: Path, eventually: Eventually
) -> None:
    (tmp_path / "script.py").write_text("import signal\nprint('working', flush=True)\nsignal.pause()\n")
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert agent.stdout is not None and agent.stdin is not None
    assert {agent.stdout.readline(), agent.stdout.readline()} == {b"all up\n", b"working\n"}
    tree = psutil.Process(agent.pid).children(recursive=True)
    assert len(tree) == 4
    agent.kill()
    agent.wait()
    agent.stdin.close()
    agent.stdout.close()
    eventually(lambda: all(ended(process) for process in tree), what="the agent's processes end")
    for process in tree:
        os.waitpid(process.pid, 0)


def ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
