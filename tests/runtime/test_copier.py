"""The copier: an optimizer waits until its version is safe, and an abort takes everybody out of everything at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_nodes import G1, G2, JOB, CheckpointNode
from torch import Tensor, nn

from phoenix_launch.copies import Stamp
from phoenix_launch.job.commit import Lineage
from phoenix_launch.messages import Ground, NoRoom
from phoenix_launch.progress import ProgressPage
from phoenix_launch.wire import Generation
from phoenix_runtime import StepAborted, TrainState, link
from phoenix_runtime.checkpoint import filling
from phoenix_runtime.checkpoint.bundles import bundled
from phoenix_runtime.checkpoint.copier import Copier
from phoenix_runtime.checkpoint.filling import CopyFailedError, Footing
from phoenix_runtime.checkpoint.private import Private
from phoenix_runtime.communicators.gate import Gate

Eventually = Callable[..., Any]
BUNDLES = ("private 0", "rank 0")


class Rank:
    """Rank 0 on node 0; a rank 1 on node 1 is only spoken of, so that copies have somewhere to go."""

    def __init__(
        self,
        nodes: list[CheckpointNode],
        group: Any = None,
        seconds: float = 20.0,
        interval: int = 1,
        to_disk: Any = None,
        halt: Any = None,
    ) -> None:
        self.nodes, self.gate, self.interval = nodes, Gate(), interval
        self.no_room: list[NoRoom] = []
        self.degraded: list[str] = []
        heard = self.no_room.append, self.degraded.append
        self.copier = Copier(JOB, 0, self.gate, group, seconds, *heard, to_disk, halt)
        self.model = nn.Linear(300, 300)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = TrainState(model=self.model, optimizer=self.optimizer)
        self.generation = G1
        self.copier.resume(self.footing(G1, 0))

    def footing(self, generation: Generation, resume: int) -> Footing:
        ground = Ground(
            places={node.index: node.index for node in self.nodes},
            domains=tuple((node.index, f"node{node.index}") for node in self.nodes),
            servers=tuple(node.peer for node in self.nodes),
            interval=self.interval,
        )
        return Footing(generation, ground, resume, self.nodes[0].path)

    def check(self) -> None:
        if self.gate.closed:
            raise StepAborted from self.gate.reason

    def begin(self, stamp: Stamp | None = None) -> None:
        captured, version = self.state.capture(), self.state.step
        self.copier.begin(
            stamp or Stamp(self.generation, version), bundled(self.state, 0, 1), Private(captured, version)
        )

    def step(self, stamp: Stamp | None = None) -> None:
        self.begin(stamp)
        self.copier.wait(self.check)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.state.step += 1


@pytest.fixture
def nodes(start_node: Callable[[int], CheckpointNode]) -> list[CheckpointNode]:
    nodes = [start_node(index) for index in range(2)]
    for node in nodes:
        node.follow(G1, nodes)
    return nodes


@pytest.fixture
def rank_with() -> Iterator[Callable[..., Rank]]:
    """`rank_with(nodes, ...)`; its thread ends with the test."""
    made: list[Rank] = []

    def make(*arguments: Any, **options: Any) -> Rank:
        made.append(Rank(*arguments, **options))
        return made[-1]

    yield make
    for rank in made:
        rank.copier.end()
        assert not rank.copier._thread.is_alive()


@pytest.fixture
def rank(nodes: list[CheckpointNode], rank_with: Callable[..., Rank]) -> Rank:
    return rank_with(nodes)


def kept(*versions: int) -> list[tuple[str, int]]:
    return [(bundle, version) for bundle in BUNDLES for version in versions]


def test_the_last_two_versions_of_every_bundle_are_on_both_nodes(rank: Rank) -> None:
    for _ in range(4):
        rank.step()
    for node in rank.nodes:
        node.until_kept(*kept(2, 3))
    assert rank.copier.complete == 2  # that 3 is complete is known in the next round


def test_the_first_version_is_complete_before_anything_changes(rank: Rank) -> None:
    rank.step()
    assert rank.copier.complete == 0


def test_how_far_it_is_stands_on_the_progress_page(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor, page = ProgressPage.create()
    os.close(descriptor)
    monkeypatch.setattr(link, "progress_page", lambda: page)
    for _ in range(3):
        rank.step()
    assert page.read().complete == 1
    page.close()


def test_an_optimizer_waits_as_long_as_its_node_has_not_sealed_the_version(rank: Rank, eventually: Eventually) -> None:
    rank.step()
    server = rank.nodes[0].process
    server.send_signal(signal.SIGSTOP)
    stepping = threading.Thread(target=rank.step)
    stepping.start()
    eventually(lambda: rank.copier._order is not None and rank.copier._order.stamp.version == 1)
    stepping.join(0.3)
    assert stepping.is_alive()
    server.send_signal(signal.SIGCONT)
    stepping.join(20.0)
    assert not stepping.is_alive() and rank.state.step == 2
    assert rank.copier.stalled > 0.25


def test_an_optimizer_waits_for_the_replica_too(rank: Rank) -> None:
    rank.step()
    rank.nodes[1].process.send_signal(signal.SIGSTOP)
    stepping = threading.Thread(target=rank.step)
    stepping.start()
    rank.nodes[0].until_kept(*kept(0, 1))
    stepping.join(0.3)
    assert stepping.is_alive()
    rank.nodes[1].process.send_signal(signal.SIGCONT)
    stepping.join(20.0)
    assert not stepping.is_alive()


def test_at_an_abort_both_threads_leave_at_once(rank: Rank) -> None:
    rank.step()
    rank.nodes[0].process.send_signal(signal.SIGSTOP)
    rank.begin()
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            rank.copier.wait(rank.check)
        except StepAborted as error:
            outcome.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    began = time.monotonic()
    rank.gate.close(RuntimeError("a rank died"))
    rank.copier.stop()
    assert time.monotonic() - began < 0.5
    waiting.join(5.0)
    assert len(outcome) == 1
    rank.copier.resume(rank.footing(G2, 1))  # waits for the thread
    assert time.monotonic() - began < 2.0
    assert rank.copier.error is None
    rank.nodes[0].process.send_signal(signal.SIGCONT)


def test_after_a_stop_nothing_begins_until_the_next_generation(rank: Rank) -> None:
    rank.step()
    rank.copier.stop()
    rank.begin()
    rank.gate.close(RuntimeError("a rank died"))
    with pytest.raises(StepAborted):
        rank.copier.wait(rank.check)
    rank.nodes[0].until_kept(*kept(0))


def test_a_new_generation_goes_on_with_the_copies_that_are_there(
    rank: Rank, start_node: Callable[[int], CheckpointNode]
) -> None:
    """The first version is complete only when the new partner has it."""
    for _ in range(3):
        rank.step()
    third = start_node(2)
    rank.nodes[1].end()
    rank.copier.stop()
    rank.nodes = [rank.nodes[0], third]
    resumed = Stamp(G1, 2)
    for node in rank.nodes:
        node.follow(G2, rank.nodes, resume=2, lineage=Lineage().resumed(G2, 2).resumes)
    rank.state.step = 2
    rank.generation = G2
    rank.copier.resume(rank.footing(G2, 2))
    assert rank.copier.complete == -1
    rank.step(resumed)
    assert rank.copier.complete == 2
    third.until_kept(*kept(2))
    rank.step()
    stamps = {kept.slot.stamp for kept in third.until_kept(*kept(2, 3)).kept}
    assert stamps == {resumed, Stamp(G2, 3)}


def test_a_server_that_is_started_again_gets_its_copies_again(
    rank: Rank, start_node: Callable[[int], CheckpointNode]
) -> None:
    rank.step()
    old = rank.nodes[0]
    old.kill()
    stepping = threading.Thread(target=rank.step)
    stepping.start()
    new = start_node(0)
    new.follow(G1, rank.nodes)
    os.rename(new.path, old.path)
    stepping.join(20.0)
    assert not stepping.is_alive() and rank.state.step == 2
    rank.step()
    new.until_kept(*kept(1, 2))
    os.rename(old.path, new.path)


def test_a_server_that_stays_away_aborts_the_step(nodes: list[CheckpointNode], rank_with: Callable[..., Rank]) -> None:
    rank = rank_with(nodes, seconds=0.3)
    rank.step()
    nodes[0].kill()
    with pytest.raises(StepAborted):
        rank.step()
    assert isinstance(rank.gate.reason, CopyFailedError) and rank.copier.error is rank.gate.reason
    assert "version 1 could not be copied" in str(rank.copier.error)
    assert rank.state.step == 1


def test_a_partner_that_takes_no_replicas_is_passed_over_and_asked_again_later(
    start_node: Callable[[int], CheckpointNode], rank_with: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "_PARTNER", 0.2)
    nodes = [start_node(index) for index in range(3)]
    for node in nodes:
        node.follow(G1, nodes)
    rank = rank_with(nodes)
    rank.step()
    nodes[1].until_kept(*kept(0))
    nodes[1].kill()
    rank.step()
    nodes[2].until_kept(*kept(1))
    assert len(rank.degraded) == 1 and "node 1 takes no replicas" in rank.degraded[0]
    began = time.monotonic()
    rank.step()
    assert time.monotonic() - began < 0.2, "it is not asked each time"
    nodes[2].until_kept(*kept(1, 2))
    rank.copier._filler._avoided[1] = (0.0, filling._PARTNER_PAUSE)  # the time is over
    rank.step()
    assert len(rank.degraded) == 3 and rank.degraded[1] == "", "it is asked again, and refuses again"
    assert rank.copier._filler._avoided[1][1] == 2 * filling._PARTNER_PAUSE


def test_without_any_other_partner_training_goes_on_with_the_copies_of_its_own_node(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "_PARTNER", 0.2)
    rank.step()
    rank.nodes[1].kill()
    rank.step()
    rank.step()
    rank.nodes[0].until_kept(*kept(1, 2))
    assert rank.degraded and not rank.gate.closed


def test_a_node_without_room_is_named_with_its_arithmetic_and_not_asked_again(
    start_node: Callable[..., CheckpointNode], rank_with: Callable[..., Rank]
) -> None:
    """The parameters alone would fit twice, but what Adam is going to keep beside them is known before its first step."""
    small = start_node(0, memory=2 << 20)
    small.follow(G1, [small])
    rank = rank_with([small])
    began = time.monotonic()
    rank.optimizer = torch.optim.Adam(rank.model.parameters())
    rank.state = TrainState(model=rank.model, optimizer=rank.optimizer)
    with pytest.raises(StepAborted):
        rank.step()
    assert time.monotonic() - began < 10.0, "no use to ask for as long as a server may need to come up again"
    assert rank.state.step == 0
    (found,) = rank.no_room
    assert found.node == 0 and "copies in memory need" in found.why and "--copy-memory allows 2 MiB" in found.why
    assert found.limited and found.need > 2 << 20


def test_a_partner_without_room_is_named_too(
    start_node: Callable[..., CheckpointNode], rank_with: Callable[..., Rank]
) -> None:
    nodes = [start_node(0), start_node(1, memory=1 << 10)]
    for node in nodes:
        node.follow(G1, nodes)
    rank = rank_with(nodes)
    with pytest.raises(StepAborted):
        rank.step()
    (found,) = rank.no_room
    assert found.node == 1 and "for replicas of other nodes" in found.why and not rank.degraded


def test_what_the_copies_come_to_stands_on_the_progress_page(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor, page = ProgressPage.create()
    os.close(descriptor)
    monkeypatch.setattr(link, "progress_page", lambda: page)
    for _ in range(3):
        rank.step()
    figures = page.read_copies()
    weights = 4 * (300 * 300 + 300)
    assert 2 * weights < figures.state < 2 * weights + 40_000, "parameters, momenta, and what is private"
    assert figures.copied == figures.sent and figures.holders == 2
    assert 5 * weights < figures.copied < 5 * weights + 120_000, "the first version had no momenta yet"
    page.close()


def test_with_an_interval_only_every_nth_version_is_copied(
    nodes: list[CheckpointNode], rank_with: Callable[..., Rank]
) -> None:
    rank = rank_with(nodes, interval=3)
    for _ in range(5):
        rank.step()
    for node in nodes:
        node.until_kept(*kept(0, 3))


def test_a_version_for_which_not_all_are_ready_is_left_out_by_all(
    nodes: list[CheckpointNode], rank_with: Callable[..., Rank]
) -> None:
    rank = rank_with(nodes, Others([-1, 0, 0, 0, 2], ready=lambda version: version % 2 == 0))
    for _ in range(4):
        rank.step()
    nodes[0].until_kept(*kept(0, 2))


def test_a_state_that_cannot_be_copied_aborts_the_step_with_the_reason(rank: Rank) -> None:
    rank.optimizer.param_groups[0]["function"] = lambda: 0
    with pytest.raises(StepAborted):
        rank.step()
    assert "cannot be copied for another process" in str(rank.gate.reason)


def test_a_step_without_an_optimizer_leaves_its_copy_to_the_next_entry(rank: Rank) -> None:
    """A scaler that saw an overflow skips the optimizer, so nobody waits."""
    rank.begin()
    rank.state.step += 1
    rank.step()
    rank.nodes[0].until_kept(*kept(0, 1))


def test_a_version_that_is_begun_twice_is_copied_once(rank: Rank) -> None:
    rank.begin()
    order = rank.copier._order
    rank.step()
    assert rank.copier._order is order


def test_a_child_that_the_script_forks_does_not_hold_the_connection(rank: Rank) -> None:
    rank.step()
    pid = os.fork()
    if pid == 0:
        link = rank.copier._filler._link
        os._exit(0 if link is not None and link._sock.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    rank.step()


# --- the round of all ranks ------------------------------------------------------------------------------------------


class Others:
    """A group in which the other ranks bring these votes, round by round; `come`: when they do; `ready`: in which versions."""

    def __init__(
        self, sealed: list[int], ahead: int = 0, ready: Callable[[int], bool] = lambda _: True, writes: int = 1
    ) -> None:
        """`writes`: whether they can begin to write to disk."""
        self.writes = writes
        self.sealed, self.ahead, self.ready = sealed, ahead, ready
        self.come = threading.Event()
        self.come.set()
        self.entered = threading.Event()

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> Any:
        assert options.reduceOp == dist.ReduceOp.MIN
        version = int(tensors[0][0]) + self.ahead
        theirs = torch.tensor([version, -version, self.sealed.pop(0), int(self.ready(version)), self.writes, 0])
        torch.minimum(tensors[0], theirs, out=tensors[0])
        self.entered.set()
        return self

    def wait(self) -> bool:
        return self.come.wait(20.0)


def test_complete_is_what_all_have_sealed(nodes: list[CheckpointNode], rank_with: Callable[..., Rank]) -> None:
    rank = rank_with(nodes, Others([-1, 0, 0, 1]))
    for complete in (0, 0, 1):
        rank.step()
        assert rank.copier.complete == complete


def test_a_version_that_others_still_need_is_not_overwritten(
    nodes: list[CheckpointNode], rank_with: Callable[..., Rank]
) -> None:
    rank = rank_with(nodes, Others([-1, 0, 0, 0]), seconds=0.2)
    rank.step()
    rank.step()
    with pytest.raises(StepAborted):
        rank.step()
    assert "still needed" in str(rank.gate.reason)
    nodes[0].until_kept(*kept(0, 1))


def test_the_first_version_has_to_be_sealed_by_all(nodes: list[CheckpointNode], rank_with: Callable[..., Rank]) -> None:
    rank = rank_with(nodes, Others([-1, -1]))
    with pytest.raises(StepAborted):
        rank.step()
    assert "version 0 is not complete" in str(rank.gate.reason)


def test_ranks_that_stand_in_different_steps_do_not_go_on(
    nodes: list[CheckpointNode], rank_with: Callable[..., Rank]
) -> None:
    rank = rank_with(nodes, Others([-1], ahead=1))
    with pytest.raises(StepAborted):
        rank.step()
    assert "votes on versions [0, 1]" in str(rank.gate.reason)


def test_what_a_broken_round_says_does_not_count(nodes: list[CheckpointNode], rank_with: Callable[..., Rank]) -> None:
    others = Others([-1, 0, 1])
    rank = rank_with(nodes, others)
    rank.step()
    others.come.clear()
    others.entered.clear()
    rank.begin()
    assert others.entered.wait(10.0)
    rank.gate.close(RuntimeError("a rank died"))
    rank.copier.stop()
    others.come.set()
    with pytest.raises(StepAborted):
        rank.copier.wait(rank.check)
    rank.copier.resume(rank.footing(G2, 0))
    rank.nodes[0].until_kept(*kept(0))


class Disk:
    """Wants versions 1 and 3."""

    def __init__(self, *, idle: bool = True) -> None:
        self.is_idle = idle
        self.taken: list[Stamp] = []
        self.left_out: list[int] = []

    def due(self, version: int) -> bool:
        return version in (1, 3)

    def idle(self) -> bool:
        return self.is_idle

    def missed(self, version: int) -> None:
        self.left_out.append(version)

    def take(self, stamp: Stamp, *_: object) -> None:
        self.taken.append(stamp)


def test_versions_that_are_due_go_to_disk_when_all_ranks_are_ready(
    nodes: list[CheckpointNode], rank_with: Callable[..., Rank]
) -> None:
    disk = Disk()
    rank = rank_with(nodes, Others([-1, 0, 0, 1, 2]), to_disk=disk)
    for _ in range(4):
        rank.step()
    assert (disk.taken, disk.left_out) == ([Stamp(G1, 1), Stamp(G1, 3)], [])


@pytest.mark.parametrize(("theirs", "ours"), [(0, True), (1, False), (0, False)])
def test_one_rank_that_is_not_ready_leaves_a_version_out_for_all(
    theirs: int, ours: bool, nodes: list[CheckpointNode], rank_with: Callable[..., Rank]
) -> None:
    disk = Disk(idle=ours)
    rank = rank_with(nodes, Others([-1, 0, 0], writes=theirs), to_disk=disk)
    for _ in range(2):
        rank.step()
    assert (disk.taken, disk.left_out) == ([], [1])
