"""Turns a forked process into what `python -u script.py args` or `python -u -m module args` would have been."""

from __future__ import annotations

import builtins
import ctypes
import importlib
import importlib.machinery
import io
import multiprocessing.process
import os
import pkgutil
import signal
import sys
import types
import zipfile
from dataclasses import dataclass
from typing import Any, Final

from phoenix_launch.bootstrap import Command, RunMode
from phoenix_launch.local_messages import Become

_CANNOT_OPEN: Final = 2  # python's own exit code for a script that it cannot read
_UNBUFFERED: Final = 2  # _IONBF of <stdio.h>


@dataclass(frozen=True, slots=True)
class Main:
    """What the top-level frame has to run. `code` is None when runpy finds it: a module, a folder, a zip file."""

    module: types.ModuleType
    code: types.CodeType | None = None
    runpy_name: str = ""
    alter_argv: bool = False

    def finish(self) -> None:
        """What python does once a script's last line has run, before threads are joined and atexit handlers called."""
        if self.code is not None:
            self.module.__dict__.pop("__file__", None)
            self.module.__dict__.pop("__cached__", None)


def unbuffered_streams() -> None:
    """Make sys.stdout and sys.stderr what `python -u` makes them, C's stdout included."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, f"__{name}__")
        if old is None:  # closed when this interpreter started
            continue
        old.flush()
        raw = io.FileIO(descriptor, "wb", closefd=False)
        raw.name = f"<{name}>"
        text = io.TextIOWrapper(raw, encoding=old.encoding, errors=old.errors, newline="\n", write_through=True)
        text.mode = "w"  # type: ignore[misc]  # as python's own start does
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _UNBUFFERED, 0)


def default_signals() -> None:
    """Signals as an interpreter started from a shell has them, except that SIGINT just ends this process for now.

    Only what was ignored or blocked survives an exec; handlers that python was told to install (faulthandler) stay.
    """
    of_python = {signal.SIGPIPE, signal.SIGXFSZ}
    for number in signal.valid_signals() - of_python:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def become(command: Command, orders: Become) -> Main:
    """Set this process up as the worker and give what its top-level frame has to run.

    Raises SystemExit and SyntaxError as python would end with for such a script.
    """
    os.environ.update(orders.environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _forget_the_parent()
    module = _fresh_main_module()
    flags = ["-u", "-m"] if command.mode is RunMode.MODULE else ["-u"]
    sys.orig_argv[:] = [sys.executable, *flags, command.target, *orders.args]
    if command.mode is RunMode.MODULE:
        sys.argv[:] = ["-m", *orders.args]
        _put_first_on_path(os.getcwd())
        return Main(module, runpy_name=command.target, alter_argv=True)
    sys.argv[:] = [command.target, *orders.args]
    return _script(module, command.target)


def hide_frames(error: BaseException, top: types.FrameType) -> None:
    """Let the traceback that python is about to show begin at the script, as if nothing of ours had called it.

    The exception goes on its natural way, so that exit code, `sys.last_value` and the death by SIGINT after a
    KeyboardInterrupt stay python's own; only the hook that shows it, be it the user's, gets the shorter traceback.
    """
    hook = sys.excepthook
    ours = os.path.join(os.path.dirname(__file__), "")

    def shorten(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> Any:
        sys.excepthook = hook
        if value is error:
            while trace is not None and trace.tb_frame is not top:
                trace = trace.tb_next
            while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
                trace = trace.tb_next
            value.__traceback__ = trace
            sys.last_traceback = trace
        return hook(kind, value, trace)

    sys.excepthook = shorten


def _script(module: types.ModuleType, target: str) -> Main:
    if os.path.isdir(target) or zipfile.is_zipfile(target):
        _put_first_on_path(target)
        return Main(module, runpy_name="__main__")
    _put_first_on_path(os.path.dirname(os.path.realpath(target)))
    file = target if os.path.isabs(target) else os.path.join(os.getcwd(), target)
    try:
        with open(file, "rb") as opened:
            compiled = pkgutil.read_code(opened) if file.endswith(".pyc") else None
            source = b"" if compiled else opened.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(_CANNOT_OPEN) from None
    module.__dict__.update(
        __file__=file, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", file)
    )
    return Main(module, code=compiled or compile(source, file, "exec", dont_inherit=True))


def _fresh_main_module() -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __annotations__={})
    # Both: multiprocessing made the second an alias of the first when it was imported, and pickles name either.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    return module


def _put_first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _forget_the_parent() -> None:
    """Give up what siblings would share and a fresh process draws by chance; python reseeds its own random."""
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # torch.initial_seed() of a fresh process is random; a GPU's is not
    multiprocessing.process.current_process().authkey = os.urandom(32)
    importlib.invalidate_caches()
