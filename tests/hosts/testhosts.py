#!/usr/bin/env python3
"""Several "hosts" with real sshd, real addresses and real faults on one Linux machine: for tests, and by hand.

    testhosts.py up 4; testhosts.py exec head -- ssh host1 hostname; testhosts.py kill host2; testhosts.py down

Needs root, and: apt-get install -y --no-install-recommends openssh-server iproute2 nftables. See README.md beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from cluster import TRAFFIC, ClusterLife
from cluster_state import State
from namespaces import (
    TestHostsError,
    all_pids,
    argv0,
    enter,
    process_file,
    run_in_network,
    silence,
    slay,
    until,
    write,
)

_FILL = """import os, sys
path, leave = sys.argv[1] + "/.testhosts-fill", int(sys.argv[2])
if leave < 0:
    sys.exit(os.path.exists(path) and os.remove(path))
room = os.statvfs(sys.argv[1])
size = room.f_bavail * room.f_frsize - leave
size > 0 and os.posix_fallocate(os.open(path, os.O_CREAT | os.O_RDWR), 0, size)
"""


class Cluster(ClusterLife):
    """Test hosts, and the harm that can be done to them. Each method is a command of the same name."""

    def boot(self, host: str) -> None:
        """Power a host on after kill: the same disk, new /tmp, /run and /dev/shm; its netem applies again."""
        super().boot(host)
        self.netem(host, **self.state["netem"].get(host, {}))

    def kill(self, host: str, match: str | None = None, sig: str = "KILL", clean: bool = False) -> list[int]:
        """Power loss: no carrier, then all processes dead at once; no peer hears FIN or RST. clean: with the link up,
        so that peers hear. match: instead, signal those processes of the host whose command line matches."""
        pid, port = self.need(host), self.state["hosts"][host]["port"]
        if match:
            hit = [
                process
                for process in self.processes(host)
                if re.search(match, process_file(process, "cmdline").replace("\0", " "))
            ]
            for process in hit:
                os.kill(process, signal.Signals[f"SIG{sig}"])
            return hit
        if not clean:
            self.in_fabric("ip", "link", "set", port, "down")
        slay(pid)
        self._stop_relay(host)
        self.in_fabric("ip", "link", "del", port, check=False)
        return []

    def freeze(self, host: str, on: bool = True) -> None:
        """Stop all processes of a host. The kernel's TCP still answers for it; with link down too, it is a dead box."""
        self.need(host)
        folder, file, frozen, thawed = self.freezer(host)
        write(f"{folder}/{file}", frozen if on else thawed)
        until("freeze", lambda: self.frozen(host) == on)

    def thaw(self, host: str) -> None:
        """The end of freeze."""
        self.freeze(host, False)

    def frozen(self, host: str) -> bool:
        folder, file, frozen, _ = self.freezer(host)
        with contextlib.suppress(OSError), open(f"{folder}/{'cgroup.events' if frozen == '1' else file}") as state:
            text = state.read()
            return "frozen 1" in text or text.strip() == frozen
        return False

    def link(self, host: str, state: str) -> None:
        """Carrier of a host's network card: "down" or "up"."""
        self.need(host)
        self.in_fabric("ip", "link", "set", self.state["hosts"][host]["port"], state)

    def partition(self, host: str, others: Sequence[str], oneway: bool = False) -> None:
        """Silently drop packets between host and each of others ("all": everyone); oneway: only what host sends."""
        with self.change() as state:
            everyone = [name for name in state["hosts"] if name != host]
            for other in everyone if list(others) == ["all"] else others:
                self.pid(host, state), self.pid(other, state)  # do they exist
                pairs = ([host, other], [other, host])[: 1 if oneway else 2]
                state["cut"] += [pair for pair in pairs if pair not in state["cut"]]
            self._apply_cuts(state)

    def _apply_cuts(self, state: State) -> None:
        hosts = state["hosts"]
        rules = "".join(
            f"ip saddr {hosts[a]['addr']} ip daddr {hosts[b]['addr']} drop\n"
            f"arp saddr ip {hosts[a]['addr']} arp daddr ip {hosts[b]['addr']} drop\n"
            for a, b in state["cut"]
        )
        table = (
            "table bridge testhosts {}\ndelete table bridge testhosts\ntable bridge testhosts {\n"
            f"chain f {{\ntype filter hook forward priority 0;\n{rules}}}\n}}\n"
        )
        self.in_fabric("nft", "-f", "-", input=table)

    def heal(self) -> None:
        """Undo everything but deaths: partition, link, freeze, netem, sshd, fill. Dead hosts stay dead (boot)."""
        with self.change() as state:
            state["cut"] = []
            self._apply_cuts(state)
        living = [host for host in state["hosts"] if self.pid(host, state)]
        for host in living:
            if self.frozen(host):
                self.freeze(host, False)
        ports = [state["hosts"][host]["port"] for host in living]
        self.in_fabric("ip", "-batch", "-", input="".join(f"link set {port} up\n" for port in ports))
        for host in [*state["netem"]]:
            self.netem(host)
        for host in state["touched"]:
            if host in living:
                self._restore(host)

    def netem(self, host: str, delay: float = 0, jitter: float = 0, loss: float = 0, rate: str | None = None) -> None:
        """A bad network for a host, each way: delay, jitter in ms; loss in percent; rate as in tc (100mbit). Nothing
        given: clear. rate is tc tbf; the rest is a user-space relay, since not every kernel has netem."""
        with self.change() as state:
            port, fabric, init = state["hosts"][host]["port"], self.need("fabric", state), self.pid(host, state)
            self._stop_relay(host)
            state["netem"].pop(host, None)
            if delay or jitter or loss or rate:
                state["netem"][host] = {"delay": delay, "jitter": jitter, "loss": loss, "rate": rate}
        if not init:
            return
        for namespace, device in ((fabric, port), (init, "eth0")):
            run_in_network(namespace, "tc", "qdisc", "del", "dev", device, "root", check=False)
            if rate:
                shaper = f"tc qdisc add dev {device} root tbf rate {rate} burst 256k latency 50ms"
                run_in_network(namespace, *shaper.split())
        run_in_network(init, sys.executable, TRAFFIC, "segmentation", "0" if loss else "1")
        if delay or jitter or loss:
            mtu = state["opts"]["mtu"]
            self._start_relay(host, fabric, [port, str(delay), str(jitter), str(loss), str(mtu)])

    def _start_relay(self, host: str, fabric: int, arguments: list[str]) -> None:
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                enter(fabric, ("net", "pid"))
                if not os.fork():
                    silence()
                    os.execv(sys.executable, [self.marker(f"relay-{host}"), TRAFFIC, "relay", *arguments])
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        tap = "t" + arguments[0][1:]
        until("relay", lambda: "master br0" in self.in_fabric("ip", "link", "show", tap, check=False))

    def _stop_relay(self, host: str) -> None:
        for pid in [pid for pid in all_pids() if argv0(pid) == self.marker(f"relay-{host}")]:
            slay(pid)
            port = self.state["hosts"][host]["port"]
            self.in_fabric("ip", "link", "set", port, "master", "br0", check=False)

    def sshd(self, host: str, what: str) -> None:
        """stop: connections are refused. hang: accepted, never answered. start, cont: back to normal."""
        command = {
            "stop": "kill -TERM $(cat /run/sshd.pid)",
            "hang": "kill -STOP $(cat /run/sshd.pid)",
            "cont": "kill -CONT $(cat /run/sshd.pid)",
            "start": f"/usr/sbin/sshd -f {self.dir}/{host}_sshd -E /var/log/sshd.log",
        }[what]
        self._touch(host)
        self.run(host, ["sh", "-c", command], check=True)

    def _restore(self, host: str) -> None:
        script = (
            "rm -f /.testhosts-fill /tmp/.testhosts-fill /dev/shm/.testhosts-fill; "
            "kill -CONT $(cat /run/sshd.pid) || exec /usr/sbin/sshd -f $0 -E /var/log/sshd.log"
        )
        self.run(host, ["sh", "-c", script, f"{self.dir}/{host}_sshd"], check=True, stderr=subprocess.DEVNULL)
        self._touch(host, False)

    def _touch(self, host: str, touched: bool = True) -> None:
        with self.change() as state:
            state["touched"] = [name for name in state["touched"] if name != host] + [host] * touched

    def fill(self, host: str, path: str, leave: int = 0) -> None:
        """Fill a file system of a host (/ is its disk; /tmp, /dev/shm) but for `leave` bytes. leave=-1: free it."""
        self._touch(host)
        self.run(host, [sys.executable, "-c", _FILL, path, str(leave)], check=True)

    def list(self) -> dict[str, Any]:
        """Every host with its address, PID 1, state, link, faults."""
        state = self.state
        links = {entry["ifname"]: "UP" in entry["flags"] for entry in json.loads(self.in_fabric("ip", "-json", "link"))}

        def life(host: str) -> str:
            return "down" if not self.pid(host) else "frozen" if self.frozen(host) else "up"

        hosts = {
            host: {
                "addr": entry["addr"],
                "pid": self.pid(host),
                "state": life(host),
                "link": "up" if links.get(entry["port"]) else "down",
                "processes": len(self.processes(host)),
                "netem": state["netem"].get(host),
                "cut_from": sorted(b for a, b in state["cut"] if a == host),
            }
            for host, entry in state["hosts"].items()
        }
        return {"name": self.name, "fabric": state["fabric"], "ssh_config": self.ssh_config, "hosts": hosts}


# --- the command line ------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="testhosts", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = os.environ.get("TESTHOSTS_NAME", "default")
    parser.add_argument("--name", default=default, help="cluster (several can be up)")
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, *positional: str) -> argparse.ArgumentParser:
        doc = getattr(getattr(Cluster, name, None), "__doc__", "") or ""
        added = verbs.add_parser(name, help=doc.split(".")[0])
        for argument in positional:
            added.add_argument(argument)
        return added

    up = verb("up")
    up.add_argument("n", type=int)
    for option, value in (("--disk", "512m"), ("--shm", "64m"), ("--tmp", "64m"), ("--cc", "bbr")):
        up.add_argument(option, default=value)
    up.add_argument("--mtu", type=int, default=1500)
    up.add_argument("--share", action="append", default=[])
    verb("down").add_argument("--sweep", action="store_true")
    verb("list").add_argument("--json", action="store_true")
    verb("exec", "host").add_argument("argv", nargs=argparse.REMAINDER)
    for name in ("heal", "ssh-config"):
        verb(name)
    for name in ("boot", "freeze", "thaw"):
        verb(name, "host")
    kill = verb("kill", "host")
    kill.add_argument("--match")
    kill.add_argument("--sig", default="KILL")
    kill.add_argument("--clean", action="store_true")
    verb("link", "host", "state")
    partition = verb("partition", "host")
    partition.add_argument("others", nargs="+")
    partition.add_argument("--oneway", action="store_true")
    netem = verb("netem", "host")
    for option in ("--delay", "--jitter", "--loss"):
        netem.add_argument(option, type=float, default=0.0)
    netem.add_argument("--rate")
    verb("sshd", "host", "what")
    verb("fill", "host", "path").add_argument("--leave", type=int, default=0)
    return parser


def _show(listing: dict[str, Any]) -> None:
    for host, entry in listing["hosts"].items():
        faults = {key: entry[key] for key in ("netem", "cut_from") if entry[key]} or ""
        print(
            f"{host:<7} {entry['addr']:<11} {entry['state']:<6} link {entry['link']:<4} "
            f"{entry['processes']:2d} processes {faults}"
        )


def main(argv: list[str]) -> int:
    given = vars(_parser().parse_args(argv))
    cluster, verb = Cluster(given.pop("name")), given.pop("verb")
    try:
        if verb == "exec":
            command = given["argv"][given["argv"][:1] == ["--"] :]
            return cluster.exec(given["host"], command or ["sh"])
        if verb == "ssh-config":
            print(cluster.ssh_config)
        elif verb == "list":
            listing = cluster.list()
            if given["json"]:
                print(json.dumps(listing, indent=1))
            else:
                _show(listing)
        elif verb == "kill" and given["match"]:
            hit = cluster.kill(**given)
            print(f"signalled {len(hit)}")
            return 0 if hit else 1
        else:
            getattr(cluster, verb)(**given)
    except (TestHostsError, OSError, subprocess.SubprocessError) as error:
        print(f"testhosts: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
