"""What follows when holders of the same do not have the same bits: pure decisions, no process."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from test_membership import PAIR
from test_membership_swaps import G1, G2, Swaps

from phoenix_launch.copies import KeptSlot, Slot, Stamp
from phoenix_launch.errors import UsageError
from phoenix_launch.job import events as job_events
from phoenix_launch.job import odd_bits
from phoenix_launch.job.state import Odd, Phase, Rung
from phoenix_launch.job.wishes import ground, wish_for
from phoenix_launch.messages import OddBits
from phoenix_launch.options.checkpoints import check_checkpoints
from phoenix_launch.settings import RunSettings

RULES = replace(PAIR, heartbeat_timeout=1e9, verify_replicas=1)
AT_5 = Stamp(G1, 5)
THIRD = OddBits(AT_5, "ranks 0-3", "model.w", (0, 1, 2, 3), (2,))
UNCLEAR = OddBits(AT_5, "ranks 0-1", "model.w", (0, 1))


class Found(Swaps):
    def __init__(self) -> None:
        super().__init__(RULES, slots=2)

    def finds(self, node: int, found: OddBits, *ranks: int) -> None:
        said = []
        for rank in self.here(node):
            report = self.rank(rank)
            assert report.runtime is not None
            if rank in ranks:
                report = msgspec.structs.replace(report, runtime=msgspec.structs.replace(report.runtime, odd=(found,)))
            said.append(report)
        self.say(node, *said)

    def of(self, kind: type) -> list[object]:
        return [action for action in self.actions if isinstance(action, kind)]


def test_the_odd_one_is_ended_once_and_made_anew_in_place() -> None:
    job = Found()
    job.finds(0, THIRD, 0, 1)
    job.finds(1, THIRD, 3)
    assert job.of(job_events.CorruptionFound) == [job_events.CorruptionFound(THIRD)]
    (fault,) = job.of(job_events.FaultFound)
    assert isinstance(fault, job_events.FaultFound)
    assert (fault.kind, fault.node, fault.ranks) == ("corruption", 1, (2,))
    assert fault.detail == "has other bits in model.w at the entry of step 6 than 3 other ranks"
    assert wish_for(job.state, 1).condemned == ((2, G1),)
    job.train(1, rank2=-9)
    assert (job.phase(), job.state.rung, job.state.generation) == (Phase.SWAPPING, Rung.IN_PLACE, G2)
    assert len(job.of(job_events.FaultFound)) == 1


def test_what_the_odd_one_says_itself_or_who_does_not_hold_it_counts_for_nothing() -> None:
    job = Found()
    job.finds(1, THIRD, 2)
    job.finds(0, UNCLEAR)
    job.finds(1, UNCLEAR, 2, 3)
    assert not job.of(job_events.CorruptionFound)


def test_what_an_older_generation_found_is_over() -> None:
    job = Found()
    job.finds(0, replace_stamp(THIRD, Stamp(G2, 5)), 0)
    assert not job.of(job_events.CorruptionFound)


def replace_stamp(found: OddBits, stamp: Stamp) -> OddBits:
    return msgspec.structs.replace(found, stamp=stamp)


def test_where_it_is_unclear_who_is_wrong_it_is_told_and_nobody_is_ended() -> None:
    job = Found()
    job.finds(0, UNCLEAR, 0)
    job.finds(0, UNCLEAR, 0, 1)
    assert job.of(job_events.CorruptionFound) == [job_events.CorruptionFound(UNCLEAR)]
    assert not job.of(job_events.FaultFound)
    assert odd_bits.unclear(UNCLEAR).startswith("ranks 0-1 do not have the same bits in model.w at the entry of step 6")


@pytest.mark.parametrize(
    ("stamp", "bundle", "node", "used"),
    [
        (Stamp(G1, 5), "ranks 0-3", 1, True),  # the version that was compared: no odd one has filled it
        (Stamp(G1, 4), "ranks 0-3", 1, False),
        (Stamp(G1, 4), "ranks 0-3", 7, False),  # a replica of it may be
        (Stamp(G1, 4), "ranks 0-3", 0, True),  # written by those who were right
        (Stamp(G1, 4), "private 2", 1, True),
        (Stamp(G2, 4), "ranks 0-3", 1, True),  # written after the odd one was replaced
    ],
)
def test_what_an_odd_rank_may_have_written_is_no_source(stamp: Stamp, bundle: str, node: int, used: bool) -> None:
    kept = {node: (KeptSlot(bundle, Slot(stamp)),)}
    assert bool(odd_bits.trusted(kept, [Odd(THIRD, frozenset({0}))])[node]) is used
    assert odd_bits.trusted(kept, [Odd(UNCLEAR, frozenset())])[node], "nobody is blamed"


def test_every_rank_is_told_how_often_to_compare() -> None:
    told = ground(Found().state)
    assert told is not None
    assert told.verify == 1


def test_without_copies_there_is_nothing_to_restore_the_odd_one_from() -> None:
    with pytest.raises(UsageError, match="--verify-replicas does nothing without copies in memory"):
        check_checkpoints(RunSettings(script="train.py", verify_replicas=3, snapshot_interval=0))
    check_checkpoints(RunSettings(script="train.py", verify_replicas=3))
