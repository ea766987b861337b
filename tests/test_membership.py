"""What membership decides, one behaviour a test; random orders of events are in test_membership_programs.py."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from fake_nodes import Enrolment, FakeJob, Weather, node_report, rank_report

from phoenix_launch.job import events as job_events
from phoenix_launch.job import membership, wishes
from phoenix_launch.job.events import Action, Event
from phoenix_launch.job.state import NodeState, Outcome, Phase, Rules, State, how
from phoenix_launch.job.wishes import Wish
from phoenix_launch.messages import ExitReport, PlanPhase, RankReport, StoreReport
from phoenix_launch.wire import NO_GENERATION, Generation

PAIR = Rules(seats_min=2, seats_max=2, join_timeout=60.0)
G0, G1, G2, G3 = (Generation(1, n) for n in range(4))


class Script:
    """A job told event by event. Nodes are node0, node1 ...; their incarnations "node0.0", after a return "node0.1"."""

    def __init__(self, rules: Rules = PAIR) -> None:
        self.now = 1000.0
        self.state: State = membership.start(rules, 1, self.now)
        self.actions: list[Action] = []
        self.seq = 0
        self.lives: dict[int, int] = {}

    def tell(self, event: Event) -> tuple[Action, ...]:
        self.state, actions = membership.step(self.state, event, self.now)
        self.actions.extend(actions)
        return actions

    def incarnation(self, index: int) -> str:
        return f"node{index}.{self.lives[index]}"

    def admit(self, index: int, slots: int = 1, **more: Any) -> None:
        self.lives[index] = self.lives.get(index, -1) + 1
        more.setdefault("domain", f"rack{index}")
        incarnation = self.incarnation(index)
        self.tell(job_events.Admitted(index=index, name=f"node{index}", slots=slots, incarnation=incarnation, **more))

    def report(self, index: int, **what: Any) -> tuple[Action, ...]:
        """What this node says; unless told otherwise it has done all that it was asked for."""
        self.seq += 1
        generation = self.state.generation
        what.setdefault("quiesced", generation)
        what.setdefault("applied", generation)
        return self.tell(job_events.Reported(index, node_report(self.incarnation(index), self.seq, **what)))

    def runs(self, index: int, **exits: int) -> tuple[Action, ...]:
        """Its ranks of this generation live, but for those that ended: `rank1=3` means that rank 1 exited with 3."""
        return self.report(index, ranks=self.ranks(index, **exits))

    def ranks(self, index: int, age: float = 0.0, **exits: int) -> list[RankReport]:
        here = [place.rank for place in self.state.places if place.node == index]
        ended = {int(name.removeprefix("rank")): ExitReport(code, age) for name, code in exits.items()}
        assert set(ended) <= set(here), "these ranks are elsewhere"
        return [rank_report(rank, self.state.generation, ended.get(rank)) for rank in here]

    def store_up(self) -> None:
        store = StoreReport(self.state.generation, "here", 4000)
        self.report(self.state.store_node, store=store)

    def quiesced(self) -> None:
        """Every node has ended what is older, and the store is there: the generation runs."""
        for index in [i for i, member in self.state.members.items() if member.alive]:
            self.report(index)
        self.store_up()

    def pass_time(self, seconds: float, alive: tuple[int, ...] = (), **exits: int) -> None:
        """In steps of half a second; the nodes in `alive` go on reporting."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            for index in alive:
                self.runs(index, **exits)
            self.tell(job_events.Ticked())

    def lose(self, index: int) -> tuple[Action, ...]:
        return self.tell(job_events.AgentEnded(index, self.incarnation(index), "its agent ended"))

    def wish(self, index: int) -> Wish:
        return wishes.wish_for(self.state, index)

    def ranks_of(self, index: int) -> list[int]:
        return [place.rank for place in self.wish(index).places]

    def told(self, kind: type[Any]) -> list[Any]:
        return [action for action in self.actions if isinstance(action, kind)]

    def phase(self) -> Phase:
        return self.state.phase

    def node_state(self, index: int) -> NodeState:
        return self.state.members[index].state

    @property
    def outcome(self) -> Outcome:
        assert self.state.outcome is not None
        return self.state.outcome


def running(rules: Rules = PAIR, spares: int = 0, slots: int = 1) -> Script:
    """A job whose first generation runs on nodes 0, 1 ...; spare nodes come after them."""
    script = Script(rules)
    for index in range(rules.seats_max + spares):
        script.admit(index, slots, spare=index >= rules.seats_max)
    for index in range(rules.seats_max + spares):
        script.report(index, quiesced=G0, applied=G0)
    script.quiesced()
    assert (script.phase(), script.state.generation) == (Phase.RUNNING, G1)
    for index in range(rules.seats_max + spares):
        script.runs(index)
    return script


# --- the start -------------------------------------------------------------------------------------------------------


def test_the_job_starts_when_all_training_nodes_are_ready() -> None:
    script = Script()
    script.admit(0)
    script.admit(1)
    script.report(0)
    script.report(1, prepared=False)
    assert script.phase() is Phase.STARTING
    script.report(1)
    assert script.phase() is Phase.QUIESCING


def test_a_spare_node_does_not_start_a_job_in_place_of_a_training_node_that_is_still_to_come() -> None:
    script = Script()
    script.admit(0)
    script.admit(2, spare=True)
    script.report(0)
    script.report(2)
    assert script.phase() is Phase.STARTING


def test_a_spare_node_starts_in_place_of_a_training_node_that_was_lost_before_the_start() -> None:
    script = Script()
    for index in range(3):
        script.admit(index, spare=index == 2)
    script.report(0)
    script.report(2)
    script.lose(1)
    assert [seat.node for seat in script.state.lineup] == [0, 2]


def test_workers_run_once_the_store_is_up() -> None:
    script = Script()
    for index in (0, 1):
        script.admit(index)
    for index in (0, 1, 0, 1):
        script.report(index)
    assert script.phase() is Phase.QUIESCING
    assert script.wish(0).host_store and not script.wish(1).host_store
    script.store_up()
    assert script.phase() is Phase.RUNNING
    assert script.told(job_events.GenerationRuns) == [job_events.GenerationRuns(G1)]
    assert script.ranks_of(0) == [0] and script.ranks_of(1) == [1]


def test_the_join_timeout_names_the_nodes_that_came() -> None:
    script = Script()
    script.admit(0)
    script.pass_time(61.0, alive=(0,))
    assert script.outcome.exit_code == 1
    assert script.outcome.text == "1 of 2 nodes came within 60 s (here: node0)"
    assert "--rdzv-conf" in script.outcome.hint


def test_an_elastic_job_starts_after_the_join_timeout_with_the_nodes_that_came() -> None:
    script = Script(replace(PAIR, seats_max=4))
    for index in range(3):
        script.admit(index)
    script.pass_time(59.0, alive=(0, 1, 2))
    assert script.phase() is Phase.STARTING
    script.pass_time(2.0, alive=(0, 1, 2))
    assert [seat.node for seat in script.state.lineup] == [0, 1, 2]


def test_a_node_that_comes_late_is_a_spare_and_restarts_nobody() -> None:
    script = running()
    script.admit(2)
    script.report(2)
    assert script.state.generation == G1
    assert script.state.members[2].spare
    assert script.wish(2).phase is PlanPhase.PARK


def test_a_fixed_node_rank_fixes_the_ranks() -> None:
    script = Script()
    script.admit(0, group_rank=1)
    script.admit(1, group_rank=0)
    for index in (0, 1):
        script.report(index)
    assert [(place.rank, place.node) for place in script.state.places] == [(0, 1), (1, 0)]


def test_an_explicit_master_port_holds_for_the_first_generation_only() -> None:
    script = Script(replace(PAIR, master_port=29500, max_restarts=1))
    for index in (0, 1):
        script.admit(index)
    for index in (0, 1):
        script.report(index)
    assert script.wish(0).store_port == 29500
    script.quiesced()
    script.pass_time(0.5, alive=(0, 1))
    script.runs(1, rank1=1)
    assert script.state.generation == G2
    assert script.wish(0).host_store and script.wish(0).store_port == 0


def test_last_words_that_are_read_after_the_end_was_seen_are_taken_too() -> None:
    script = running(Rules(seats_min=1, seats_max=1))
    script.report(0, ranks=[rank_report(0, G1, ExitReport(1, 0.0))])
    assert script.outcome.cause is not None and script.outcome.cause.report.tail == ""
    seen_at = script.outcome.cause.at
    script.now += 0.5
    script.report(0, ranks=[rank_report(0, G1, ExitReport(1, 0.5, tail="the reason"))])
    assert (script.outcome.cause.report.tail, script.outcome.cause.at) == ("the reason", seen_at)


def test_an_explicit_master_port_that_is_in_use_ends_the_job_with_its_reason() -> None:
    script = Script(replace(PAIR, master_port=29500))
    for index in (0, 1):
        script.admit(index)
    for index in (0, 1):
        script.report(index)
    script.report(0, store=StoreReport(G1, "", 0, "port 29500 is in use"))
    assert script.outcome.exit_code == 1
    assert "port 29500 is in use" in script.outcome.text
    assert "--master-port" in script.outcome.hint


def test_another_node_hosts_the_store_when_one_cannot() -> None:
    script = Script()
    for index in (0, 1, 2):
        script.admit(index, spare=index == 2)
    for index in (0, 1, 2):
        script.report(index)
    script.report(0, store=StoreReport(G1, "", 0, "no sockets left"))
    assert script.node_state(0) is NodeState.LOST
    assert script.state.generation == G2
    assert script.state.store_node == 2


def test_a_node_that_never_starts_its_workers_is_lost() -> None:
    script = running(Rules(seats_min=2, seats_max=2, start_timeout=10.0), spares=1)
    seated = {seat.node for seat in script.state.lineup}
    script.runs(0)
    for _ in range(21):
        script.pass_time(0.5, alive=(0, 2))
        script.report(1, applied=NO_GENERATION)
    assert script.node_state(1) is NodeState.LOST
    assert {seat.node for seat in script.state.lineup} == (seated - {1}) | {2}


# --- the loss of a node ----------------------------------------------------------------------------------------------


def test_a_spare_node_takes_the_ranks_of_the_lost_node() -> None:
    script = running(spares=1, slots=2)
    script.lose(1)
    assert script.phase() is Phase.QUIESCING and script.state.generation == G2
    assert script.wish(0).phase is PlanPhase.QUIESCE and script.wish(0).generation == G2
    script.quiesced()
    assert script.ranks_of(0) == [0, 1] and script.ranks_of(2) == [2, 3]


def test_ranks_that_moved_are_reported_and_only_those() -> None:
    script = running(spares=1, slots=2)
    script.lose(1)
    begun = script.told(job_events.GenerationBegun)
    assert begun == [job_events.GenerationBegun(G1, ()), job_events.GenerationBegun(G2, ((2, 1, 2), (3, 1, 2)))]


def test_the_loss_names_the_node_its_ranks_and_the_reason() -> None:
    script = running(spares=1, slots=2)
    script.lose(1)
    [fault] = script.told(job_events.FaultFound)
    assert (fault.kind, fault.node, fault.ranks, fault.detail) == ("node", 1, (2, 3), "its agent ended")


def test_a_lost_node_is_fenced_and_launched_again() -> None:
    script = running(spares=1)
    actions = script.lose(1)
    assert job_events.Fence(1, "node1.0") in actions
    assert job_events.Relaunch(1) in actions
    assert script.wish(1).phase is PlanPhase.LEAVE


def test_the_loss_of_a_node_is_no_restart_and_of_a_spare_node_is_nothing() -> None:
    script = running(spares=2)
    script.lose(3)
    assert script.state.generation == G1
    script.lose(1)
    assert script.state.generation == G2 and script.state.restarts_used == 0


def test_a_node_that_is_silent_for_the_heartbeat_timeout_is_lost() -> None:
    script = running(spares=1)
    script.pass_time(3.0, alive=(0, 2))
    assert script.node_state(1) is NodeState.READY
    script.pass_time(0.5, alive=(0, 2))
    assert script.node_state(1) is NodeState.LOST
    assert script.told(job_events.FaultFound)[0].detail == "not heard of for 3 s"


def test_a_node_that_complains_is_lost_with_its_complaint() -> None:
    script = running(spares=1)
    script.report(1, complaint="the fork server ended 4 times within a minute")
    assert script.told(job_events.FaultFound)[0].detail == "the fork server ended 4 times within a minute"
    assert script.state.generation == G2


def test_the_generation_does_not_run_before_every_older_worker_has_ended() -> None:
    script = running(spares=1)
    old = [rank_report(0, G1)]
    script.lose(1)
    script.report(0, quiesced=G1, applied=G1, ranks=old, store=StoreReport(G2, "here", 1))
    script.report(2)
    assert script.phase() is Phase.QUIESCING
    script.report(0)
    assert script.phase() is Phase.RUNNING


def test_the_generation_waits_for_old_workers_on_nodes_without_a_seat_too() -> None:
    script = running(spares=2)
    script.lose(1)
    script.report(0)
    script.report(2)
    script.report(3, quiesced=G1, ranks=[rank_report(1, G1)])
    script.store_up()
    assert script.phase() is Phase.QUIESCING
    script.report(3)
    assert script.phase() is Phase.RUNNING


def test_a_node_that_does_not_end_its_old_workers_in_time_is_lost() -> None:
    script = running(spares=2)
    script.lose(1)
    rules = script.state.rules
    for _ in range(round((rules.shutdown_timeout + rules.teardown_timeout) * 2) + 1):
        script.now += 0.5
        script.report(2)
        script.report(3)
        script.report(0, quiesced=G1, ranks=[rank_report(0, G1)], store=StoreReport(G2, "here", 1))
    assert script.node_state(0) is NodeState.LOST
    assert script.told(job_events.FaultFound)[-1].detail == "did not end its old workers in time"
    assert [seat.node for seat in script.state.lineup] == [3, 2]


def test_a_further_loss_while_a_generation_quiesces_begins_the_next_one() -> None:
    script = running(spares=2)
    script.lose(1)
    script.lose(2)
    assert script.state.generation == G3
    assert [seat.node for seat in script.state.lineup] == [0, 3]


def test_a_node_that_comes_back_is_a_spare_node() -> None:
    script = running(spares=1)
    script.lose(1)
    script.quiesced()
    script.admit(1)
    script.report(1)
    assert script.state.generation == G2
    assert script.state.members[1].spare and script.state.members[1].incarnation == "node1.1"
    script.lose(2)
    assert [seat.node for seat in script.state.lineup] == [0, 1]


def test_a_node_is_not_launched_again_after_its_last_failure_and_not_taken_back() -> None:
    script = running(replace(PAIR, max_failures_per_host=1), spares=1)
    script.lose(1)
    script.admit(1)
    script.report(1)
    assert script.state.members[1].alive
    assert job_events.Relaunch(1) not in script.lose(1)
    script.admit(1)
    assert not script.state.members[1].alive


def test_replacements_keep_the_spread_over_failure_domains() -> None:
    script = Script()
    for index, domain in enumerate(("a", "b", "a", "b")):
        script.admit(index, domain=domain, spare=index > 1)
    for index in range(4):
        script.report(index)
    script.quiesced()
    script.lose(1)
    assert [seat.node for seat in script.state.lineup] == [0, 3]


# --- suspicion -------------------------------------------------------------------------------------------------------


def test_a_node_whose_channel_closed_stays_when_it_answers() -> None:
    script = running(spares=1)
    script.tell(job_events.ChannelClosed(1))
    assert script.node_state(1) is NodeState.SUSPECT
    script.now += 0.5
    script.runs(1)
    script.pass_time(2.0, alive=(0, 1, 2))
    assert script.node_state(1) is NodeState.READY
    assert script.state.generation == G1


def test_a_node_whose_channel_closed_is_lost_when_it_does_not_answer_the_probe() -> None:
    script = running(spares=1)
    script.tell(job_events.ChannelClosed(1))
    script.pass_time(1.0, alive=(0, 2))
    assert script.state.generation == G1
    script.pass_time(0.5, alive=(0, 2))
    assert script.state.generation == G2
    assert script.told(job_events.FaultFound)[0].detail == "its connection closed and it does not answer"


def test_a_suspect_node_keeps_its_seat_while_another_is_replaced() -> None:
    script = running(spares=2)
    script.tell(job_events.ChannelClosed(0))
    script.lose(1)
    assert [seat.node for seat in script.state.lineup] == [0, 2]


# --- the end of a worker ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1, -9])
def test_a_worker_that_fails_ends_the_job_where_no_restarts_are_allowed(code: int) -> None:
    script = running()
    script.now += 0.5
    script.runs(0)
    script.runs(1, rank1=code)
    script.pass_time(0.5, alive=(0,))
    assert script.phase() is Phase.STOPPING
    assert script.outcome.exit_code == 1
    assert script.outcome.text == f"rank 1 on node1 {how(code)}"
    assert script.outcome.cause is not None and script.outcome.cause.rank == 1
    assert script.wish(0).phase is PlanPhase.STOP and script.wish(0).signal == signal.SIGTERM


@pytest.mark.parametrize(("code", "passed_on"), [(7, 7), (-9, 137)])
def test_the_code_of_the_worker_to_blame_is_passed_on_where_the_user_wants_it(code: int, passed_on: int) -> None:
    script = running(Rules(seats_min=1, seats_max=1, worker_exit_code=True))
    script.runs(0, rank0=code)
    assert script.outcome.exit_code == passed_on


def test_a_worker_that_fails_is_run_again_as_often_as_max_restarts_allows() -> None:
    script = running(replace(PAIR, max_restarts=2))
    for used in (1, 2):
        script.pass_time(0.5, alive=(0, 1))
        script.runs(1, rank1=3)
        assert (script.phase(), script.state.restarts_used) == (Phase.QUIESCING, used)
        assert script.state.attempt == used
        script.quiesced()
        assert script.phase() is Phase.RUNNING
    script.runs(1, rank1=3)
    script.pass_time(0.5, alive=(0,))
    assert script.outcome.exit_code == 1


def test_a_restart_after_a_worker_failed_stays_on_the_same_nodes() -> None:
    script = running(replace(PAIR, max_restarts=1), spares=1)
    script.runs(1, rank1=3)
    assert [seat.node for seat in script.state.lineup] == [0, 1]


def test_losses_of_nodes_never_use_up_restarts() -> None:
    script = running(replace(PAIR, max_failures_per_host=99))
    for _ in range(5):
        script.lose(1)
        script.admit(1)
        script.report(1)
        script.quiesced()
        assert script.phase() is Phase.RUNNING
    assert script.state.restarts_used == 0


def test_a_worker_that_failed_because_its_peer_lost_power_ends_no_job() -> None:
    script = running(spares=1)
    script.now += 0.2
    script.runs(0, rank0=1)  # "connection closed by peer"; nobody knows yet that node 1 is gone
    assert script.phase() is Phase.RUNNING
    script.pass_time(3.5, alive=(0, 2))
    assert script.node_state(1) is NodeState.LOST
    assert (script.state.generation, script.state.restarts_used) == (G2, 0)


def test_a_restart_that_followed_from_the_loss_of_a_node_is_given_back() -> None:
    script = running(replace(PAIR, max_restarts=1), spares=1)
    script.now += 0.2
    script.runs(0, rank0=1)
    assert (script.state.generation, script.state.restarts_used) == (G2, 1)
    script.lose(1)
    assert (script.state.generation, script.state.restarts_used) == (G3, 0)


def test_a_restart_is_not_given_back_when_the_node_was_lost_later() -> None:
    script = running(replace(PAIR, max_restarts=1), spares=1)
    script.runs(0, rank0=1)
    script.now += 0.5
    script.report(1)
    script.lose(1)
    assert script.state.restarts_used == 1


def test_a_failed_worker_is_blamed_once_every_other_node_was_heard_of() -> None:
    script = running()
    script.now += 0.5
    script.runs(0, rank0=1)
    assert script.phase() is Phase.RUNNING
    script.now += 0.3
    script.runs(1)
    assert script.outcome.exit_code == 1


def test_the_root_cause_is_the_earliest_death_by_our_clock_even_if_it_is_reported_later() -> None:
    script = running(replace(PAIR, seats_min=3, seats_max=3))
    script.now += 1.0
    script.report(0, ranks=script.ranks(0, age=0.1, rank0=1))
    script.now += 0.2
    script.runs(2)
    script.runs(1)
    assert script.outcome.cause is not None and script.outcome.cause.rank == 0
    script.report(1, ranks=script.ranks(1, age=0.5, rank1=-11))
    assert script.outcome.cause is not None and script.outcome.cause.rank == 1
    assert script.outcome.text == "rank 1 on node1 was killed by SIGSEGV"


def test_a_worker_that_died_later_is_not_the_root_cause() -> None:
    script = running()
    script.now += 0.5
    script.runs(0)
    script.report(0, ranks=script.ranks(0, age=0.4, rank0=1))
    script.now += 0.2
    script.report(1, ranks=script.ranks(1, age=0.1, rank1=1))
    assert script.outcome.cause is not None and script.outcome.cause.rank == 0


def test_the_end_of_a_worker_of_an_older_generation_is_history() -> None:
    script = running(replace(PAIR, max_restarts=3), spares=1)
    script.lose(1)
    script.quiesced()
    script.report(0, ranks=[rank_report(0, G1, ExitReport(1, 0.0)), rank_report(0, G2)])
    assert (script.state.generation, script.state.restarts_used) == (G2, 0)


def test_the_end_of_a_rank_that_sits_elsewhere_is_not_believed() -> None:
    script = running()
    exits = [rank_report(rank, G1, ExitReport(0, 0.0)) for rank in (0, 1, 99)]
    script.report(0, ranks=exits)
    assert sorted(script.state.ended) == [0]
    assert script.phase() is Phase.RUNNING


# --- the good end ----------------------------------------------------------------------------------------------------


def test_the_job_is_over_when_every_rank_has_ended_well() -> None:
    script = running(spares=1)
    script.runs(0, rank0=0)
    assert script.phase() is Phase.RUNNING
    script.runs(1, rank1=0)
    assert (script.phase(), script.outcome.exit_code) == (Phase.LEAVING, 0)
    assert {script.wish(index).phase for index in range(3)} == {PlanPhase.LEAVE}


def test_the_job_finishes_when_every_agent_said_farewell() -> None:
    script = running()
    script.runs(0, rank0=0)
    script.runs(1, rank1=0)
    script.lose(0)
    assert not script.told(job_events.Finished)
    script.lose(1)
    assert [action.outcome.exit_code for action in script.told(job_events.Finished)] == [0]


def test_the_job_finishes_without_an_agent_that_does_not_leave() -> None:
    script = running()
    script.runs(0, rank0=0)
    script.runs(1, rank1=0)
    script.pass_time(script.state.rules.teardown_timeout + 0.5, alive=(1,), rank1=0)
    assert script.phase() is Phase.FINISHED


def test_agents_are_not_given_up_while_output_is_still_being_shown() -> None:
    script = running()
    script.runs(0, rank0=0)
    script.runs(1, rank1=0)
    for _ in range(100):
        script.now += 0.5
        for index in (0, 1):
            script.report(index)
        script.tell(job_events.OutputHeld())
    assert script.phase() is Phase.LEAVING
    assert all(member.alive for member in script.state.members.values())


def test_after_the_end_nothing_changes() -> None:
    script = running()
    script.tell(job_events.GaveUp(Outcome(exit_code=1, text="no")))
    script.lose(0)
    script.lose(1)
    last = script.state
    assert last.phase is Phase.FINISHED
    script.admit(0)
    script.runs(1)
    script.tell(job_events.StopAsked(15))
    script.pass_time(100.0)
    assert script.state is last


def test_a_node_whose_ranks_all_ended_well_may_go() -> None:
    script = running()
    script.runs(1, rank1=0)
    script.lose(1)
    assert (script.phase(), script.state.generation) == (Phase.RUNNING, G1)
    script.runs(0, rank0=0)
    assert script.outcome.exit_code == 0


def test_a_node_that_went_after_its_ranks_ended_well_is_missed_when_all_have_to_run_again() -> None:
    script = running(replace(PAIR, max_restarts=1), spares=1)
    script.runs(1, rank1=0)
    script.lose(1)
    script.runs(0, rank0=1)
    assert script.state.generation == G2
    assert [seat.node for seat in script.state.lineup] == [0, 2]


# --- waiting for a node ----------------------------------------------------------------------------------------------


def test_without_a_spare_node_the_job_waits_and_its_old_workers_end() -> None:
    script = running()
    script.lose(1)
    assert script.phase() is Phase.WAITING
    assert script.told(job_events.WaitingForNode)[0].text == "no spare node for node1: waiting up to 60 s"
    assert (script.wish(0).phase, script.wish(0).generation) == (PlanPhase.QUIESCE, G2)


def test_a_node_that_comes_while_the_job_waits_gets_the_seat() -> None:
    script = running()
    script.lose(1)
    script.pass_time(30.0, alive=(0,))
    script.admit(7)
    assert script.phase() is Phase.WAITING
    script.report(7)
    assert (script.phase(), script.state.generation) == (Phase.QUIESCING, G2)
    assert not wishes.fulfilled(script.state, 0)  # the store of the generation that waited is still to come
    script.quiesced()
    assert script.ranks_of(7) == [1]
    assert script.state.attempt == 1


def test_waiting_in_vain_ends_in_93_with_the_names_of_the_lost_nodes() -> None:
    script = running(replace(PAIR, seats_min=3, seats_max=3))
    script.lose(1)
    script.lose(2)
    script.pass_time(59.0, alive=(0,))
    assert script.phase() is Phase.WAITING
    script.pass_time(2.0, alive=(0,))
    assert script.outcome.exit_code == 93
    assert script.outcome.text == "node1, node2 lost and no spare node came within 60 s"
    assert "--spares" in script.outcome.hint


def test_waiting_names_the_node_that_had_ended_well_before_too() -> None:
    script = running()
    script.runs(1, rank1=0)
    script.lose(1)
    script.lose(0)
    assert "node0, node1" in script.told(job_events.WaitingForNode)[0].text


def test_an_elastic_job_shrinks_instead_of_waiting() -> None:
    script = running(replace(PAIR, seats_max=3), slots=2)
    script.lose(1)
    assert script.phase() is Phase.QUIESCING
    script.quiesced()
    assert script.ranks_of(0) == [0, 1] and script.ranks_of(2) == [2, 3]


def test_an_elastic_job_below_its_minimum_goes_on_as_soon_as_it_is_reached_again() -> None:
    script = running(replace(PAIR, seats_max=4))
    for index in (1, 2, 3):
        script.lose(index)
    assert script.phase() is Phase.WAITING
    script.admit(2)
    script.report(2)
    assert script.phase() is Phase.QUIESCING
    assert [seat.node for seat in script.state.lineup] == [0, 2]


# --- stopping --------------------------------------------------------------------------------------------------------


def test_a_stop_request_passes_its_signal_on_and_waits() -> None:
    script = running()
    script.tell(job_events.StopAsked(signal.SIGINT))
    wish = script.wish(0)
    assert (wish.phase, wish.signal, wish.grace) == (PlanPhase.STOP, signal.SIGINT, 30.0)
    script.pass_time(29.0, alive=(0, 1))
    assert script.phase() is Phase.STOPPING
    assert script.outcome.exit_code == 130


def test_a_stopped_job_is_over_when_no_worker_lives() -> None:
    script = running()
    script.tell(job_events.StopAsked(signal.SIGTERM))
    script.runs(0, rank0=-15)
    assert script.phase() is Phase.STOPPING
    script.runs(1, rank1=0)
    assert (script.phase(), script.outcome.exit_code) == (Phase.LEAVING, 143)


def test_a_stop_waits_for_word_of_workers_that_were_to_be_started() -> None:
    """What they write may reach the screen, and the user's Ctrl-C the supervisor, before their node's report does."""
    script = running()
    script.state = replace(
        script.state,
        holders={rank: replace(holder, seen=False) for rank, holder in script.state.holders.items()},
        members={index: replace(member, live=0) for index, member in script.state.members.items()},
    )
    script.tell(job_events.StopAsked(signal.SIGINT))
    assert script.phase() is Phase.STOPPING
    script.runs(0)
    script.runs(1)
    script.pass_time(5.0, alive=(0, 1))
    assert script.phase() is Phase.STOPPING, "they live"


def test_a_stop_does_not_wait_for_ever() -> None:
    script = running()
    script.tell(job_events.StopAsked(signal.SIGTERM))
    script.pass_time(30.0 + script.state.rules.teardown_timeout + 0.5, alive=(0, 1))
    assert script.phase() is Phase.LEAVING


def test_a_second_stop_request_leaves_three_seconds_and_a_third_one_none() -> None:
    script = running()
    script.tell(job_events.StopAsked(signal.SIGINT))
    script.pass_time(10.0, alive=(0, 1))
    script.tell(job_events.StopAsked(signal.SIGINT))
    assert script.wish(0).grace == 3.0
    script.pass_time(1.0, alive=(0, 1))
    script.tell(job_events.StopAsked(signal.SIGINT))
    assert script.wish(0).grace == 0.0
    script.pass_time(script.state.rules.teardown_timeout + 0.5, alive=(0, 1))
    assert script.phase() is Phase.LEAVING


def test_a_further_stop_request_never_makes_the_wait_longer() -> None:
    script = running()
    script.tell(job_events.StopAsked(signal.SIGINT))
    script.pass_time(29.0, alive=(0, 1))
    script.tell(job_events.StopAsked(signal.SIGINT))
    assert script.wish(0).grace == 1.0


def test_a_further_stop_request_keeps_the_signal_and_exit_code_of_the_first() -> None:
    script = running()
    script.tell(job_events.StopAsked(signal.SIGINT))
    script.tell(job_events.StopAsked(signal.SIGTERM))
    assert (script.outcome.exit_code, script.wish(0).signal) == (130, signal.SIGINT)


def test_a_stop_before_the_start_needs_no_grace() -> None:
    script = Script()
    script.admit(0)
    script.tell(job_events.StopAsked(signal.SIGTERM))
    assert (script.phase(), script.outcome.exit_code) == (Phase.LEAVING, 143)


def test_nothing_is_replaced_or_launched_while_the_job_stops() -> None:
    script = running(replace(PAIR, max_restarts=3), spares=1)
    script.tell(job_events.StopAsked(signal.SIGTERM))
    script.actions.clear()
    script.lose(1)
    script.runs(0, rank0=1)
    assert script.state.generation == G1 and script.outcome.exit_code == 143
    assert {type(action) for action in script.actions} == {job_events.Fence}


# --- messages --------------------------------------------------------------------------------------------------------


def test_a_report_that_comes_twice_or_late_changes_nothing() -> None:
    script = running(replace(PAIR, max_restarts=3))
    late = node_report("node1.0", 1, ranks=[rank_report(1, G1, ExitReport(1, 0.0))])
    before = script.state
    script.tell(job_events.Reported(1, late))
    assert script.state == before
    script.pass_time(0.5, alive=(0, 1))
    twice = node_report("node1.0", 999, quiesced=G1, applied=G1, ranks=[rank_report(1, G1, ExitReport(1, 0.0))])
    script.tell(job_events.Reported(1, twice))
    after = script.state
    assert after.restarts_used == 1
    script.tell(job_events.Reported(1, twice))
    assert script.state == after


@pytest.mark.parametrize(
    "event",
    [
        job_events.Reported(9, node_report("node9.0", 1)),
        job_events.Reported(1, node_report("node1.7", 10**6)),
        job_events.AgentEnded(9, "node9.0"),
        job_events.AgentEnded(1, "node1.7"),
        job_events.ChannelClosed(9),
        job_events.Admitted(index=1, name="node1", domain="", slots=1, incarnation="node1.7"),
    ],
)
def test_what_is_said_by_or_of_a_stranger_changes_nothing(event: Event) -> None:
    script = running()
    before = script.state
    assert script.tell(event) == ()
    assert script.state == before


def test_a_fenced_node_is_not_heard_any_more() -> None:
    script = running(spares=1)
    script.lose(1)
    before = script.state
    script.tell(job_events.Reported(1, node_report("node1.0", 10**6)))
    assert script.state == before


def test_a_wish_counts_as_fulfilled_when_a_report_shows_it() -> None:
    script = running(spares=1)
    assert all(wishes.fulfilled(script.state, index) for index in range(3))
    script.lose(1)
    assert not wishes.fulfilled(script.state, 0)
    script.report(0)
    assert not wishes.fulfilled(script.state, 0)  # it hosts the store, which is not up yet
    script.report(0, store=StoreReport(G2, "here", 1))
    assert wishes.fulfilled(script.state, 0)
    script.report(2, applied=G1)
    script.report(0, applied=G1)
    assert script.phase() is Phase.RUNNING
    assert not wishes.fulfilled(script.state, 2)


# --- with nodes that act ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seen", [True, False])
def test_a_job_that_loses_a_node_ends_well_on_its_spare(seen: bool) -> None:
    job = FakeJob(PAIR, [Enrolment(0, 2), Enrolment(1, 2), Enrolment(2, 2, spare=True)], seed=7)
    for index in range(3):
        job.join(index)
    job.pass_time(4.0)
    assert job.state.phase is Phase.RUNNING
    job.power_off(1, seen)
    outcome = job.run_to_the_end(120.0)
    assert outcome is not None and outcome.exit_code == 0
    assert [seat.node for seat in job.state.lineup] == [0, 2]
    assert job.state.restarts_used == 0
    assert not job.living_nodes()


def test_a_job_ends_well_over_a_network_that_loses_a_third_of_all_messages() -> None:
    rules = replace(PAIR, heartbeat_timeout=10.0)
    job = FakeJob(rules, [Enrolment(0), Enrolment(1)], seed=3)
    job.weather = Weather(lost=0.3, doubled=0.3, late=0.3)
    for index in range(2):
        job.join(index)
    outcome = job.run_to_the_end(240.0)
    assert outcome is not None and outcome.exit_code == 0
    assert job.state.generation == G1
