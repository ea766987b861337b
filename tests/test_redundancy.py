"""What people are told of the copies in memory: full only when the loss of any node could be repaired from them."""

from __future__ import annotations

from dataclasses import replace

from test_membership import PAIR
from test_membership_swaps import Swaps

from phoenix_launch.errors import EXIT_DO_NOT_REQUEUE
from phoenix_launch.job.redundancy import DEGRADED, FULL, NONE, RESTORING, Redundancy, redundancy
from phoenix_launch.job.state import Phase, Rules
from phoenix_launch.messages import NoRoom


def job(rules: Rules = PAIR) -> Swaps:
    return Swaps(rules, spares=1)


def test_it_is_full_when_a_version_of_this_generation_is_complete() -> None:
    assert redundancy(job().state) == Redundancy(FULL)


def test_nothing_is_said_of_a_script_that_does_not_know_the_runtime() -> None:
    plain = job()
    holders = {rank: replace(holder, runtime=None) for rank, holder in plain.state.holders.items()}
    assert redundancy(replace(plain.state, holders=holders)) == Redundancy()


def test_it_is_being_restored_from_a_fault_until_a_version_is_complete_again() -> None:
    swapped = job()
    swapped.train(0, rank0=-9)
    assert redundancy(swapped.state).word == RESTORING
    swapped.swapped()
    assert swapped.phase() is Phase.RUNNING
    for index in (0, 1):
        swapped.say(index, *(swapped.rank(rank, complete=-1) for rank in swapped.here(index)))
    assert redundancy(swapped.state).word == RESTORING
    for index in (0, 1):
        swapped.say(index, *(swapped.rank(rank, complete=5) for rank in swapped.here(index)))
    assert redundancy(swapped.state) == Redundancy(FULL)


def test_fewer_failure_domains_than_copies_are_degraded() -> None:
    assert redundancy(job(replace(PAIR, replicas=2)).state) == Redundancy(DEGRADED, "2 failure domains for 2 replicas")
    assert redundancy(job(replace(PAIR, replicas=0)).state).word == DEGRADED


def test_a_partner_that_takes_no_replicas_is_degraded_with_its_reason() -> None:
    one = job()
    one.say(1, *(one.rank(rank, degraded="node 0 takes no replicas: refused") for rank in one.here(1)))
    assert redundancy(one.state) == Redundancy(DEGRADED, "node 0 takes no replicas: refused")


def test_without_copies_there_is_none() -> None:
    assert redundancy(job(replace(PAIR, snapshot_interval=0)).state) == Redundancy(NONE, "--snapshot-interval 0")


def test_a_node_without_room_for_the_copies_ends_the_job_with_the_arithmetic() -> None:
    full = job()
    short = NoRoom("copies need 2 GiB, 1 GiB is free", 1, 2 << 30, limited=False, replicas=True)
    full.say(1, *(full.rank(rank, no_room=short) for rank in full.here(1)))
    assert full.phase() is Phase.STOPPING
    outcome = full.state.outcome
    assert outcome is not None and outcome.exit_code == EXIT_DO_NOT_REQUEUE
    name = full.state.members[1].name
    assert outcome.text == f"the copies of the training state do not fit on {name}: copies need 2 GiB, 1 GiB is free"
    assert "fewer ranks on a node" in outcome.hint and "--replicas 0" in outcome.hint


def test_the_hint_names_the_users_own_limit_and_nothing_that_does_not_help() -> None:
    full = job()
    short = NoRoom("copies need 2 GiB, --copy-memory allows 1 GiB", 1, 2 << 30, limited=True)
    full.say(1, *(full.rank(rank, no_room=short) for rank in full.here(1)))
    outcome = full.state.outcome
    assert outcome is not None
    assert outcome.hint == (
        "--copy-memory of at least 2 GiB, or --snapshot-interval 0 (no copies: a failure starts the script again)"
    )
