"""The life of several test hosts on one machine: made, entered, powered on, removed. `testhosts.py` adds their faults.

A host is a set of namespaces (net, pid, mount, uts, ipc) with its own sshd on its own address, its own writable overlay
of this machine's / on a size-limited tmpfs "disk", and its own /tmp, /run and /dev/shm. The hosts hang on a bridge
inside a "fabric", one more net+pid+mount namespace whose PID 1 owns everything: when it dies (down, a crash, kill -9),
the kernel takes every host, process, mount and link with it. There is no daemon.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Self

from cluster_state import ROOT, ClusterState, HostState, Options, State
from namespaces import (
    MNT_DETACH,
    MS_BIND,
    MS_RDONLY,
    MS_REC,
    NAMESPACES,
    TestHostsError,
    all_pids,
    argv0,
    become_init,
    die_with_parent,
    enter,
    make_mounts_private,
    mount,
    run,
    slay,
    spawn,
    syscall,
    until,
    write,
)

SUBNET, PREFIX = "10.77.0.0/24", "10.77.0."
_HERE = os.path.dirname(os.path.realpath(__file__))
COMMAND, TRAFFIC = os.path.join(_HERE, "testhosts.py"), os.path.join(_HERE, "traffic.py")
_SERVER_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TOOLS = ("/usr/sbin/sshd", "ssh-keygen", "ip", "tc", "nft", "nsenter")


def missing() -> str:
    """What this machine lacks to have test hosts; empty: nothing."""
    if os.geteuid():
        return "root"
    return " ".join(tool for tool in TOOLS if not shutil.which(tool))


class ClusterLife(ClusterState):
    """Hosts are made, entered, powered on and removed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # --- up ----------------------------------------------------------------------------------------------------------

    def up(
        self,
        n: int,
        disk: str = "512m",
        shm: str = "64m",
        tmp: str = "64m",
        mtu: int = 1500,
        cc: str = "bbr",
        share: Sequence[str] = (),
        tether: int | None = None,
    ) -> Self:
        """Start head and host1..hostN. tether: a pipe's read end; all dies when its last write end is closed."""
        if lacking := missing():
            raise TestHostsError(
                f"needs root, and apt-get install openssh-server iproute2 nftables (missing: {lacking})"
            )
        self.down(sweep=True)
        names = ["head"] + [f"host{i}" for i in range(1, n + 1)]
        hosts: dict[str, HostState] = {
            host: {"addr": PREFIX + str(1 if i == 0 else 10 + i), "port": f"p{i}", "pid": None}
            for i, host in enumerate(names)
        }
        shared = [os.path.realpath(folder) for folder in share]
        options = Options(disk=disk, shm=shm, tmp=tmp, mtu=mtu, cc=cc, share=shared)
        try:
            with self.lock():
                self._start(State(fabric=None, hosts=hosts, cut=[], netem={}, touched=[], opts=options), tether)
        except BaseException:
            self.down()
            raise
        return self

    def _start(self, state: State, tether: int | None) -> None:
        hosts, options = state["hosts"], state["opts"]
        self._write_keys(hosts)

        def fabric(_: socket.socket) -> None:
            make_mounts_private()
            for host in hosts:  # the disks belong to the fabric, so that a host that lost power finds its own at boot
                mount("disk", f"{self.dir}/disk/{host}", "tmpfs", 0, f"mode=755,size={options['disk']}")
            become_init(self.marker("fabric"), tether)

        state["fabric"], link = spawn(None, ("net", "pid", "mnt"), fabric)
        until("fabric", lambda: self.pid("fabric", state))
        link.close()
        self.save(state)
        self.in_fabric(
            "ip",
            "-batch",
            "-",
            input="link add br0 type bridge stp_state 0 mcast_snooping 0\n"
            f"link set br0 mtu {options['mtu']} up\nlink set lo up\n",
        )
        run("ip", "route", "replace", "unreachable", SUBNET)  # a stray dial from outside must not leave
        booting = {host: self._boot(host, state) for host in hosts}
        self.save(state)
        for host in hosts:
            self._booted(host, state, booting[host])

    def _write_keys(self, hosts: dict[str, HostState]) -> None:
        folder, known, config = self.dir, "", ""
        os.makedirs(folder)
        for host in ["id", *hosts]:
            comment = f"testhosts-{host}"
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", f"{folder}/{host}_key")
        for host, entry in hosts.items():
            with open(f"{folder}/{host}_key.pub") as file:
                known += f"{host},{entry['addr']} {' '.join(file.read().split()[:2])}\n"
            config += f"Host {host} {entry['addr']}\n  HostName {entry['addr']}\n"
            write(
                f"{folder}/{host}_sshd",
                f"Port 22\nListenAddress 0.0.0.0\nHostKey {folder}/{host}_key\nAuthorizedKeysFile {folder}/id_key.pub\n"
                "PidFile /run/sshd.pid\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
                "StrictModes no\nPrintMotd no\nAcceptEnv LANG LC_*\nSubsystem sftp internal-sftp\n",
            )
        write(folder + "/known_hosts", known)
        enter_at_head = [sys.executable, COMMAND, "--name", self.name, "exec", "head", "--"]
        write(
            self.ssh_config,
            f"{config}Match host {PREFIX}*\n  User root\n  IdentityFile {folder}/id_key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
            "  StrictHostKeyChecking yes\n  BatchMode yes\n  LogLevel ERROR\n"
            "# from outside the hosts, traffic enters at the head\n"
            f'Match host {PREFIX}* exec "test ! -e /etc/testhosts"\n'
            f"  ProxyCommand {shlex.join([*enter_at_head, sys.executable, TRAFFIC, 'pipe'])} %h %p\n",
        )

    def _boot(self, host: str, state: State) -> socket.socket:
        """Start a host up to where its network is plugged in; `_booted` does the rest, so that hosts overlap."""
        entry, options = state["hosts"][host], state["opts"]

        def init(link: socket.socket) -> None:
            os.umask(0o022)
            socket.sethostname(host)
            make_mounts_private()
            self._mount_root(host, state)
            os.makedirs("/run/sshd")
            if link.recv(9) != b"plugged":
                os._exit(1)
            self._join_network(entry["addr"], state)
            sshd = ("/usr/sbin/sshd", "-f", f"{self.dir}/{host}_sshd", "-E", "/var/log/sshd.log")
            run(*sshd, env={"PATH": _SERVER_PATH})
            until("sshd", lambda: os.path.exists("/run/sshd.pid"))  # written once it listens
            link.send(b"booted")
            become_init(self.marker(host))

        pid, link = spawn(self.need("fabric", state), NAMESPACES, init)
        entry["pid"] = pid
        cgroup, port = self.freezer(host)[0], entry["port"]
        os.makedirs(cgroup, exist_ok=True)
        write(cgroup + "/cgroup.procs", str(pid))
        self.in_fabric("ip", "link", "del", port, check=False)  # of a former life, if any
        address = f"02:77:00:00:00:{int(port[1:]):02x}"
        self.in_fabric(
            "ip",
            "-batch",
            "-",
            input=f"link add {port} mtu {options['mtu']} type veth peer name eth0 mtu {options['mtu']} "
            f"address {address} netns {pid}\nlink set {port} master br0 up\n",
        )
        link.send(b"plugged")
        return link

    def _mount_root(self, host: str, state: State) -> None:
        disk, root, options = f"{self.dir}/disk/{host}", f"{self.dir}/root/{host}", state["opts"]
        for folder in ("up", "work"):
            os.makedirs(f"{disk}/{folder}", exist_ok=True)
        mount("overlay", root, "overlay", 0, f"lowerdir=/,upperdir={disk}/up,workdir={disk}/work")
        names = "\n".join(f"{entry['addr']} {name}" for name, entry in state["hosts"].items())
        for path, text in (
            ("testhosts", host),
            ("hostname", host),
            ("ssh/ssh_config.d/testhosts.conf", f"Include {self.ssh_config}"),
            ("resolv.conf", ""),
            ("hosts", f"127.0.0.1 localhost\n::1 localhost\n{names}"),
        ):
            write(f"{root}/etc/{path}", text + "\n")
        mount("/dev", root + "/dev", None, MS_BIND | MS_REC)
        mount("devpts", root + "/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=620,gid=5")
        for path, how in (
            ("dev/shm", "mode=1777,size=" + options["shm"]),
            ("tmp", "mode=1777,size=" + options["tmp"]),
            ("run", "mode=755,size=16m"),
        ):
            mount(path, f"{root}/{path}", "tmpfs", 0, how)
        mount("proc", root + "/proc", "proc")
        mount("sysfs", root + "/sys", "sysfs", MS_RDONLY)
        for folder in options["share"]:
            mount(folder, root + folder, None, MS_BIND)
        os.chdir(root)
        syscall("pivot_root", ".", ".")
        syscall("umount2", ".", MNT_DETACH)

    def _join_network(self, address: str, state: State) -> None:
        write("/proc/sys/net/ipv4/tcp_congestion_control", state["opts"]["cc"])
        write("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "1")
        run(
            "ip",
            "-batch",
            "-",
            input=f"link set lo up\nlink set eth0 up\naddr add {address}/24 brd + dev eth0\n",
        )
        for other in state["hosts"].values():  # whoever gave our address up as dead learns by our ARP that we are back
            with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
                datagram.sendto(b"", (other["addr"], 9))

    def _booted(self, host: str, state: State, link: socket.socket) -> None:
        with link:
            message = link.recv(4096)
        if message != b"booted":
            raise TestHostsError(f"{host}: {message.decode() or 'died while booting'}")
        until(host, lambda: self.pid(host, state))

    def boot(self, host: str) -> None:
        """Power a host on after kill: the same disk, new /tmp, /run and /dev/shm; its netem applies again."""
        with self.change() as state:
            if self.pid(host, state):
                raise TestHostsError(f"{host} is up")
            self._booted(host, state, self._boot(host, state))

    # --- down --------------------------------------------------------------------------------------------------------

    def down(self, sweep: bool = False) -> None:
        """Remove all of this cluster, whatever is left of it. Idempotent; needs no state file. sweep: and the files and
        cgroups of every cluster whose fabric is dead (as after the death of a tether)."""
        with self.lock():
            for other in [type(self)(name) for name in os.listdir(ROOT) if sweep]:
                if not any(argv0(pid) == other.marker("fabric") for pid in all_pids()):
                    other._remove()
            self._remove()

    def _remove(self) -> None:
        mine = [pid for pid in all_pids() if argv0(pid).startswith(self.marker(""))]
        for pid in sorted(mine, key=lambda pid: not argv0(pid).endswith(":fabric")):
            slay(pid)
        base, prefix = os.path.split(self.freezer("")[0])
        for folder in [os.path.join(base, name) for name in os.listdir(base) if name.startswith(prefix)]:
            until(f"removal of {folder}", functools.partial(self._removed, folder))
        shutil.rmtree(self.dir, ignore_errors=True)
        if not any(argv0(pid).startswith("testhosts:") for pid in all_pids()):
            run("ip", "route", "del", "unreachable", SUBNET, check=False)

    @staticmethod
    def _removed(cgroup: str) -> bool:
        with contextlib.suppress(OSError):
            os.rmdir(cgroup)
        return not os.path.exists(cgroup)

    # --- commands in hosts -------------------------------------------------------------------------------------------

    def argv(self, host: str, argv: Sequence[str]) -> list[str]:
        return [sys.executable, COMMAND, "--name", self.name, "exec", host, "--", *argv]

    def popen(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(self.argv(host, argv), **options)

    def run(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        return subprocess.run(self.argv(host, argv), **options)

    def exec(self, host: str, argv: Sequence[str]) -> int:
        """Run argv in a host with our environment, stdio and (if it exists there) directory; its exit status.

        It gets the signals sent to this process, and dies with it. Ends this process's use: it stays in the host.
        """
        pid, folder = self.need(host), os.getcwd()
        cgroup = os.open(self.freezer(host)[0] + "/cgroup.procs", os.O_WRONLY)
        enter(pid, NAMESPACES)
        child = os.fork()
        if child == 0:
            try:
                die_with_parent()
                os.write(cgroup, b"0")
                os.chdir(folder if os.path.isdir(folder) else "/")
                os.execvp(argv[0], list(argv))
            except OSError as error:
                os.write(2, f"testhosts exec: {argv[0]}: {error}\n".encode())
            finally:
                os._exit(127)
        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
            signal.SIGQUIT,
            signal.SIGUSR1,
            signal.SIGUSR2,
        ):
            signal.signal(number, lambda received, _: os.kill(child, received))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status if status >= 0 else 128 - status
