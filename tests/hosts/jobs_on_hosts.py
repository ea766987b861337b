"""Real jobs started on the head of the test hosts, and the processes that they have on each host."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE

from namespaces import process_file
from testhosts import Cluster

from tests.jobs_under_test import PHOENIX_RUN, SECONDS, Done, Running, attended, environment

STUB = Path(__file__).parent.parent / "stub_torch"  # for jobs that are about processes and not about torch

# Every worker says who it is, has a child in a session of its own, and ends when the file `go` is there.
CREW = """
import os, subprocess, threading
from pathlib import Path
child = subprocess.Popen(["sleep", "4242"], start_new_session=True)
rank, attempt, node = (os.environ[name] for name in ("RANK", "TORCHELASTIC_RESTART_COUNT", "PHOENIX_NODE"))
print(f"rank {rank} attempt {attempt} on {node}", flush=True)
while not Path(__file__).with_name("go").exists():
    threading.Event().wait(0.02)
child.kill()
child.wait()
"""


@dataclass
class Head:
    """Where jobs are started: the host `head`, in a folder that all hosts see."""

    hosts: Cluster
    folder: Path
    eventually: Callable[..., object]
    home: Path = field(init=False)

    def __post_init__(self) -> None:
        self.home = self.folder / "home"

    def script(self, source: str = CREW, name: str = "train.py") -> str:
        (self.folder / name).write_text(source)
        return name

    def go(self) -> None:
        """The workers of CREW end."""
        (self.folder / "go").touch()

    @contextmanager
    def started(
        self, *args: object, env: Mapping[str, str] | None = None, host: str = "head", torch: bool = False
    ) -> Iterator[Running]:
        """`phoenix-run ARGS` on a host; without torch its workers are started afresh and its store is a stub."""
        own = environment(self.home, {} if torch else {"PYTHONPATH": str(STUB), "PET_START_METHOD": "spawn"})
        own |= env or {}
        process = self.hosts.popen(
            host, [*PHOENIX_RUN, *map(str, args)],
            stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, env=own, cwd=self.folder,
        )  # fmt: skip
        with attended(process, self.home) as running:
            yield running

    def run(
        self, *args: object, env: Mapping[str, str] | None = None, host: str = "head", torch: bool = False,
        seconds: float = SECONDS,
    ) -> Done:  # fmt: skip
        with self.started(*args, env=env, host=host, torch=torch) as running:
            return running.wait(seconds)

    def await_workers(self, running: Running, count: int, generation: int = 1) -> None:
        """Until so many workers have begun the script in this generation."""

        def there() -> bool:
            found = [e for e in running.events("worker_started") if e["generation"]["n"] == generation]
            assert running.process.poll() is None, running.process.communicate()
            return len(found) == count

        self.eventually(there, 40, f"{count} workers of generation {generation}")
        pattern = f"logs/*/*.g{generation}.out"
        job = running.job
        assert job is not None
        self.eventually(
            lambda: sum(path.stat().st_size > 0 for path in job.glob(pattern)) == count, 20, "each has said who it is"
        )

    def node(self, name: str) -> tuple[str, str]:
        """Role and state of a node, as `status` on the head has it."""
        done = self.run("status", "--json")
        assert done.code == 0, done.err
        nodes = {node["name"]: (node["role"], node["state"]) for node in json.loads(done.out)["nodes"]}
        return nodes.get(name, ("", ""))

    # --- processes, by their numbers outside -------------------------------------------------------------------------

    def tree(self, host: str) -> set[int]:
        """All that runs there but what every host has."""
        return {pid for pid in self.hosts.processes(host) if not self.hosts.is_own(pid)}

    def guardian(self, host: str) -> int:
        return self._of_node(host)[0]

    def agent(self, host: str) -> int:
        return self._of_node(host)[1]

    def _of_node(self, host: str) -> tuple[int, int]:
        found = self.matching(host, "phoenix_launch.node.guardian")
        (agent,) = [pid for pid in found if parent(pid) in found]
        return parent(agent), agent

    def matching(self, host: str, text: str) -> list[int]:
        return [pid for pid in self.tree(host) if text in self.hosts.command_line(pid)]

    def await_end(self, pids: set[int], seconds: float = 10.0) -> float:
        """Until none of them lives; returns how long that took."""
        began = time.monotonic()
        self.eventually(lambda: not any(lives(pid) for pid in pids), seconds, "the whole tree has ended")
        return time.monotonic() - began


def parent(pid: int) -> int:
    text = process_file(pid, "stat")
    return int(text.rpartition(")")[2].split()[1]) if text else 0


def lives(pid: int) -> bool:
    text = process_file(pid, "stat")
    return bool(text) and text.rpartition(")")[2].split()[0] not in "ZX"
