"""The fork server of a node: torch and the script's imports loaded once, from which workers and spares are forked.

One thread, no torch operation ever: a child forked after its parent used OpenMP hangs. A worker leaves `serve` and runs
the script in this file's top-level frame, so that the interpreter shuts down under it as under `python script.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NoReturn

import msgspec

from phoenix_launch import channel
from phoenix_launch.bootstrap import Command
from phoenix_launch.errors import ProtocolError
from phoenix_launch.local_messages import Become, BecomeStore, ForkServerReady, ForkServerSettings, Park, Parked
from phoenix_runtime import fork_safety, leaving, main_module, preload

_PR_SET_PDEATHSIG: Final = 1
_REPARENTING_MS: Final = 10_000  # from the middle child's fork to its exit; takes microseconds
_BROKEN: Final = 70  # EX_SOFTWARE: a bug of ours in a forked process
_NO_NUMPY: Final = "Failed to initialize NumPy"  # torch says it at every import where there is none
_environment_at_start = dict(os.environ)  # imports may add to it, a fresh start must not inherit that


class State(msgspec.Struct, frozen=True):
    """What a fork server hands to itself when it starts afresh without modules that made it unfit to fork."""

    settings: ForkServerSettings
    without: dict[str, str]
    started: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a forked process has to become: the reason why `serve` returns in it."""

    command: Command
    orders: Become


def serve(descriptor: int, state_descriptor: int | None) -> Work | None:
    """Serve until the agent goes (None), or, in a forked process, until it is told to become a worker."""
    agent = socket.socket(fileno=descriptor)
    agent.setblocking(True)
    state = _receive_settings(agent) if state_descriptor is None else _read_state(state_descriptor)
    if state is None:
        return None
    settings = state.settings
    if not die_with(settings.agent_pid):
        return None
    main_module.default_signals()
    main_module.unbuffered_streams()
    ready = _load(state, agent)
    # What is loaded takes no part in collections: that would copy it into every worker and prolong its exit by 1 s.
    gc.freeze()
    channel.send(agent, ready)
    while (received := channel.receive(agent)) is not None:
        message, descriptors = received
        if not isinstance(message, Park) or len(descriptors) != 3:
            raise ProtocolError(f"a fork server got {type(message).__name__} with {len(descriptors)} descriptors")
        if not ready.fork_unsafe and _fork_twice():
            return Work(settings.command, _wait_parked(agent, settings.agent_pid, descriptors))
        for each in descriptors:  # in the agent's eyes a closed control socket is a process that never came to be
            os.close(each)
    agent.close()
    return None


def die_with(parent: int) -> bool:
    """Be killed when `parent` ends; False if it is not our parent (any more)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def _receive_settings(agent: socket.socket) -> State | None:
    received = channel.receive(agent)
    if received is None:
        return None
    if not isinstance(received[0], ForkServerSettings):
        raise ProtocolError(f"a fork server's first message is its settings, not {type(received[0]).__name__}")
    return State(settings=received[0], without={}, started=time.monotonic())


def _load(state: State, agent: socket.socket) -> ForkServerReady:
    command, cwd = state.settings.command, os.getcwd()
    if not sys.flags.safe_path:
        del sys.path[0]  # python -m put the working directory there, the script will have its own folder there
    chosen = preload.choose(command, sys.path, cwd)
    folder = preload.script_folder(command, cwd)
    if command.preload != "auto":
        sys.path.insert(0, folder)  # modules named by the user may well be the script's neighbours
    with _unsaid(_NO_NUMPY):
        torch = fork_safety.load(preload.ALWAYS)
    loaded = fork_safety.load(i for i in chosen.imports if i not in preload.ALWAYS and i.module not in state.without)
    if command.preload != "auto":
        sys.path.remove(folder)
    if loaded.unsafe:
        _start_afresh(agent, msgspec.structs.replace(state, without=state.without | loaded.unsafe))
    return ForkServerReady(
        seconds=time.monotonic() - state.started,
        loaded=(*torch.modules, *loaded.modules),
        remarks=(
            *(f"module {name} {harm}: not preloaded" for name, harm in state.without.items()),
            *(f"module {name} cannot be imported, not preloaded: {why}" for name, why in loaded.failed.items()),
            *chosen.remarks,
        ),
        fork_unsafe=_why_not_fork(torch, folder),
    )


@contextlib.contextmanager
def _unsaid(warning: str) -> Iterator[None]:
    """One warning is not shown; all other filters, also those that the imports add, stay as they are."""
    warnings.filterwarnings("ignore", message=warning)
    ours = warnings.filters[0]
    try:
        yield
    finally:
        if ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]  # a list, whatever typeshed says


def _why_not_fork(torch: fork_safety.Loaded, folder: str) -> str:
    if torch.failed:
        return "; ".join(f"{name} cannot be imported: {why}" for name, why in torch.failed.items())
    # Native threads of torch's own libraries are its business, as they are when a script forks after importing it.
    unsafe = {name: harm for name, harm in torch.unsafe.items() if harm != "starts threads"}
    if unsafe:
        return "; ".join(f"import {name} {harm}" for name, harm in unsafe.items())
    if threading.active_count() > 1:
        return "import torch starts a Python thread"
    if sys.flags.safe_path:
        return ""
    loaded = {name: getattr(sys.modules[name], "__file__", None) for name in list(sys.modules) if "." not in name}
    hidden = preload.hidden_modules(loaded, folder)
    return f"{folder} has a module of the same name as one that torch needs: {', '.join(hidden)}" if hidden else ""


def _start_afresh(agent: socket.socket, state: State) -> NoReturn:
    """Replace this process by a fork server that leaves out what `state.without` names."""
    for child in fork_safety.traces().children:
        os.kill(child, signal.SIGKILL)  # an import of ours started it, and nobody will know of it any more
    descriptor = os.memfd_create("phoenix-fork-server")
    os.write(descriptor, msgspec.msgpack.encode(state))
    for each in (descriptor, agent.fileno()):
        os.set_inheritable(each, True)
    flags = sys.orig_argv[1 : sys.orig_argv.index("-m")]
    module = ["-m", "phoenix_runtime.fork_server", str(agent.fileno()), str(descriptor)]
    os.execve(sys.executable, [sys.executable, *flags, *module], _environment_at_start)


def _read_state(descriptor: int) -> State:
    with os.fdopen(descriptor, "rb") as opened:
        opened.seek(0)
        return msgspec.msgpack.decode(opened.read(), type=State)


def _fork_twice() -> bool:
    """True in the grandchild, which the agent will inherit; False here, also when there is no process to be had."""
    try:
        middle = os.fork()
        if middle:
            os.waitpid(middle, 0)
            return False
    except OSError as error:
        print(f"fork server: cannot fork: {error}", file=sys.stderr)
        return False
    try:
        if os.fork():
            os._exit(0)
    except OSError as error:
        print(f"fork server: cannot fork: {error}", file=sys.stderr)
        os._exit(1)
    return True


def _wait_parked(agent: socket.socket, agent_pid: int, descriptors: tuple[int, ...]) -> Become:
    """In the grandchild: wait for what to become. Returns only in a future worker, with no descriptor of ours left."""
    try:
        agent.close()
        if not _reparented(agent_pid):
            os._exit(0)  # the agent has gone meanwhile
        os.setsid()
        control = socket.socket(fileno=descriptors[0])
        control.setblocking(True)
        _take_stdio(descriptors[1], descriptors[2])
        channel.send(control, Parked(pid=os.getpid()))
        received = channel.receive(control)  # without a deadline: it may wait as long as the job runs, and ends with it
        if received is None:
            os._exit(0)
        if isinstance(received[0], BecomeStore):
            from phoenix_runtime import store_host

            store_host.serve(control, received[0])
        if not isinstance(received[0], Become):
            raise ProtocolError(f"a parked process got {type(received[0]).__name__}")
        control.close()
        return received[0]
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(_BROKEN)


def _reparented(agent_pid: int) -> bool:
    """Wait until the middle child is gone and the agent is our parent, then tie our life to its."""
    middle = os.getppid()
    if middle != agent_pid:
        try:
            ended = os.pidfd_open(middle)
        except ProcessLookupError:  # it ended in between
            pass
        else:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            poll.poll(_REPARENTING_MS)
            os.close(ended)
    return die_with(agent_pid)


def _take_stdio(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, number in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)


if __name__ == "__main__":
    _work = serve(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
    if _work is None:
        os._exit(0)
    try:
        _main = main_module.become(_work.command, _work.orders)
        if _main.code is None:
            runpy._run_module_as_main(_main.runpy_name, _main.alter_argv)  # type: ignore[attr-defined]  # as `python -m`
        else:
            try:
                exec(_main.code, _main.module.__dict__)
            finally:
                _main.finish()
    except SystemExit as _exit:
        leaving.note(_exit.code)
        leaving.script_over(leaving.exit_code(_exit.code))
        raise
    except BaseException as _error:
        main_module.hide_frames(_error, sys._getframe())
        raise
    leaving.script_over(0)
