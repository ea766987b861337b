"""What an agent decides: the same plan twice changes nothing, an old one less than nothing, and nothing is left out."""

from __future__ import annotations

import itertools
from typing import TypeVar

from fake_supervisor import G1, G2, G3, command, order, plan
from hypothesis import given, settings
from hypothesis import strategies as st

from phoenix_launch.messages import (
    Generation,
    PlanPhase,
    Prepare,
    ProcessState,
    RunMode,
    StartMethod,
    StoreReport,
)
from phoenix_launch.node.actions import (
    Action,
    EndTree,
    HostStore,
    Leave,
    ParkProcess,
    PassSignal,
    RunWorker,
    StartForkServer,
    StartStoreHost,
    Sweep,
)
from phoenix_launch.node.state import FAILURE_WINDOW, NodeState

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
