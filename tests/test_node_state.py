"""What an agent decides: the same plan twice changes nothing, an old one less than nothing, and nothing is left out."""

from __future__ import annotations

import itertools
from typing import TypeVar

import msgspec
from fake_supervisor import G1, G2, G3, command, order, plan
from hypothesis import given, settings
from hypothesis import strategies as st

from phoenix_launch.bootstrap import RunMode, StartMethod
from phoenix_launch.copies import Stamp
from phoenix_launch.messages import NodePlan, PlanPhase, Prepare, ProcessState, RankOrder, Resumption, StoreReport
from phoenix_launch.node.actions import (
    Action,
    EndTree,
    HostStore,
    Leave,
    Member,
    ParkProcess,
    PassSignal,
    RunWorker,
    StartForkServer,
    StartStoreHost,
    Sweep,
)
from phoenix_launch.node.state import FAILURE_WINDOW, NodeState
from phoenix_launch.wire import NO_GENERATION, Generation

A = TypeVar("A", bound=Action)
FORK = command("script.py", start_method=StartMethod.FORK)
SPAWN = command("script.py")
PIDS = itertools.count(1000)


def only(actions: list[Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def forking(parked: int = 0) -> NodeState:
    """A node whose fork server is up, with that many processes parked."""
    state = NodeState(FORK)
    state.on_prepare(Prepare({}, parked))
    assert state.decide(0.0) == [StartForkServer()]
    state.on_fork_server_up("")
    park(state, 0.0)
    return state


def spawning() -> NodeState:
    state = NodeState(SPAWN)
    state.on_prepare(Prepare({}, 0))
    for action in only(state.decide(0.0), StartStoreHost):
        state.on_started(action.key, next(PIDS))
    return state


def park(state: NodeState, now: float) -> list[Action]:
    """Let the fork server answer until nothing more is asked of it; returns what else was decided."""
    others: list[Action] = []
    while actions := state.decide(now):
        for action in actions:
            if isinstance(action, ParkProcess):
                state.on_parked(action.key, next(PIDS))
            else:
                others.append(action)
    return others


def running(*ranks: int, generation: Generation = G1) -> tuple[NodeState, dict[int, int]]:
    """A node with workers of these ranks, and rank -> key."""
    state = spawning()
    state.on_plan(plan(generation, PlanPhase.RUN, *map(order, ranks)), 0.0)
    begun = only(state.decide(0.0), RunWorker)
    for action in begun:
        state.on_started(action.key, next(PIDS))
    return state, {action.order.rank: action.key for action in begun}


def end(state: NodeState, key: int, code: int, now: float) -> None:
    """The worker ends, and so does its tree."""
    state.on_exit(key, code, now)
    assert EndTree(key) in state.decide(now)
    state.on_cleared(key)


def test_nothing_is_started_before_prepare() -> None:
    state = NodeState(SPAWN)
    state.on_plan(plan(G1, PlanPhase.RUN, order(0)), 0.0)
    assert state.decide(0.0) == []
    assert not state.prepared


def test_parked_processes_are_kept_at_the_number_that_was_asked_for() -> None:
    state = forking(2)
    assert len(state.parked_pids()) == 2
    state.on_prepare(Prepare({}, 3))
    assert len(only(state.decide(1.0), ParkProcess)) == 1
    assert state.decide(1.0) == []


def test_workers_come_from_parked_processes_which_are_replaced() -> None:
    state = forking(2)
    state.on_plan(plan(G1, PlanPhase.RUN, order(0), order(1)), 1.0)
    actions = state.decide(1.0)
    assert [a.order.rank for a in only(actions, RunWorker)] == [0, 1]
    assert not any(a.afresh for a in only(actions, RunWorker))
    assert len(only(actions, ParkProcess)) == 2
    assert state.applied == G1


def test_a_plan_waits_for_processes_that_are_not_parked_yet() -> None:
    state = forking(0)
    state.on_plan(plan(G1, PlanPhase.RUN, order(0), order(1)), 1.0)
    (one, two) = only(state.decide(1.0), ParkProcess)
    assert state.applied != G1
    state.on_parked(one.key, 11)
    assert [a.key for a in only(state.decide(1.0), RunWorker)] == [one.key]
    state.on_parked(two.key, 12)
    assert [a.key for a in only(state.decide(1.0), RunWorker)] == [two.key]
    assert state.applied == G1


def test_the_same_plan_again_changes_nothing() -> None:
    state, _ = running(0, 1)
    state.on_plan(plan(G1, PlanPhase.RUN, order(0), order(1)), 1.0)
    assert state.decide(1.0) == []


def test_a_worker_that_ended_is_not_started_again_in_its_generation() -> None:
    state, keys = running(0, 1)
    end(state, keys[0], 1, 1.0)
    state.on_plan(plan(G1, PlanPhase.RUN, order(0), order(1)), 2.0)
    assert only(state.decide(2.0), RunWorker) == []
    assert {m.order.rank: m.state for m in state.workers() if m.order} == {
        0: ProcessState.GONE,
        1: ProcessState.RUNNING,
    }


def test_an_older_plan_is_ignored() -> None:
    state, _ = running(0, generation=G2)
    assert not state.on_plan(plan(G1, PlanPhase.LEAVE), 1.0)
    assert not state.on_plan(plan(G2, PlanPhase.QUIESCE), 1.0)
    assert state.decide(1.0) == []


def test_quiesce_signals_then_kills_then_sweeps_then_reports() -> None:
    state, keys = running(0, 1)
    state.on_plan(plan(G2, PlanPhase.QUIESCE, grace=5.0), 10.0)
    assert state.decide(10.0) == [PassSignal(keys[0], 15), PassSignal(keys[1], 15)]
    assert state.decide(14.9) == []
    assert state.next_deadline() == 15.0
    end(state, keys[0], -15, 11.0)
    assert state.decide(15.0) == [EndTree(keys[1])]
    state.on_exit(keys[1], -9, 15.0)
    assert state.decide(15.0) == []
    state.on_cleared(keys[1])
    assert state.quiesced < G2
    assert state.decide(15.1) == [Sweep()]
    assert state.quiesced < G2
    state.on_swept()
    state.decide(15.2)
    assert state.quiesced == G2


def test_a_new_generation_starts_only_when_the_old_one_is_gone() -> None:
    state, keys = running(0)
    state.on_plan(plan(G2, PlanPhase.RUN, order(0), order(1)), 1.0)  # the QUIESCE got lost
    assert state.decide(1.0) == [PassSignal(keys[0], 15)]
    end(state, keys[0], -15, 2.0)
    assert state.decide(2.0) == [Sweep()]
    state.on_swept()
    assert len(only(state.decide(2.0), RunWorker)) == 2
    assert (state.quiesced, state.applied) == (G2, G2)


def test_exits_are_reported_until_the_next_generation_runs() -> None:
    state, keys = running(0)
    state.on_plan(plan(G2, PlanPhase.QUIESCE), 1.0)
    state.decide(1.0)
    end(state, keys[0], -15, 2.0)
    state.decide(2.0)
    state.on_swept()
    state.decide(2.0)
    assert [m.code for m in state.workers()] == [-15]
    state.on_plan(plan(G2, PlanPhase.RUN), 3.0)
    state.decide(3.0)
    assert state.workers() == []


def test_stop_reaches_all_workers_and_nothing_is_started_after_it() -> None:
    state, keys = running(0)
    state.on_plan(plan(G1, PlanPhase.STOP, order(0), order(1), signal=2, grace=30.0), 1.0)
    assert state.decide(1.0) == [PassSignal(keys[0], 2)]
    assert state.next_deadline() == 31.0


def test_a_repeated_stop_only_shortens_the_wait() -> None:
    state, keys = running(0)
    state.on_plan(plan(G1, PlanPhase.STOP, grace=30.0), 0.0)
    state.on_plan(plan(G1, PlanPhase.STOP, grace=30.0), 10.0)
    state.decide(10.0)
    assert state.next_deadline() == 30.0
    state.on_plan(plan(G1, PlanPhase.STOP, grace=1.0), 11.0)
    assert state.next_deadline() == 12.0
    assert state.decide(12.0) == [EndTree(keys[0])]


def test_another_signal_is_passed_on_as_well() -> None:
    state, keys = running(0)
    state.on_plan(plan(G1, PlanPhase.STOP, signal=2), 0.0)
    assert state.decide(0.0) == [PassSignal(keys[0], 2)]
    state.on_plan(plan(G1, PlanPhase.STOP, signal=15), 1.0)
    assert state.decide(1.0) == [PassSignal(keys[0], 15)]


def test_leave_is_said_once_and_is_the_last_word() -> None:
    state, _ = running(0)
    state.on_plan(plan(G1, PlanPhase.LEAVE), 1.0)
    assert state.decide(1.0) == [Leave()]
    assert state.decide(1.0) == []


def test_the_store_is_hosted_while_workers_are_still_ending_and_the_old_one_goes_when_the_new_workers_run() -> None:
    state = forking(1)
    state.on_plan(plan(G1, PlanPhase.RUN, order(0), host_store=True, store_port=29500), 0.0)
    actions = park(state, 0.0)
    (host,) = only(actions, HostStore)
    (worker,) = only(actions, RunWorker)
    assert (host.generation, host.port) == (G1, 29500)
    state.on_store_up(host.key, StoreReport(G1, "a", 1))
    state.on_plan(plan(G2, PlanPhase.QUIESCE, host_store=True), 1.0)
    actions = park(state, 1.0)
    (newer,) = only(actions, HostStore)
    assert newer.generation == G2
    assert only(actions, EndTree) == []
    state.on_store_up(newer.key, StoreReport(G2, "a", 2))
    end(state, worker.key, 0, 2.0)
    state.on_plan(plan(G2, PlanPhase.RUN, order(0), host_store=True), 3.0)
    assert EndTree(host.key) in state.decide(3.0)
    assert state.store == StoreReport(G2, "a", 2)


def test_a_store_host_that_dies_is_an_error_of_its_generation() -> None:
    state = spawning()
    state.on_plan(plan(G1, PlanPhase.QUIESCE, host_store=True), 0.0)
    (host,) = only(state.decide(0.0), HostStore)
    state.on_exit(host.key, -9, 1.0)
    assert state.store is not None and "exit code -9" in state.store.error


def test_a_store_host_that_was_started_afresh_never_becomes_a_worker() -> None:
    state = spawning()
    state.on_plan(plan(G1, PlanPhase.RUN, order(0)), 0.0)
    (worker,) = only(state.decide(0.0), RunWorker)
    assert worker.afresh
    assert state.parked_pids() == ()


def test_commands_that_cannot_be_forked_are_started_afresh() -> None:
    for mode in (RunMode.EXEC, RunMode.RUN_PATH):
        state = NodeState(command("x", mode=mode, start_method=StartMethod.FORK))
        state.on_prepare(Prepare({}, 2))
        assert only(state.decide(0.0), StartForkServer) == []
        assert state.prepared


def test_workers_are_started_afresh_where_forking_is_unsafe() -> None:
    state = NodeState(FORK)
    state.on_prepare(Prepare({}, 2))
    state.decide(0.0)
    state.on_fork_server_up("a foreign thread")
    state.on_fork_server_gone("it was told to end", 1.0)
    assert state.prepared and state.complaint == ""
    state.on_plan(plan(G1, PlanPhase.RUN, order(0)), 1.0)
    assert [a.afresh for a in only(state.decide(1.0), RunWorker)] == [True]


def test_a_fork_server_is_restarted_three_times_a_minute_then_there_is_a_complaint() -> None:
    state = forking(0)
    for now in (1.0, 2.0, 3.0):
        state.on_fork_server_gone("exit code -9", now)
        assert state.decide(now) == [StartForkServer()]
    state.on_fork_server_gone("exit code -9, bad luck", 4.0)
    assert state.decide(4.0) == []
    assert "bad luck" in state.complaint and not state.prepared


def test_a_fork_server_that_dies_now_and_then_is_always_restarted() -> None:
    state = forking(0)
    for number in range(1, 20):
        now = number * FAILURE_WINDOW / 2
        state.on_fork_server_gone("exit code 1", now)
        assert state.decide(now) == [StartForkServer()]
        state.on_fork_server_up("")


def test_the_death_of_the_fork_server_leaves_its_processes_in_use() -> None:
    state = forking(1)
    state.on_fork_server_gone("exit code -9", 1.0)
    state.on_plan(plan(G1, PlanPhase.RUN, order(0)), 1.0)
    assert len(only(state.decide(1.0), RunWorker)) == 1


def test_a_parked_process_that_dies_is_replaced_after_a_pause() -> None:
    state = forking(1)
    (member,) = state.members.values()
    state.on_exit(member.key, -9, 1.0)
    assert state.decide(1.0) == [EndTree(member.key)]
    assert state.next_deadline() == 1.2
    assert len(only(state.decide(1.2), ParkProcess)) == 1


def test_parked_processes_that_keep_dying_end_in_a_complaint() -> None:
    state = forking(1)
    for number in range(20):
        now = 1.0 + number
        for member in list(state.members.values()):
            if member.alive:
                state.on_parked(member.key, next(PIDS))
                state.on_exit(member.key, 1, now)
        state.decide(now + 0.5)
    assert "ended by themselves" in state.complaint
    assert state.decide(100.0) == []


# --- swaps: survivors stay -------------------------------------------------------------------------------------------


def born(generation: Generation, *ranks: int) -> list[RankOrder]:
    """Orders that name the processes which this generation has started."""
    return [msgspec.structs.replace(order(rank), born=generation) for rank in ranks]


def swap(generation: Generation, *orders: RankOrder, stage: int = 0, phase: PlanPhase = PlanPhase.SWAP) -> NodePlan:
    """Stage 0: leave your step; 1: it goes on from this version; 2: here is where everybody is."""
    addresses = {0: "here", 1: "there"} if stage > 1 else {}
    resumption = Resumption(Stamp(G1, 7) if stage else None, (Stamp(generation, 7),), addresses)
    return plan(generation, phase, *orders, resumption=resumption, host_store=False)


def begun(actions: list[Action]) -> list[int]:
    return [action.order.rank for action in only(actions, RunWorker)]


def alive(state: NodeState) -> dict[int, Generation]:
    return {m.order.rank: m.generation for m in state.workers() if m.order is not None and m.alive}


def lost(rank: int, *, of: int = 2) -> NodeState:
    """A node with workers 0 .. of-1 of generation 1, one of which has just died with all its tree."""
    state, keys = running(*range(of))
    end(state, keys[rank], -9, 1.0)
    return state


def test_a_swap_keeps_who_is_named_and_starts_who_is_missing_alone() -> None:
    state = lost(1)
    state.on_plan(swap(G2, *born(G1, 0), order(1)), 2.0)
    (run,) = only(state.decide(2.0), RunWorker)
    assert (run.order.rank, run.generation) == (1, G2)
    assert state.members[run.key].alone
    assert alive(state) == {0: G1, 1: G2}
    assert (state.quiesced, state.applied) == (G2, G1)


def test_who_a_swap_does_not_name_is_killed_without_a_word_before_anybody_is_started_in_its_place() -> None:
    state, keys = running(0, 1)
    state.on_plan(swap(G2, *born(G1, 0), order(1)), 2.0)
    assert state.decide(2.0) == [EndTree(keys[1])]
    assert state.quiesced < G2
    state.on_exit(keys[1], -9, 2.1)
    assert state.decide(2.1) == []
    state.on_cleared(keys[1])
    assert begun(state.decide(2.2)) == [1]
    assert state.quiesced == G2


def test_the_generation_that_follows_a_swap_runs_with_who_is_there() -> None:
    state = lost(1)
    orders = [*born(G1, 0), order(1)]
    for stage in (0, 1, 2):
        state.on_plan(swap(G2, *orders, stage=stage), 2.0)
        state.decide(2.0)
    state.on_plan(swap(G2, *orders, stage=1, phase=PlanPhase.RUN), 3.0)
    assert state.decide(3.0) == []
    assert state.applied == G2
    assert [(m.order.rank, m.generation, m.code) for m in state.workers() if m.order] == [(0, G1, None), (1, G2, None)]
    state.on_plan(swap(G2, *orders, stage=1, phase=PlanPhase.RUN), 4.0)
    assert state.decide(4.0) == []


def test_a_swap_says_more_and_more_and_what_said_less_is_out_of_date() -> None:
    state = lost(1)
    orders = [*born(G1, 0), order(1)]
    assert state.on_plan(swap(G2, *orders, stage=1), 2.0)
    assert not state.on_plan(swap(G2, *orders, stage=0), 2.0)
    assert state.on_plan(swap(G2, *orders, stage=2), 2.0)
    assert not state.on_plan(swap(G2, *orders, stage=1), 2.0)
    assert state.on_plan(swap(G2, *orders, stage=1, phase=PlanPhase.RUN), 2.0)
    assert not state.on_plan(swap(G2, *orders, stage=2), 2.0)
    assert state.on_plan(swap(G3, *born(G1, 0), *born(G2, 1)), 2.0)
    assert not state.on_plan(swap(G2, *orders, stage=1, phase=PlanPhase.RUN), 2.0)


def test_a_doubled_swap_starts_nobody_twice_and_ends_nobody_of_its_own_generation() -> None:
    state = lost(1)
    state.on_plan(swap(G2, *born(G1, 0), order(1)), 2.0)
    assert begun(state.decide(2.0)) == [1]
    state.on_plan(swap(G2, *born(G1, 0), order(1)), 2.5)
    assert state.decide(2.5) == []
    state.on_plan(swap(G2, *born(G1, 0)), 3.0)  # from before there was a node for rank 1
    assert state.decide(3.0) == []
    assert alive(state) == {0: G1, 1: G2}


def test_a_survivor_that_dies_in_a_swap_is_reported_until_another_generation_runs() -> None:
    state = lost(1)
    state.on_plan(swap(G2, *born(G1, 0), order(1)), 2.0)
    state.on_started(only(state.decide(2.0), RunWorker)[0].key, next(PIDS))
    survivor = next(m for m in state.workers() if m.generation == G1 and m.alive)
    end(state, survivor.key, -11, 2.5)
    assert state.decide(2.5) == [], "it is the supervisor that says what comes of it"
    state.on_plan(swap(G3, order(0), *born(G2, 1)), 3.0)
    (run,) = only(state.decide(3.0), RunWorker)
    assert (run.order.rank, run.generation, state.quiesced) == (0, G3, G3)
    assert {m.code for m in state.workers() if not m.alive} == {-9, -11}
    state.on_plan(swap(G3, order(0), *born(G2, 1), phase=PlanPhase.RUN), 4.0)
    state.decide(4.0)
    assert alive(state) == {0: G3, 1: G2} and len(state.workers()) == 2


def test_a_new_worker_that_dies_in_a_swap_is_started_again_by_the_next_one_only() -> None:
    state = lost(1)
    state.on_plan(swap(G2, *born(G1, 0), order(1)), 2.0)
    (first,) = only(state.decide(2.0), RunWorker)
    state.on_started(first.key, next(PIDS))
    end(state, first.key, 1, 2.5)
    state.on_plan(swap(G2, *born(G1, 0), order(1)), 2.6)
    assert state.decide(2.6) == []
    state.on_plan(swap(G3, *born(G1, 0), order(1)), 3.0)
    assert begun(state.decide(3.0)) == [1]
    assert alive(state) == {0: G1, 1: G3}


def test_a_swap_that_follows_a_swap_ends_what_the_first_has_started_unless_it_names_it() -> None:
    state = lost(1, of=3)
    state.on_plan(swap(G2, *born(G1, 0, 2), order(1)), 2.0)
    (run,) = only(state.decide(2.0), RunWorker)
    state.on_started(run.key, next(PIDS))
    state.on_plan(swap(G3, *born(G1, 0), order(2), order(1)), 3.0)
    ended = {action.key for action in only(state.decide(3.0), EndTree)}
    assert {(m.order.rank, m.generation) for m in state.workers() if m.key in ended and m.order} == {(1, G2), (2, G1)}


def test_a_generation_of_new_processes_after_a_swap_ends_all_with_a_grace() -> None:
    state = lost(1)
    state.on_plan(swap(G2, *born(G1, 0), order(1)), 2.0)
    state.on_started(only(state.decide(2.0), RunWorker)[0].key, next(PIDS))
    state.on_plan(plan(G3, PlanPhase.QUIESCE, grace=5.0), 3.0)
    told = only(state.decide(3.0), PassSignal)
    assert {state.members[action.key].generation for action in told} == {G1, G2}
    assert state.next_deadline() == 8.0
    for member in state.workers():
        if member.alive:
            end(state, member.key, -15, 4.0)
    assert state.decide(4.0) == [Sweep()]
    state.on_swept()
    state.decide(4.0)
    assert state.quiesced == G3


def test_a_stop_in_a_swap_reaches_survivors_and_new_ones() -> None:
    state = lost(1)
    state.on_plan(swap(G2, *born(G1, 0), order(1)), 2.0)
    state.on_started(only(state.decide(2.0), RunWorker)[0].key, next(PIDS))
    state.on_plan(plan(G2, PlanPhase.STOP, grace=5.0), 3.0)
    assert len(only(state.decide(3.0), PassSignal)) == 2
    state.on_plan(swap(G2, *born(G1, 0), order(1), order(2), stage=2), 3.1)
    assert begun(state.decide(3.1)) == []


def test_a_node_that_a_swap_gives_its_first_ranks_starts_them_at_once() -> None:
    state = forking(2)
    state.on_plan(plan(G1, PlanPhase.PARK), 0.0)
    park(state, 0.0)
    state.on_plan(swap(G2, order(2), order(3)), 1.0)
    assert begun(state.decide(1.0)) == [2, 3]


def test_a_plan_to_run_that_names_survivors_does_the_same_when_the_swap_got_lost() -> None:
    state, keys = running(0, 1)
    state.on_plan(swap(G2, *born(G1, 0), phase=PlanPhase.RUN), 2.0)
    assert state.decide(2.0) == [EndTree(keys[1])]
    state.on_exit(keys[1], -9, 2.1)
    state.on_cleared(keys[1])
    state.decide(2.1)
    assert (state.quiesced, state.applied, alive(state)) == (G2, G2, {0: G1})


def test_survivors_keep_the_store_that_they_are_connected_to() -> None:
    state = forking(2)
    state.on_plan(plan(G1, PlanPhase.RUN, order(0), host_store=True), 0.0)
    (host,) = only(park(state, 0.0), HostStore)
    state.on_store_up(host.key, StoreReport(G1, "a", 1))
    for number, phase in enumerate((PlanPhase.SWAP, PlanPhase.RUN)):
        with_store = msgspec.structs.replace(swap(G2, *born(G1, 0), stage=1, phase=phase), host_store=True)
        state.on_plan(with_store, 1.0 + number)
        assert park(state, 1.0 + number) == []
    assert (state.store, state.applied) == (StoreReport(G1, "a", 1), G2)
    state.on_plan(plan(G3, PlanPhase.QUIESCE, host_store=True), 4.0)
    (newer,) = only(park(state, 4.0), HostStore)
    assert newer.generation == G3


def test_strays_are_not_looked_for_while_survivors_live_that_could_own_them() -> None:
    state = lost(1)
    state.on_plan(swap(G2, *born(G1, 0)), 2.0)
    assert only(state.decide(2.0), Sweep) == []
    survivor = next(m for m in state.workers() if m.alive)
    end(state, survivor.key, -9, 3.0)
    assert Sweep() in state.decide(3.0)


PHASES = st.sampled_from(list(PlanPhase))
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("plan"), st.sampled_from([G1, G2, G3]), PHASES, st.integers(0, 3)),
        st.tuples(st.just("exit"), st.integers(0, 9), st.sampled_from([0, 1, -9])),
        st.tuples(st.just("clear"), st.integers(0, 9)),
        st.tuples(st.just("park"), st.integers(0, 9)),
        st.tuples(st.just("fork server"), st.booleans()),
        st.tuples(st.just("swept")),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(st.booleans(), EVENTS)
def test_whatever_happens_generations_never_mix_and_no_rank_runs_twice(
    forks: bool, events: list[tuple[object, ...]]
) -> None:
    state = NodeState(FORK if forks else SPAWN)
    state.on_prepare(Prepare({}, 1))
    begun: list[tuple[Generation, int]] = []
    for now, event in enumerate(events):
        apply(state, event, float(now))
        for action in state.decide(float(now)):
            if isinstance(action, RunWorker):
                begun.append((action.generation, action.order.rank))
                assert state.plan is not None and action.generation == state.plan.generation
                if action.afresh:
                    state.on_started(action.key, next(PIDS))
        living = {member.generation for member in state.workers() if not member.cleared}
        newest = [member for member in state.workers() if member.generation == max(living, default=G1)]
        assert len(living) <= 1 or not any(member.alive for member in newest)
        assert len(begun) == len(set(begun))
        assert state.applied <= state.quiesced


def apply(state: NodeState, event: tuple[object, ...], now: float) -> None:
    match event:
        case ("plan", Generation() as generation, PlanPhase() as phase, int() as count):
            state.on_plan(plan(generation, phase, *map(order, range(count)), host_store=count == 3), now)
        case ("exit", int() as index, int() as code):
            known = [m for m in state.members.values() if m.alive and m.pid]
            if index < len(known):
                state.on_exit(known[index].key, code, now)
        case ("clear", int() as index):
            known = [m for m in state.members.values() if m.killed and not m.cleared and not m.alive]
            if index < len(known):
                state.on_cleared(known[index].key)
        case ("park", int() as index):
            known = [m for m in state.members.values() if m.alive and not m.pid]
            if index < len(known):
                state.on_parked(known[index].key, next(PIDS))
        case ("fork server", bool() as up):
            if up:
                state.on_fork_server_up("")
            else:
                state.on_fork_server_gone("exit code 1", now)
        case ("swept",):
            state.on_swept()


SWAPS = st.lists(
    st.one_of(
        st.tuples(st.just("fault"), st.sets(st.integers(0, 2))),
        st.tuples(st.just("further")),
        st.tuples(st.just("again"), st.integers(0, 9)),
        st.tuples(st.just("exit"), st.integers(0, 9), st.just(-9)),
        st.tuples(st.just("clear"), st.integers(0, 9)),
        st.tuples(st.just("swept")),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(SWAPS)
def test_whatever_happens_in_swaps_no_rank_has_two_processes_and_no_survivor_is_ended(
    events: list[tuple[object, ...]],
) -> None:
    state, _ = running(0, 1, 2)
    assert state.plan is not None
    issued = [state.plan]
    begun: list[tuple[Generation, int]] = []
    for moment, event in enumerate(events):
        now = float(moment)
        issue(state, issued, event, now)
        apply(state, event, now)
        newest = issued[-1]
        assert state.plan == newest
        named = {(o.rank, newest.generation if o.born == NO_GENERATION else o.born) for o in newest.ranks}
        for action in state.decide(now):
            if isinstance(action, RunWorker):
                begun.append((action.generation, action.order.rank))
                state.on_started(action.key, next(PIDS))
            elif isinstance(action, EndTree):
                ended = state.members[action.key]
                assert not ended.alive or who(ended) not in named, "a survivor is ended"
        living = [who(member) for member in state.workers() if member.alive]
        assert len({rank for rank, _ in living}) == len(living), "no rank has two processes"
        assert len(begun) == len(set(begun))
        assert state.applied <= state.quiesced
        assert state.quiesced < newest.generation or named.issuperset(living)


def who(member: Member) -> tuple[int, Generation]:
    assert member.order is not None
    return member.order.rank, member.generation


def issue(state: NodeState, issued: list[NodePlan], event: tuple[object, ...], now: float) -> None:
    """As a supervisor does that knows who lives: the next generation names them, without those that it has given up."""
    newest = issued[-1]
    match event:
        case ("fault", set() as given_up):
            living = [who(member) for member in state.workers() if member.alive]
            kept = [o for rank, g in living if rank not in given_up for o in born(g, rank)]
            new = sorted({0, 1, 2} - {o.rank for o in kept})
            issued.append(swap(newest.generation.following(), *kept, *map(order, new)))
            state.on_plan(issued[-1], now)
        case ("further",) if newest.phase is PlanPhase.SWAP:
            told = newest.resumption is not None and newest.resumption.stamp is not None
            phase = PlanPhase.RUN if told else PlanPhase.SWAP
            issued.append(swap(newest.generation, *newest.ranks, stage=1, phase=phase))
            state.on_plan(issued[-1], now)
        case ("again", int() as index):
            state.on_plan(issued[max(0, len(issued) - 1 - index)], now)
