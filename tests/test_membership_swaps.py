"""What membership decides for a job whose workers know the runtime, one behaviour a test; every order of events is explored in
test_model_swapping.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fake_nodes import node_report
from test_membership import PAIR, Script

from phoenix_launch.copies import KeptSlot, Slot, SlotPeer, Source, SourceKind, Stamp, StartupCopy
from phoenix_launch.errors import EXIT_DO_NOT_REQUEUE, EXIT_OK, EXIT_WORKER_FAILED
from phoenix_launch.job import events as job_events
from phoenix_launch.job import membership, wishes
from phoenix_launch.job.environment import JobIdentity
from phoenix_launch.job.plans import node_plan
from phoenix_launch.job.state import Phase, Rules, Rung
from phoenix_launch.messages import (
    ExitReport,
    NodePlan,
    NodeReport,
    PlanPhase,
    ProcessState,
    RankReport,
    Resumption,
    RuntimeReport,
    decode_envelope,
)
from phoenix_launch.wire import NO_GENERATION, PROTOCOL, Envelope, Generation, encode

G1, G2, G3 = (Generation(1, n) for n in (1, 2, 3))
IDENTITY = JobIdentity(job="j", run_id="r", role="default", max_restarts=0, signals=())


class Swaps(Script):
    """Two nodes and spare nodes; each rank holds `ownR`, and version 5 is in the slots of both nodes."""

    def __init__(self, rules: Rules = PAIR, *, spares: int = 0, slots: int = 1, step: int = 5) -> None:
        super().__init__(rules)
        self.step = step
        for index in range(rules.seats_max + spares):
            self.admit(index, slots, spare=index >= rules.seats_max)
        for index in range(rules.seats_max + spares):
            self.report(index, quiesced=NO_GENERATION, applied=NO_GENERATION)
        self.quiesced()
        assert self.phase() is Phase.RUNNING
        for index in range(rules.seats_max + spares):
            self.train(index)

    def say(
        self,
        index: int,
        *ranks: RankReport,
        kept: tuple[int, ...] = (5,),
        offered: bool = True,
        server: SlotPeer | None = None,
    ) -> None:
        self.seq += 1
        generation = self.state.generation
        report = node_report(self.incarnation(index), self.seq, quiesced=generation, applied=generation, ranks=ranks)
        world = len(self.state.places)
        slots = tuple(KeptSlot(f"own{r}", Slot(Stamp(G1, v))) for r in range(world) for v in kept)
        fields: dict[str, Any] = {name: getattr(report, name) for name in NodeReport.__struct_fields__}
        fields |= {"offered": generation if offered else NO_GENERATION, "kept": slots, "slots": server}
        self.tell(job_events.Reported(index, NodeReport(**fields)))

    def rank(
        self,
        rank: int,
        code: int | None = None,
        error: str = "",
        step: int | None = None,
        inside: int = -1,
        **said: Any,
    ) -> RankReport:
        holder = self.state.holders[rank]
        said.setdefault("complete", 5)
        runtime = RuntimeReport(holds=(f"own{rank}",), private=f"own{rank}", **said)
        ended = None if code is None else ExitReport(code, 0.0, tail=error)
        at = self.step if step is None else step
        return RankReport(rank, holder.born, 1000 + rank, ProcessState.RUNNING, at, ended, runtime, inside)

    def here(self, index: int) -> list[int]:
        return [place.rank for place in self.state.places if place.node == index]

    def train(self, index: int, **exits: Any) -> None:
        ranks = (self.rank(r, exits.get(f"rank{r}"), exits.get("error", "")) for r in self.here(index))
        self.say(index, *ranks)

    def leave(self, index: int, version: int = 5) -> None:
        """Its survivors have left their step for the current generation, its new processes have come up."""
        generation = self.state.generation
        said = []
        for rank in self.here(index):
            old = self.state.holders[rank].born < generation
            live = Stamp(G1, version) if old else None
            said.append(self.rank(rank, joined=generation, live=live, address=f"at{rank}"))
        self.say(index, *said, kept=() if index > 1 else (5,))

    def hears(self, index: int, **said: Any) -> None:
        """Its survivors have heard of the current generation, and are out of their collectives."""
        generation = self.state.generation
        self.say(index, *(self.rank(r, aborted=generation, **said) for r in self.here(index)), offered=False)

    def restore(self, index: int) -> None:
        generation = self.state.generation
        ranks = self.here(index)
        self.say(index, *(self.rank(r, joined=generation, address=f"at{r}", restored=generation) for r in ranks))

    def swapped(self) -> None:
        for tell in (self.leave, self.restore):
            for index in (0, 1):
                tell(index)

    def started(self) -> None:
        """A generation of new processes: older ones are gone, the store is there."""
        for index in (0, 1):
            self.say(index)
        self.store_up()
        for index in (0, 1):
            self.say(index)

    def plan(self, index: int) -> NodePlan:
        plan = node_plan(self.state, self.wish(index), IDENTITY)
        envelope = Envelope(PROTOCOL, "j", self.state.generation, plan)
        assert decode_envelope(encode(envelope), "j") == envelope
        return plan


def test_a_killed_process_is_made_anew_on_its_node_and_the_survivor_stays() -> None:
    job = Swaps(spares=1)
    job.train(1, rank1=-9)
    assert (job.phase(), job.state.generation, job.state.rung) == (Phase.SWAPPING, G2, Rung.IN_PLACE)
    assert job.wish(0).phase is PlanPhase.SWAP
    assert job.wish(0).born == {0: G1}
    assert job.wish(1).born == {}
    assert job.ranks_of(1) == [1]
    job.leave(0)
    job.leave(1)
    first, second = (job.plan(index) for index in (0, 1))
    assert first.resumption is not None
    assert first.resumption.stamp == Stamp(G1, 5)
    assert first.resumption.addresses == {0: "at0", 1: "at1"}
    assert first.resumption.lineage == (Stamp(G2, 5),)
    assert [source.kind for source in first.ranks[0].sources] == [SourceKind.ITSELF]
    assert [source.kind for source in second.ranks[0].sources] == [SourceKind.OWN_NODE]
    assert (first.ranks[0].born, second.ranks[0].born) == (G1, NO_GENERATION)
    job.restore(0)
    assert job.phase() is Phase.SWAPPING
    job.restore(1)
    assert job.phase() is Phase.RUNNING
    assert job.wish(0).phase is PlanPhase.RUN
    assert job.wish(0).born == {0: G1}
    assert job.state.restarts_used == 0


def test_a_new_process_can_start_while_survivors_still_leave_their_step() -> None:
    job = Swaps(spares=1)
    job.train(1, rank1=-9)
    assert job.plan(1).ranks[0].startup is None
    job.hears(0)
    job.say(1, kept=(4, 5))
    told = job.plan(1)
    assert told.resumption == Resumption(None, ())
    assert told.ranks[0].startup == StartupCopy(Source("own1", SourceKind.OWN_NODE, 1), Stamp(G1, 5))
    assert job.plan(0).ranks[0].startup is None
    job.leave(0)
    job.leave(1)
    assert job.plan(1).ranks[0].startup is None, "where all resume is known"


def test_a_new_process_on_a_spare_node_starts_from_another_nodes_copy() -> None:
    job = Swaps(spares=1)
    job.lose(1)
    job.say(2, kept=())
    job.say(0, job.rank(0), kept=(4,))
    assert job.plan(2).ranks[0].startup == StartupCopy(Source("own1", SourceKind.OTHER_NODE, 0), Stamp(G1, 4))


def test_a_lost_node_is_replaced_by_a_spare_node() -> None:
    job = Swaps(spares=1)
    job.lose(1)
    assert job.phase() is Phase.SWAPPING
    assert job.told(job_events.GenerationBegun)[-1].moved == ((1, 1, 2),)
    job.leave(0)
    job.leave(2)
    assert [(s.kind, s.node) for s in job.plan(2).ranks[0].sources] == [(SourceKind.OTHER_NODE, 0)]


def test_addresses_are_told_only_when_all_are_known() -> None:
    job = Swaps(spares=1)
    job.train(1, rank1=-9)
    job.leave(0)
    assert job.wish(0).addresses == {}
    job.say(1)
    assert job.wish(0).recovery is not None
    assert job.wish(0).addresses == {}
    job.leave(1)
    assert set(job.wish(0).addresses) == {0, 1}


def test_a_further_failure_during_a_swap_begins_the_next_generation_from_there() -> None:
    job = Swaps(spares=1)
    job.train(1, rank1=-9)
    job.leave(0)
    job.leave(1)
    job.lose(1)
    assert (job.phase(), job.state.generation) == (Phase.SWAPPING, G3)
    assert job.state.swap is not None
    assert job.state.swap.recovery is None
    assert job.wish(0).born == {0: G1}
    assert job.ranks_of(2) == [1]


def test_a_process_that_nobody_has_seen_yet_is_started_by_the_next_generation() -> None:
    """Its node may never have heard of the generation that was to start it."""
    job = Swaps(slots=2)
    job.say(1, job.rank(2, -9), job.rank(3))
    job.say(0, job.rank(0), job.rank(1, -11))
    assert (job.phase(), job.state.generation) == (Phase.SWAPPING, G3)
    assert (job.wish(0).born, job.wish(1).born) == ({0: G1}, {3: G1})


def test_without_a_spare_node_survivors_wait_and_go_on_when_one_comes() -> None:
    job = Swaps()
    job.lose(1)
    assert (job.phase(), job.state.generation) == (Phase.WAITING, G2)
    assert (job.wish(0).phase, job.ranks_of(0), job.wish(0).born) == (PlanPhase.SWAP, [0], {0: G1})
    job.leave(0)
    job.admit(1)
    job.report(1, quiesced=NO_GENERATION, applied=NO_GENERATION)
    assert (job.phase(), job.state.generation) == (Phase.SWAPPING, G2)
    assert job.ranks_of(1) == [1]


def test_a_survivor_that_dies_while_the_job_waits_is_made_anew_later() -> None:
    job = Swaps(slots=2)
    job.lose(1)
    since = job.state.since
    job.now += 1
    job.say(0, job.rank(0, -9), job.rank(1))
    assert (job.phase(), job.state.generation, job.state.since) == (Phase.WAITING, G3, since)
    assert job.ranks_of(0) == [1]


def test_the_wait_for_a_node_ends_with_93() -> None:
    job = Swaps()
    job.lose(1)
    job.pass_time(61, alive=(0,))
    assert job.outcome.exit_code == EXIT_DO_NOT_REQUEUE
    assert "rank 0 waited with the training state in memory" in job.outcome.text
    assert "copies in memory end with this job" in job.outcome.hint


def test_a_survivor_that_stays_in_a_collective_is_replaced_too() -> None:
    job = Swaps(slots=2, spares=1)
    job.say(1, job.rank(2, -9), job.rank(3))
    for _ in range(12):
        job.now += 0.5
        job.leave(0)
        job.say(1, job.rank(2), job.rank(3), offered=False)
        job.say(2)
    assert (job.phase(), job.state.generation) == (Phase.SWAPPING, G3)
    assert job.wish(1).born == {2: G2}
    assert "is still in a collective" in job.told(job_events.FaultFound)[-1].detail


def test_a_survivor_out_of_its_collectives_has_a_minute_to_come_to_the_end_of_its_step() -> None:
    job = Swaps(slots=2, spares=1)
    job.say(1, job.rank(2, -9), job.rank(3))
    until = job.now + 61
    while job.now < until:
        assert (job.phase(), job.state.generation) == (Phase.SWAPPING, G2)
        job.now += 1
        job.leave(0)
        job.hears(1)
        job.say(2)
    assert job.state.generation == G3
    assert (job.wish(0).born, job.wish(1).born) == ({0: G1, 1: G1}, {2: G2})
    assert job.told(job_events.FaultFound)[-1].ranks == (3,)
    assert "did not come to the end of its step within 60 s" in job.told(job_events.FaultFound)[-1].detail


def test_a_process_without_a_word_of_the_runtime_holds_up_no_plan() -> None:
    """It was started for a swap that failed, and is still on its way through the script's imports."""
    job = Swaps(slots=2)
    job.say(1, job.rank(2, -9), job.rank(3))
    job.say(1, RankReport(2, G2, 1002, ProcessState.RUNNING), job.rank(3))
    job.say(0, job.rank(0), job.rank(1, -11))
    assert (job.state.generation, job.wish(1).born) == (G3, {2: G2, 3: G1})
    live = Stamp(G1, 5)
    job.say(0, job.rank(0, joined=G3, live=live))
    job.say(1, RankReport(2, G2, 1002, ProcessState.RUNNING), job.rank(3, joined=G3, live=live))
    assert job.wish(1).recovery is not None


def test_a_survivor_that_was_outside_of_a_step_makes_all_start_anew_at_once() -> None:
    job = Swaps(slots=2)
    job.say(1, job.rank(2, -9), job.rank(3))
    job.hears(0, outside="all_reduce was aborted outside of a step")
    assert (job.phase(), job.state.rung) == (Phase.QUIESCING, Rung.FROM_SLOTS)
    assert "all_reduce was aborted" in job.told(job_events.StartsAnew)[-1].why


def test_what_a_survivor_said_before_the_fault_counts_in_the_decision() -> None:
    job = Swaps()
    job.say(0, job.rank(0, leaving=True))
    job.train(1, rank1=-9)
    assert (job.phase(), job.state.generation, job.state.rung) == (Phase.QUIESCING, G2, Rung.FROM_SLOTS)
    assert job.told(job_events.StartsAnew)[-1].why == "rank 0 is past its last step"


def test_when_no_process_is_left_all_start_anew_from_the_slots() -> None:
    job = Swaps()
    job.train(0, rank0=-9)
    job.train(1, rank1=-11)
    assert (job.phase(), job.state.generation, job.state.rung) == (Phase.QUIESCING, G3, Rung.FROM_SLOTS)


# --- a survivor that is ahead ----------------------------------------------------------------------------------------


def ahead(version: int = 6, **said: Any) -> Swaps:
    """Rank 0 has completed a step that rank 1 died in."""
    job = Swaps()
    job.train(1, rank1=-9)
    job.say(0, job.rank(0, joined=G2, live=Stamp(G1, version), at=version, address="at0", **said))
    job.say(1, job.rank(1, joined=G2, address="at1"))
    return job


def test_a_survivor_that_is_ahead_goes_back_in_place_when_it_can() -> None:
    for job in (ahead(returns=1), ahead(7, returns=2)):
        assert job.state.swap is not None
        assert job.state.swap.recovery is not None
        assert job.state.swap.recovery.stamp == Stamp(G1, 5)
        assert [source.kind for source in job.plan(0).ranks[0].sources] == [SourceKind.OWN_NODE]


def test_a_survivor_that_cannot_go_back_in_place_makes_all_start_anew() -> None:
    for job in (ahead(), ahead(7, returns=1)):
        assert (job.phase(), job.state.rung) == (Phase.QUIESCING, Rung.FROM_SLOTS)
        assert "go back" in job.told(job_events.StartsAnew)[-1].why
        assert job.state.lineage.resumes == ()


def test_a_dirty_survivor_that_is_ahead_has_to_go_back_too() -> None:
    for returns, phase in ((1, Phase.SWAPPING), (0, Phase.QUIESCING)):
        job = Swaps()
        job.train(1, rank1=-9)
        job.say(0, job.rank(0, joined=G2, live=None, at=6, returns=returns))
        job.say(1, job.rank(1, joined=G2))
        assert job.phase() is phase


def test_a_dirty_survivor_just_loads() -> None:
    job = Swaps()
    job.train(1, rank1=-9)
    job.say(0, job.rank(0, joined=G2, live=None))
    job.say(1, job.rank(1, joined=G2))
    assert [source.kind for source in job.plan(0).ranks[0].sources] == [SourceKind.OWN_NODE]


def test_a_bundle_that_only_another_rank_holds_live_is_out_of_reach() -> None:
    job = Swaps()
    runtime = {rank: RuntimeReport(holds=("shared",), joined=G2, live=Stamp(G1, 0)) for rank in (0, 1)}
    for rank in (0, 1):
        job.say(rank, RankReport(rank, G1, 1000 + rank, ProcessState.RUNNING, 1, runtime=runtime[rank]))
    job.say(1, RankReport(1, G1, 1001, ProcessState.RUNNING, 1, ExitReport(-9, 0.0), runtime[1]))
    job.say(0, RankReport(0, G1, 1000, ProcessState.RUNNING, 1, runtime=runtime[0]), kept=())
    job.say(1, kept=())
    assert (job.phase(), job.state.rung) == (Phase.QUIESCING, Rung.FROM_SCRIPT)


# --- the end of scripts ----------------------------------------------------------------------------------------------


def test_ranks_are_told_to_leave_when_all_scripts_are_over() -> None:
    job = Swaps()
    job.say(0, job.rank(0, leaving=True))
    assert not job.plan(0).leave
    job.say(1, job.rank(1, leaving=True))
    assert job.plan(0).leave
    assert job.plan(1).leave
    job.say(1, job.rank(1, 0, leaving=True))
    assert job.plan(0).leave
    assert not wishes.fulfilled(job.state, 0)
    job.say(0, job.rank(0, 0, leaving=True))
    assert job.outcome.exit_code == EXIT_OK


def test_a_fault_after_that_makes_all_come_back_and_forget_that_they_were_leaving() -> None:
    job = Swaps()
    job.say(0, job.rank(0, leaving=True))
    job.say(1, job.rank(1, leaving=True))
    job.say(0, job.rank(0, 0, leaving=True))
    job.say(1, job.rank(1, -11, leaving=True))
    assert (job.phase(), job.state.rung) == (Phase.QUIESCING, Rung.FROM_SLOTS)
    job.started()
    assert job.phase() is Phase.RUNNING
    assert not job.plan(0).leave


def test_an_exit_code_0_in_the_middle_of_the_job_is_a_fault() -> None:
    job = Swaps()
    job.say(0, job.rank(0, inside=6))
    job.train(1, rank1=0)
    assert (job.phase(), job.state.generation) == (Phase.SWAPPING, G2)
    assert job.ranks_of(1) == [1]
    assert job.told(job_events.FaultFound)[-1].detail == "ended in the middle of the job with exit code 0"
    job.swapped()
    job.train(1, rank1=0)
    job.say(0, job.rank(0, inside=6))
    assert job.phase() is Phase.STOPPING
    assert job.outcome.exit_code == EXIT_WORKER_FAILED
    ended = "rank 1 on node1 ended in the middle of the job with exit code 0"
    assert job.outcome.text == f"{ended}, for the second time in step 6"


def test_ranks_that_exit_hard_at_the_very_end_have_ended_well() -> None:
    job = Swaps()
    job.say(0, job.rank(0, inside=5))
    job.train(1, rank1=0)
    assert job.phase() is Phase.RUNNING
    job.train(0, rank0=0)
    assert job.phase() is Phase.LEAVING
    assert job.outcome.exit_code == EXIT_OK


def go_on(job: Swaps, seconds: float, inside: int) -> None:
    """Rank 1's script is over after step 5, rank 0 is in this step."""
    end = job.now + seconds
    while job.now < end:
        job.now += 0.5
        job.say(0, job.rank(0, inside=inside))
        job.say(1, job.rank(1, leaving=True, finished=5))


def test_a_rank_in_a_step_that_another_one_will_never_begin_ends_the_job() -> None:
    job = Swaps()
    go_on(job, 20, inside=5)  # it comes to the end of that one
    go_on(job, 9, inside=6)
    assert job.phase() is Phase.RUNNING
    go_on(job, 2, inside=6)
    assert job.phase() is Phase.STOPPING
    assert job.outcome.exit_code == EXIT_WORKER_FAILED
    assert job.outcome.text == "rank 1 ended after step 5, while rank 0 is in step 6"


def test_a_rank_that_works_on_after_its_last_step_is_waited_for() -> None:
    job = Swaps()
    go_on(job, 100, inside=-1)
    assert job.phase() is Phase.RUNNING


def test_a_report_that_does_not_know_the_step_any_more_forgets_nothing() -> None:
    job = Swaps()
    job.say(1, job.rank(1, -11, step=-1))
    assert job.state.losses[1].step == 5


def test_a_new_process_that_ends_well_before_it_has_restored_anything_is_a_fault() -> None:
    job = Swaps()
    job.train(1, rank1=-9)
    job.say(1, RankReport(1, G2, 1001, ProcessState.RUNNING, exit=ExitReport(0, 0.0)))
    assert (job.phase(), job.state.generation, job.state.rung) == (Phase.QUIESCING, G3, Rung.FROM_SLOTS)


def test_the_exit_code_of_the_worker_is_no_success_when_the_job_failed() -> None:
    job = Swaps(replace(PAIR, worker_exit_code=True))
    job.say(0, job.rank(0, inside=6))
    job.train(1, rank1=0)
    job.swapped()
    job.train(1, rank1=0)
    job.say(0, job.rank(0, inside=6))
    assert job.outcome.exit_code == EXIT_WORKER_FAILED


def test_a_job_of_which_one_rank_has_said_that_it_knows_the_runtime_is_repaired() -> None:
    job = Swaps(step=-1)
    silent = replace(job.state.holders[1], runtime=None)
    job.state = replace(job.state, holders={**job.state.holders, 1: silent}, bundles=())
    exits = ExitReport(-9, 0.0)
    job.say(1, RankReport(1, G1, 1001, ProcessState.RUNNING, -1, exits))
    assert job.told(job_events.StartsAnew)[-1].rung is Rung.FROM_SLOTS
    job.started()
    assert (job.phase(), job.state.rung, job.state.restarts_used) == (Phase.RUNNING, Rung.FROM_SCRIPT, 0)


def test_where_not_all_know_the_runtime_an_exit_code_0_beside_others_is_a_good_end() -> None:
    job = Swaps()
    job.state = replace(job.state, holders={r: replace(h, runtime=None) for r, h in job.state.holders.items()})
    job.train(1, rank1=0)
    assert (job.phase(), job.state.generation) == (Phase.RUNNING, G1)


# --- the ground ------------------------------------------------------------------------------------------------------


def test_all_nodes_are_told_who_runs_where_and_whose_server_keeps_copies() -> None:
    job = Swaps(spares=1)
    for index in range(3):
        job.say(index, *map(job.rank, job.here(index)), server=SlotPeer(index, f"10.0.0.{index}", 7000))
    ground = job.plan(0).ground
    assert ground is not None
    assert ground.places == {0: 0, 1: 1}
    assert ground.domains == ((0, "rack0"), (1, "rack1"))
    assert [server.node for server in ground.servers] == [0, 1, 2]
    assert job.plan(2).phase is PlanPhase.PARK
    assert job.plan(2).ground == ground
    job.lose(1)
    ground = job.plan(0).ground
    assert ground is not None
    assert ground.places == {0: 0, 1: 2}
    assert ground.domains == ((0, "rack0"), (2, "rack2"))
    assert [server.node for server in ground.servers] == [0, 2]


def test_a_job_that_does_not_know_the_runtime_has_no_ground() -> None:
    job = Script()
    for index in (0, 1):
        job.admit(index)
        job.report(index, quiesced=NO_GENERATION, applied=NO_GENERATION)
    job.quiesced()
    assert job.phase() is Phase.RUNNING
    assert (job.wish(0).ground, job.wish(0).lineage.resumes) == (None, ())
    assert node_plan(job.state, job.wish(0), IDENTITY).resumption is None


# --- new processes from the slots ------------------------------------------------------------------------------------


def test_new_processes_are_told_what_to_load_and_nodes_what_is_void() -> None:
    job = Swaps()
    job.train(1, rank1=-9)
    job.swapped()
    job.train(1, rank1=-11)  # before a version became complete
    assert job.state.rung is Rung.FROM_SLOTS
    quiesce = job.plan(0)
    assert (quiesce.phase, quiesce.resumption) == (PlanPhase.QUIESCE, Resumption(None, (Stamp(G2, 5),)))
    job.started()
    run = job.plan(1)
    assert (run.phase, run.resumption) == (PlanPhase.RUN, Resumption(Stamp(G1, 5), (Stamp(G3, 5),)))
    assert [source.kind for source in run.ranks[0].sources] == [SourceKind.OWN_NODE]
    assert run.ranks[0].born == NO_GENERATION


def test_a_generation_that_begins_from_the_script_makes_all_older_copies_void() -> None:
    job = Swaps()
    job.train(1, rank1=-9)
    for index in (0, 1):
        job.say(index, job.rank(index, joined=G2), kept=())
    job.started()
    assert job.plan(0).resumption == Resumption(None, (Stamp(G3, -1),))
    assert job.state.bundles == ()


def test_when_most_do_not_leave_their_step_all_are_forked_again_and_load_from_the_slots() -> None:
    job = Swaps(slots=2)
    job.say(1, job.rank(2, -9), job.rank(3))
    for _ in range(12):
        job.now += 0.5
        job.say(0, job.rank(0), job.rank(1), offered=False)
        job.say(1, job.rank(2), job.rank(3), offered=False)
    assert (job.phase(), job.state.rung) == (Phase.QUIESCING, Rung.FROM_SLOTS)
    job.say(0)
    job.say(1)
    job.store_up()
    job.say(0)
    assert job.phase() is Phase.RUNNING
    assert [source.kind for source in job.plan(0).ranks[0].sources] == [SourceKind.OWN_NODE]


def test_a_fault_before_the_first_step_is_done_is_repaired_by_new_processes() -> None:
    job = Swaps(step=0)
    job.train(1, rank1=-9)
    assert (job.phase(), job.state.rung) == (Phase.QUIESCING, Rung.FROM_SLOTS)
    assert job.state.restarts_used == 0


def test_without_a_common_version_the_script_begins_by_itself() -> None:
    job = Swaps()
    job.train(1, rank1=-9)
    job.say(0, job.rank(0, joined=G2), kept=())
    job.say(1, job.rank(1, joined=G2), kept=())
    assert (job.phase(), job.state.rung) == (Phase.QUIESCING, Rung.FROM_SCRIPT)


def test_a_swap_after_which_no_version_became_complete_is_followed_by_the_next_rung() -> None:
    job = Swaps()
    code = 10
    rungs = []
    for _ in range(3):
        job.train(1, rank1=-code)
        code += 1
        rungs.append(job.state.rung)
        if job.phase() is Phase.SWAPPING:
            job.swapped()
        else:
            job.started()
        assert job.phase() is Phase.RUNNING
    assert rungs == [Rung.IN_PLACE, Rung.FROM_SLOTS, Rung.FROM_SCRIPT]


def test_a_completed_version_leads_back_to_the_first_rung() -> None:
    job = Swaps()
    job.train(1, rank1=-9)
    job.swapped()
    job.say(0, job.rank(0, complete=6))
    job.train(1, rank1=-11)
    assert (job.phase(), job.state.rung) == (Phase.SWAPPING, Rung.IN_PLACE)


def test_an_error_before_the_first_step_is_a_bug() -> None:
    job = Swaps(step=0)
    job.train(1, rank1=1, error="KeyError: 'x'")
    assert job.phase() is Phase.STOPPING
    assert job.outcome.exit_code == EXIT_WORKER_FAILED
    assert job.outcome.cause is not None
    assert job.outcome.cause.rank == 1


def test_the_same_end_of_a_rank_at_the_same_step_twice_is_a_bug() -> None:
    job = Swaps()
    job.train(1, rank1=-11)
    job.swapped()
    job.train(1, rank1=-11)
    assert job.phase() is Phase.STOPPING


def test_the_same_error_of_all_ranks_is_a_bug() -> None:
    job = Swaps()
    job.train(1, rank1=1, error="ValueError: loss is nan")
    assert job.phase() is Phase.SWAPPING
    job.train(0, rank0=1, error="ValueError: loss is nan")
    assert job.outcome.exit_code == EXIT_WORKER_FAILED
    assert job.outcome.cause is not None


def test_a_job_that_may_shrink_begins_anew_with_fewer_nodes() -> None:
    job = Swaps(Rules(seats_min=1, seats_max=2))
    job.lose(1)
    assert (job.phase(), job.state.rung) == (Phase.QUIESCING, Rung.FROM_SCRIPT)


def test_what_an_older_process_of_a_rank_says_does_not_count() -> None:
    job = Swaps(spares=1)
    old = job.rank(1, -9)
    job.say(1, old)
    job.leave(0)
    job.say(1, old)
    assert (job.phase(), job.state.generation) == (Phase.SWAPPING, G2)
    assert membership.step(job.state, job_events.Ticked(), job.now)[0] == job.state
