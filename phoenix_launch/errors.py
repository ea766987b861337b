"""What can go wrong in a way that its user can do something about: one root error, each kind with its exit code and a hint."""

from __future__ import annotations

EXIT_OK = 0
EXIT_WORKER_FAILED = 1
EXIT_USAGE = 2
EXIT_DO_NOT_REQUEUE = 93
EXIT_SIGNAL_BASE = 128


class PhoenixError(Exception):
    """A failure that is shown to the user as one line of what is wrong and one of what to do, never as a traceback.

    Args:
        message: what is wrong, one line.
        hint: what to do about it, one line; empty when there is nothing to add.
    """

    exit_code = EXIT_WORKER_FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def show(self) -> str:
        """The lines for the terminal, without a trailing newline."""
        lines = [f"phoenix-run: {self.message}"]
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


class UsageError(PhoenixError):
    """The command, a file it names, or the environment asks for something that cannot be."""

    exit_code = EXIT_USAGE


class StartError(PhoenixError):
    """The job could not start: a host, a port, a folder is not as it must be. `details` are lines shown before the message."""

    def __init__(self, message: str, *, hint: str = "", details: str = "") -> None:
        super().__init__(message, hint=hint)
        self.details = details

    def show(self) -> str:
        shown = super().show()
        return f"{self.details}\n{shown}" if self.details else shown


class PortInUseError(StartError):
    """Somebody else listens where the job was to."""


class NoReplacementError(PhoenixError):
    """A node was lost and nothing can take its place: starting the same job again unchanged will not help."""

    exit_code = EXIT_DO_NOT_REQUEUE


class SupersededError(PhoenixError):
    """Another supervisor has taken over the job: this one touches nothing of it any more."""

    exit_code = EXIT_DO_NOT_REQUEUE

    def __init__(self, job: str, term: int) -> None:
        super().__init__(
            f"another supervisor has taken over job {job} (term {term}): this one ends, the job goes on",
            hint=f"`phoenix-run status {job}` shows it",
        )


class ProtocolError(PhoenixError):
    """A message that is malformed, of another protocol version, of another job, or from a peer who may not send it."""
