"""The folder of a job: where it is, what is kept in it, which job a command means, and whether it still runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from phoenix_launch import process_table
from phoenix_launch.errors import PhoenixError, UsageError
from phoenix_launch.status import JobStatus, decode_status, encode_status
from phoenix_launch.timeouts import timeout

if TYPE_CHECKING:
    from phoenix_launch.settings import RunSettings  # every command imports this file, and has 0.2 s to end

LISTED: Final = 20  # jobs named in an error, the newest
_HINT: Final = "set PHOENIX_HOME to a folder that can be written"
_UNFIT: Final = re.compile(r"[^A-Za-z0-9._-]+")


KeyKind = Literal["status", "control"]  # may look; may look, inject faults and stop


class ClientKeys(msgspec.Struct, frozen=True):
    """A CURVE key pair of a command, Z85."""

    public: str
    secret: str


class JobNode(msgspec.Struct, frozen=True):
    """Where a node of the job is. `host` is empty for a node on this machine."""

    name: str
    index: int
    host: str
    python: str
    log_folder: str


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """job.json: what a command needs to find the supervisor, and what was started."""

    job: str
    created: float  # unix seconds
    hostname: str
    pid: int  # the supervisor's
    start_time: int  # its start in clock ticks since boot: together with the pid its name
    control_endpoint: str
    server_key: str
    argv: tuple[str, ...]
    cwd: str
    settings: dict[str, Any]  # RunSettings as JSON has it
    term: int = 1  # of the supervisor
    nodes: tuple[JobNode, ...]


def settings_document(settings: RunSettings) -> dict[str, Any]:
    """The settings as `JobRecord.settings` keeps them."""
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
    return document


def jobs_root(environ: Mapping[str, str]) -> Path:
    """Where the folders of all jobs are."""
    if home := environ.get("PHOENIX_HOME"):
        return Path(home).expanduser().absolute() / "jobs"
    if state := environ.get("XDG_STATE_HOME"):
        return Path(state).absolute() / "phoenix" / "jobs"
    try:
        return Path(environ.get("HOME") or Path.home()) / ".local" / "state" / "phoenix" / "jobs"
    except RuntimeError:
        raise UsageError(
            "there is no home directory", hint="set PHOENIX_HOME to a folder that can be written"
        ) from None


def new_job_id(script: str, root: Path, name: str = "") -> str:
    """`train_gpt-7f3a` for a script, `-m pkg.train_gpt`, or a given name; no job of this id exists yet."""
    stem = name or Path(script).name.removesuffix(".py").rpartition(".")[2]
    stem = _UNFIT.sub("_", stem).strip("._-")[:40] or "job"
    width = 2
    while (root / (job := f"{stem}-{os.urandom(width).hex()}")).exists():
        width = min(width + 1, 8)
    return job


class JobFolder:
    """`.../jobs/JOB/`, 0700. Files are written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, root: Path, job: str) -> JobFolder:
        """Raises UsageError when the folder cannot be made or written."""
        folder = cls(root / job)
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder.path.mkdir(mode=0o700)
            folder._keys.mkdir(mode=0o700)
            folder.logs_path.mkdir(mode=0o700)
        except OSError as error:
            folder.remove_unstarted()
            raise _not_writable(folder.path, error) from None
        return folder

    def remove_unstarted(self) -> None:
        """Remove it when nothing was ever recorded: there is no job to look at."""
        if not (self.path / "job.json").exists():
            import shutil

            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def job(self) -> str:
        return self.path.name

    @property
    def journal_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def logs_path(self) -> Path:
        return self.path / "logs"

    @property
    def stacks_path(self) -> Path:
        """Where the threads of each worker were when the job hung."""
        return self.path / "stacks"

    def write_stacks(self, name: str, text: str) -> None:
        """Raises OSError."""
        self.stacks_path.mkdir(exist_ok=True, mode=0o700)
        (self.stacks_path / name).write_text(text, encoding="utf-8")

    @property
    def _keys(self) -> Path:
        return self.path / "keys"

    def write_record(self, record: JobRecord) -> None:
        self._write(self.path / "job.json", msgspec.json.format(msgspec.json.encode(record), indent=2))

    def read_record(self) -> JobRecord:
        try:
            return msgspec.json.decode((self.path / "job.json").read_bytes(), type=JobRecord)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise PhoenixError(f"the record of job {self.job} cannot be read: {error}") from None

    def write_status(self, status: JobStatus) -> None:
        self._write(self.path / "status.json", encode_status(status))

    def read_status(self) -> JobStatus | None:
        """What the supervisor wrote last, None when it did not get so far."""
        try:
            return decode_status((self.path / "status.json").read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PhoenixError(f"the status of job {self.job} cannot be read: {error}") from None

    def write_client_keys(self, kind: KeyKind, keys: ClientKeys) -> None:
        self._write(self._keys / f"{kind}.json", msgspec.json.encode(keys))

    def read_client_keys(self, kind: KeyKind) -> ClientKeys:
        try:
            return msgspec.json.decode((self._keys / f"{kind}.json").read_bytes(), type=ClientKeys)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise PhoenixError(
                f"the {kind} key of job {self.job} cannot be read: {error}",
                hint="only the user who started a job can talk to it",
            ) from None

    def write_private(self, name: str, data: bytes) -> None:
        """What has secrets in it, and goes when the job ends."""
        self._write(self._keys / f"{name}.json", data)

    def read_private(self, name: str) -> bytes:
        """Raises OSError."""
        return (self._keys / f"{name}.json").read_bytes()

    @contextlib.contextmanager
    def claimed(self) -> Iterator[bool]:
        """Only one at a time may take over; whether it is this one."""
        descriptor = os.open(self.path / "takeover.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    def remove_client_keys(self) -> None:
        """The job has ended and said so: they open nothing any more."""
        import shutil

        shutil.rmtree(self._keys, ignore_errors=True)

    def remove(self) -> None:
        import shutil

        try:
            shutil.rmtree(self.path)
        except FileNotFoundError:
            return  # somebody else was quicker
        except OSError as error:
            raise PhoenixError(
                f"{self.path} cannot be removed: {error.strerror or error}", hint=f"remove {self.path} yourself"
            ) from None

    def ended_at(self) -> float | None:
        """Unix seconds; None for a job that did not say how it ended: it runs, or nobody knows what is left of it."""
        status = self.read_status()
        if status is None or not status.state.final:
            return None
        return status.as_of or (self.path / "status.json").stat().st_mtime

    def is_running(self) -> bool:
        """Whether its supervisor lives and has not said that the job is over."""
        status = self.read_status()
        return not (status and status.state.final) and is_running(self.read_record())

    def _write(self, path: Path, data: bytes) -> None:
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(data)
            fresh.replace(path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise _not_writable(path, error) from None


def _not_writable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write {path}: {error.strerror or error}", hint=_HINT)


def is_here(record: JobRecord) -> bool:
    """Whether the supervisor was started on this host."""
    return record.hostname == os.uname().nodename


def is_running(record: JobRecord) -> bool:
    """Whether the supervisor of a job lives. On another host (a shared home): whether its port can be reached."""
    if is_here(record):
        return process_table.is_running(record.pid, record.start_time)
    host, _, port = record.control_endpoint.rpartition("/")[2].rpartition(":")
    host = host.strip("[]")
    if host in ("", "127.0.0.1", "::1", "localhost"):
        return False  # its loopback, not ours
    import socket  # takes long to load, and is needed for other hosts only

    try:
        socket.create_connection((host, int(port)), timeout("probe")).close()
    except (OSError, ValueError):
        return False
    return True


def wait_for_end(record: JobRecord, seconds: float) -> bool:
    """Wait until the supervisor of a job has ended, at most `seconds`; whether it has."""
    found = process_table.look_up(record.pid)
    if is_here(record) and found is not None:
        if process_table.is_running(record.pid, record.start_time):
            process_table.wait_for_exit([found], seconds)
    elif is_running(record):
        threading.Event().wait(min(seconds, timeout("probe")))  # nothing tells us from another host
    return not is_running(record)


def all_jobs(root: Path) -> list[tuple[JobFolder, JobRecord]]:
    """Every job whose record can be read, oldest first."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        try:
            found.append((JobFolder(path), JobFolder(path).read_record()))
        except PhoenixError:
            continue  # being made at this moment, or not one of ours
    return sorted(found, key=lambda entry: entry[1].created)


def choose(root: Path, job: str = "") -> JobFolder:
    """The job that a command means: the one named, else the one that runs, else the newest; else raises UsageError."""
    if job:
        folder = JobFolder(root / job)
        if "/" not in job and job not in (".", "..") and (folder.path / "job.json").exists():
            return folder
        names = [record.job for _, record in all_jobs(root)]
        raise UsageError(f"there is no job {job}", hint=_listed("jobs", names) or f"there are no jobs in {root}")
    jobs = all_jobs(root)
    if not jobs:
        raise UsageError("there are no jobs yet", hint=f"looked in {root}; start one with `phoenix-run SCRIPT`")
    running = [folder for folder, _ in jobs if folder.is_running()]
    if len(running) > 1:
        names = [folder.job for folder in running]
        raise UsageError(f"{len(running)} jobs are running: say which one", hint=_listed("running", names))
    return running[0] if running else jobs[-1][0]


def _listed(title: str, names: list[str]) -> str:
    """The newest of `names`, which are oldest first."""
    if not names:
        return ""
    more = f" and {len(names) - LISTED} older ones" if len(names) > LISTED else ""
    return f"{title}: {', '.join(reversed(names[-LISTED:]))}{more}"
