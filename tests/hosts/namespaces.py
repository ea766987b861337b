"""Processes born in namespaces of their own: what the test hosts are made of. Linux and root only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

# name in /proc/PID/ns -> clone flag, in the order in which setns must enter them
NAMESPACES = {"ipc": 0x08000000, "uts": 0x04000000, "net": 0x40000000, "pid": 0x20000000, "mnt": 0x00020000}
MS_RDONLY, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 1, 4096, 16384, 1 << 18, 2
_PR_SET_PDEATHSIG = 1
_MSG_CMSG_SPACE = 64

_libc = ctypes.CDLL(None, use_errno=True)


class TestHostsError(Exception):
    """A fault of the test hosts themselves, or of the way they are used."""

    __test__ = False  # pytest would take the name for a test class


# --- the kernel ------------------------------------------------------------------------------------------------------


def syscall(name: str, *args: Any) -> None:
    if getattr(_libc, name)(*[arg.encode() if isinstance(arg, str) else arg for arg in args]):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}{args}: {os.strerror(error)}")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    os.makedirs(target, exist_ok=True)
    syscall("mount", source, target, kind, ctypes.c_ulong(flags), data)


def make_mounts_private() -> None:
    """What is mounted from now on is not seen by the namespace this one came from."""
    syscall("mount", None, "/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)


def die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def enter(pid: int, kinds: Iterable[str]) -> None:
    """Join namespaces of a process. After "pid" only children are really inside."""
    opened = [
        (os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY), NAMESPACES[kind]) for kind in NAMESPACES if kind in kinds
    ]
    for descriptor, flag in opened:
        syscall("setns", descriptor, flag)
        os.close(descriptor)


# --- processes -------------------------------------------------------------------------------------------------------


def run(*argv: str, check: bool = True, **options: Any) -> str:
    """Run a tool; its stdout and stderr together."""
    if "input" not in options:
        options["stdin"] = subprocess.DEVNULL
    done: subprocess.CompletedProcess[str] = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    if check and done.returncode:
        raise TestHostsError(f"{' '.join(argv)}: {done.stdout.strip()}")
    return done.stdout


def run_in_network(pid: int, *argv: str, **options: Any) -> str:
    """The same in the network namespace of a process."""
    return run("nsenter", f"--net=/proc/{pid}/ns/net", *argv, **options)


def process_file(pid: int | str, name: str) -> str:
    """A file of /proc/PID; empty when there is no such process."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def argv0(pid: int) -> str:
    return process_file(pid, "cmdline").split("\0")[0]


def all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


def until(what: str, test: Callable[[], object], seconds: float = 10) -> None:
    """Poll a condition of the kernel that nobody announces."""
    end = time.monotonic() + seconds
    while not test():
        if time.monotonic() > end:
            raise TestHostsError(f"timeout: {what}")
        time.sleep(0.003)


def slay(pid: int) -> None:
    """Kill and wait. A zombie has let go of its namespaces: it counts as gone, though its parent may reap it late."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

    def dead() -> bool:
        reap_inits()
        return process_file(pid, "stat").rpartition(") ")[2][:1] in ("", "Z", "X")

    until(f"death of {pid}", dead)


def reap_inits() -> None:
    """Reap dead PID 1s that a subreaper such as pytest inherited: no fabric can end while one of them is a zombie."""
    for pid in all_pids():
        status = dict(line.split(":\t", 1) for line in process_file(pid, "status").splitlines() if ":\t" in line)
        if status.get("PPid") == str(os.getpid()) and status["State"].startswith("Z"):
            with contextlib.suppress(ChildProcessError):
                if len(status["NSpid"].split()) > 1:
                    os.waitpid(pid, os.WNOHANG)


def silence(first: int = 0) -> None:
    """Standard streams from `first` on to /dev/null, all else closed: nobody waits for an EOF of ours."""
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in range(first, 3):
        os.dup2(null, descriptor)
    os.closerange(3, 4096)


def become_init(marker: str, tether: int | None = None) -> NoReturn:
    """exec a tiny PID 1 that reaps (SIGCHLD ignored) and lives for ever, or until the pipe `tether` reads EOF."""
    if tether is not None:
        os.dup2(tether, 0)
    silence(0 if tether is None else 1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.chdir("/")
    if tether is None:
        os.execv("/bin/sleep", [marker, "infinity"])
    os.execv("/bin/cat", [marker])


def spawn(outer: int | None, kinds: Iterable[str], main: Callable[[socket.socket], None]) -> tuple[int, socket.socket]:
    """Fork a PID 1 of new namespaces that runs main(sock), born inside those of the process `outer` (or of ours).

    Returns its pid as seen here, and a socket to it. Between setns(pid) and unshare(pid) there must be a fork.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    child = os.fork()
    if child == 0:
        _be_born(here, there, outer, kinds, main)
    there.close()
    here.settimeout(30)
    os.waitpid(child, 0)
    message, ancillary, _, _ = here.recvmsg(4096, _MSG_CMSG_SPACE)
    if message != b"pid":
        here.close()
        raise TestHostsError(message.decode() or "an init died at birth")
    return struct.unpack("iii", ancillary[0][2][:12])[0], here


def _be_born(
    here: socket.socket,
    there: socket.socket,
    outer: int | None,
    kinds: Iterable[str],
    main: Callable[[socket.socket], None],
) -> NoReturn:
    try:
        here.close()
        os.setsid()
        if outer:
            enter(outer, ("pid", "mnt"))
            if os.fork():
                os._exit(0)
        syscall("unshare", sum(NAMESPACES[kind] for kind in kinds))
        if os.fork():
            os._exit(0)
        there.send(b"pid")
        main(there)
    except BaseException as error:
        there.send(f"{type(error).__name__}: {error}".encode()[:4000])
    finally:
        os._exit(1)
