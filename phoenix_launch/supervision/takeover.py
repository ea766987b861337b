"""How another supervisor comes to a job: it asks all nodes of the live map for a term, and has it when most have granted it.

First each promises to grant no lower term any more, which disturbs nobody; only when most have promised are they told to
follow. So a supervisor that cannot take over has taken no node from one that lives.

Threads: `takeover`, one for each node that is asked; it calls the node, and ends with the answer or its deadline.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec

from phoenix_launch.checkpoint import peer_link
from phoenix_launch.errors import PhoenixError, ProtocolError, SupersededError, UsageError
from phoenix_launch.node.probes import greeting
from phoenix_launch.supervision.handover import AgentRecord
from phoenix_launch.takeover_messages import ANSWERS, Claim, Granted
from phoenix_launch.timeouts import timeout
from phoenix_launch.wire import MAX_MESSAGE_BYTES, NO_GENERATION, encode
from phoenix_launch.wording import counted

_AT_ONCE: Final = 64  # nodes that are asked at the same time


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of asking one node. `said` None: nothing, for this reason."""

    agent: AgentRecord
    said: Granted | None
    error: str = ""

    @property
    def granted(self) -> bool:
        return self.said is not None and self.said.granted


def ask_all(agents: Sequence[AgentRecord], claim: Claim, job: str, key: bytes) -> list[Answer]:
    """Each is asked once, all at the same time."""
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(agents))), thread_name_prefix="takeover") as threads:
        return list(threads.map(lambda agent: _ask(agent, claim, job, key), agents))


def next_term(answers: Iterable[Answer], job: str, term: int) -> int:
    """What is to be asked for when some have promised that term, or a higher one, to somebody who then did not take over: of
    two that try at once the later one gets it. Raises SupersededError when somebody did."""
    said = [answer.said for answer in answers if answer.said is not None]
    if (obeyed := max((each.follows for each in said), default=0)) >= term:
        raise SupersededError(job, obeyed)
    return max((each.promised + 1 for each in said if not each.granted), default=term)


def _ask(agent: AgentRecord, claim: Claim, job: str, key: bytes) -> Answer:
    seconds, facts = timeout("takeover"), agent.facts
    if not facts.probe_port:
        return Answer(agent, None, "it could not listen")
    try:
        sock = socket.create_connection((facts.address or "127.0.0.1", facts.probe_port), seconds)
        expected = greeting(job, agent.spec.name)
        if _line(sock, len(expected), seconds) != expected:
            sock.close()
            return Answer(agent, None, "somebody else answers there")
        identity = peer_link.Identity(job, key, -1, NO_GENERATION)
        with contextlib.closing(peer_link.introduce(sock, identity, seconds, seconds)) as link:
            link.send_long(encode(claim))
            said = ANSWERS.decode(link.receive_long(MAX_MESSAGE_BYTES))
    except (OSError, ProtocolError, msgspec.MsgspecError) as error:
        return Answer(agent, None, getattr(error, "strerror", None) or str(error))
    if said.incarnation != agent.incarnation:
        return Answer(agent, None, "another agent is there now")
    return Answer(agent, said)


def _line(sock: socket.socket, most: int, seconds: float) -> bytes:
    """No more than that: what follows is somebody else's to read."""
    deadline, found = time.monotonic() + seconds, b""
    while len(found) < most:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(most - len(found))
        if not part:
            break
        found += part
    return found


def check(answers: Iterable[Answer], job: str, seats: frozenset[int], *, force: bool, dead: bool) -> None:
    """Raises PhoenixError when these answers do not make a supervisor of whoever asked. `dead`: the old one is known to be.

    `seats`: nodes that train. When none of them follows, they may all be there and train on beside a generation of spares.
    """
    answers = list(answers)
    said = [answer.said for answer in answers if answer.said is not None]
    if refused := [each.promised for each in said if not each.granted]:
        raise SupersededError(job, max(refused))
    hears = [answer.agent.spec.name for answer in answers if answer.said is not None and answer.said.supervised]
    if hears and not (force or dead):
        raise UsageError(
            f"the supervisor of job {job} still lives: {', '.join(hears)} can hear it",
            hint=f"`phoenix-run stop {job}` ends it there; --force takes over all the same",
        )
    granted = sum(answer.granted for answer in answers)
    training = any(answer.granted and answer.agent.spec.index in seats for answer in answers)
    if (2 * granted > len(answers) and training) or (force and granted):
        return
    if not answers:
        raise PhoenixError(
            f"all nodes of job {job} were lost before its supervisor was",
            hint="start the job again, with --resume if it can",
        )
    silent = [f"{answer.agent.spec.name} ({answer.error})" for answer in answers if answer.said is None]
    if not granted:
        raise PhoenixError(
            f"no node of job {job} answers: {', '.join(silent)}",
            hint="they end by themselves --orphan-timeout after their supervisor; start the job again, "
            "with --checkpoint-dir and --resume from its newest checkpoint",
        )
    if 2 * granted > len(answers):
        raise PhoenixError(
            f"none of the nodes of job {job} that train can be taken over: no answer from {', '.join(silent)}",
            hint="mend the network and try again; --force goes on with spare nodes, "
            "which is safe only when the others are dead",
        )
    raise PhoenixError(
        f"only {granted} of {counted(len(answers), 'node')} of job {job} can be taken over: no answer from {', '.join(silent)}",
        hint="mend the network and try again; --force goes on with the nodes that answer, "
        "which is safe only when the others are dead",
    )
