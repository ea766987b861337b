"""A fault in a job whose workers know the runtime: survivors keep their processes, lost ranks are made anew. Pure.

A swap is one phase with three questions, each answered by whole-state reports: have all survivors left their step and
said what they hold, and does nothing live that the new generation does not name? Then `recovery.plan` says where all go
on from. Are the addresses of all known? Has every rank restored? Then the generation runs. A further failure begins the next
generation from where this one is; what was said to this one is not used again. When no node can take a lost rank, the same
generation waits with its survivors parked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from phoenix_launch.errors import EXIT_WORKER_FAILED
from phoenix_launch.job import holding, odd_bits, placement, recovery
from phoenix_launch.job.commit import NO_VERSION
from phoenix_launch.job.events import (
    CommunicatorsKnown,
    FaultFound,
    GenerationBegun,
    GenerationRuns,
    RecoveryFound,
    StartsAnew,
    WaitingForNode,
)
from phoenix_launch.job.losses import Loss, bug, loss
from phoenix_launch.job.recovery import Recovery, Survivor
from phoenix_launch.job.state import SIGTERM, Holder, Member, Outcome, Phase, Rung, State, Swap, fault_of
from phoenix_launch.job.transition import Transition

FEWER_RANKS = "there are fewer ranks now"
NO_COMMON_VERSION = "no version of the state is left of which every part has a copy"


class Next(NamedTuple):
    """The rung of the ladder that is taken; `why` not the first one."""

    rung: Rung
    why: str = ""


class Swapping(Transition):
    # --- a fault ---

    def _repair(self) -> None:
        """Ranks ended or their node is gone: take the next rung of the ladder, or end the job."""
        if self._stop_for_a_bug():
            return
        chosen = self._next_rung()
        self.state = replace(self.state, bundles=holding.bundles(self.state) or self.state.bundles)
        if chosen is None:
            outcome = Outcome(exit_code=EXIT_WORKER_FAILED, text="faults came again before a step was completed")
            self._enter(Phase.STOPPING, outcome=outcome, signal=SIGTERM, grace=self.state.rules.shutdown_timeout)
        elif chosen.rung is Rung.IN_PLACE:
            self._swap(holding.lost(self.state))
        else:
            self._anew(chosen.rung, chosen.why)

    def _stop_for_a_bug(self) -> bool:
        """Say what ended, and stop when it would only come again."""
        for ended in holding.failed(self.state):
            state, holder = self.state, self.state.holders[ended.rank]
            new = loss(ended.report, holder.step)
            if ended.rank in state.condemned:  # said already
                new = Loss(state.verdict, holder.step, raised=False)
            else:
                self.actions.append(
                    FaultFound(
                        kind="worker", node=ended.node, ranks=(ended.rank,), detail=fault_of(ended.report),
                        cause=ended, after=self.now - ended.at,
                    )
                )  # fmt: skip
            together = {**state.raised, ended.rank: new}
            why = bug(new, state.losses.get(ended.rank), together, len(state.places))
            self.state = replace(state, losses={**state.losses, ended.rank: new}, raised=together)
            if why is not None:
                outcome = self._failure(ended)
                outcome = replace(outcome, text=f"{outcome.text}{why and ', '}{why}")
                self._enter(Phase.STOPPING, outcome=outcome, signal=SIGTERM, grace=state.rules.shutdown_timeout)
                return True
        return False

    def _next_rung(self) -> Next | None:
        """A rung has failed when no version became complete since it was taken. None: so has the last one."""
        state = self.state
        lost = holding.lost(state)
        kept = [holder for holder in state.holders.values() if holder.rank not in lost]
        swapping = state.phase in (Phase.SWAPPING, Phase.WAITING)
        progress = any(holding.has_stepped(state, holder) for holder in state.holders.values())
        if not (swapping or progress or state.rung is Rung.START):
            why = "no step was completed since the last repair"
            return Next(Rung(state.rung + 1), why) if state.rung < Rung.FROM_SCRIPT else None
        if swapping and any(state.holders[e.rank].born == state.generation for e in holding.failed(state)):
            return Next(Rung.FROM_SLOTS, "a process that was to take a lost one's place ended, too")
        if not swapping and not all(holding.is_seasoned(holder) for holder in kept):
            return Next(Rung.FROM_SLOTS, "not all ranks had completed a step")
        if not any(holder.seen for holder in kept):
            return Next(Rung.FROM_SLOTS, "no worker is left")
        why = holding.cannot_stay(kept)
        return Next(Rung.FROM_SLOTS, why) if why else Next(Rung.IN_PLACE)

    def _anew(self, rung: Rung, why: str) -> None:
        """Every worker ends, new ones come: from the slots, or as the script itself does it."""
        self.actions.append(StartsAnew(rung, why))
        generation = self.state.generation
        if self.state.phase is Phase.WAITING and self.state.swap is not None:
            generation = self.state.following  # survivors wait in this one: nobody must take them for the new ones
        self.state = replace(self.state, generation=generation, rung=rung, swap=None, recovery=None, holders={})
        self._refill()

    # --- the swap ---

    def _swap(self, lost: frozenset[int]) -> None:
        """Begin the next generation with the processes that are left; or wait with them for a node."""
        state = self.state
        lineup = self._refilled(len(state.lineup))
        homes = {place.rank: place.node for place in placement.places(lineup or state.lineup)}
        kept = {
            rank: holder
            for rank, holder in state.holders.items()
            if holder.seen and rank not in lost and homes[rank] == holder.node  # else its node is to be left
        }
        state = self.state
        same = state.phase is Phase.WAITING and len(kept) == len(state.holders)
        generation = state.generation if same else state.following
        store_node = state.store_node if self._lives(state.store_node) else -1
        if lineup is None:
            if self._refilled(state.rules.seats_min) is not None:
                self._anew(Rung.FROM_SCRIPT, FEWER_RANKS)  # no bundle is what it was
            elif not same:
                self._park(replace(state, generation=generation, holders=kept, store_node=store_node))
            return
        before = {place.rank: place.node for place in state.places}
        new = {
            place.rank: Holder(rank=place.rank, node=place.node, born=generation)
            for place in placement.places(lineup)
            if place.rank not in kept
        }
        self._enter(
            Phase.SWAPPING, generation=generation, lineup=lineup, holders={**kept, **new}, ended={}, swap=Swap(),
            rung=Rung.IN_PLACE, recovery=None, store_node=store_node,
        )  # fmt: skip
        moved = tuple((p.rank, before[p.rank], p.node) for p in self.state.places if before[p.rank] != p.node)
        self.actions.append(GenerationBegun(generation, moved))

    def _lives(self, index: int) -> bool:
        member = self.state.members.get(index)
        return member is not None and member.alive

    def _park(self, state: State) -> None:
        waited = state.phase is Phase.WAITING
        names = ", ".join(member.name for member in self._missing())
        self.state = replace(state, swap=Swap(), ended={}, recovery=None)
        self._enter(Phase.WAITING)
        if waited:  # a further loss does not prolong the wait
            self.state = replace(self.state, since=state.since)
        else:
            limit = state.rules.spare_timeout
            self.actions.append(WaitingForNode(f"no spare node for {names}: waiting up to {limit:g} s"))

    def _settle_swapping(self) -> None:
        state = self.state
        assert state.swap is not None
        if holding.lost(state):
            self._repair()
        elif why := holding.cannot_stay(state.holders.values()):
            self._anew(Rung.FROM_SLOTS, why)
        elif state.swap.recovery is None:
            self._settle_offers()
        elif self._restored():
            self._enter(Phase.RUNNING, swap=None, recovery=state.swap.recovery, raised={}, leave=False)
            self.actions.append(GenerationRuns(state.generation))
        elif not state.swap.linked and holding.addresses(state):
            self.state = replace(state, swap=replace(state.swap, linked=True))
            self.actions.append(CommunicatorsKnown(state.generation))
        elif self.now - state.swap.planned > state.rules.start_timeout:
            late = [h for h in state.holders.values() if not holding.has_restored(state, h)]
            self._blame(late, f"did not restore its state within {state.rules.start_timeout:g} s")
            self._anew(Rung.FROM_SLOTS, "not all ranks have restored their state in time")

    def _restored(self) -> bool:
        return all(holding.has_restored(self.state, holder) for holder in self.state.holders.values())

    def _settle_offers(self) -> None:
        state, rules, waited = self.state, self.state.rules, self.now - self.state.since
        kept = holding.survivors(state)
        late = [holder for holder in kept if not holding.has_joined(state, holder)]
        stuck = [holder for holder in late if not holding.has_aborted(state, holder)]
        slow = self._not_quiet()
        busy = {holder.node for holder in late}
        if why := holding.cannot_stay(kept):
            self._anew(Rung.FROM_SLOTS, why)
        elif not late and not slow:
            self._plan()
        elif stuck and waited > rules.abort_timeout:
            self._replace(stuck, f"is still in a collective {rules.abort_timeout:g} s after the notice")
        elif late and waited > rules.leave_timeout:
            self._replace(late, f"did not come to the end of its step within {rules.leave_timeout:g} s")
        elif waited > rules.shutdown_timeout + rules.teardown_timeout:
            for member in [m for m in slow if m.index not in busy]:
                self._lose(member.index, "did not end its old workers in time")
            if holding.lost(self.state):
                self._repair()

    def _replace(self, late: list[Holder], detail: str) -> None:
        """These are given up; the others go on, unless they are the fewer."""
        self._blame(late, detail)
        if 2 * len(late) > len(self.state.places):
            self._anew(Rung.FROM_SLOTS, "that is most of them")
        else:
            self._swap(frozenset(holder.rank for holder in late))

    def _blame(self, late: list[Holder], detail: str) -> None:
        for holder in late:
            after = self.now - self.state.since
            self.actions.append(
                FaultFound(kind="worker", node=holder.node, ranks=(holder.rank,), detail=detail, after=after)
            )

    def _not_quiet(self) -> list[Member]:
        """Nodes where something may live, or write to a slot, that this generation does not name."""
        state = self.state
        seated = {seat.node for seat in state.lineup}
        return [
            member
            for member in state.members.values()
            if member.alive
            and (member.index in seated or member.live)
            and (member.quiesced < state.generation or member.offered < state.generation)
        ]

    def _plan(self) -> None:
        """All have offered: say where each takes its state from; or that survivors cannot keep their processes."""
        state = self.state
        assert state.swap is not None
        kept = [holder for holder in holding.survivors(state) if holding.has_joined(state, holder)]
        found = self._found([Survivor(h.rank, h.node, h.runtime.live) for h in kept if h.runtime is not None])
        if found is None:
            self._anew(Rung.FROM_SCRIPT, NO_COMMON_VERSION)
            return
        ahead = [holder.rank for holder in kept if holding.cannot_go_back(holder, found.stamp.version)]
        if ahead:
            self._anew(Rung.FROM_SLOTS, f"rank {ahead[0]} has to go back a step and cannot do so in place")
            return
        self._resume_at(found.stamp.version)
        self.state = replace(self.state, swap=replace(state.swap, recovery=found, planned=self.now))
        self.actions.append(RecoveryFound(state.generation, found))

    def _found(self, survivors: list[Survivor]) -> Recovery | None:
        """What can be restored. Nobody serves another rank from the state that it trains with."""
        state = self.state
        places = {place.rank: place.node for place in state.places}
        if {rank for bundle in state.bundles for rank in bundle.holders} != set(places):
            return None
        return recovery.plan(
            state.bundles, survivors, odd_bits.trusted(holding.offered(state), state.odd), places, state.lineage,
            from_holders=False,
        )  # fmt: skip

    def _resume_at(self, version: int) -> None:
        """Where this generation goes on; with that, whatever lies beyond is void, whether it comes to run or not."""
        lineage = self.state.lineage.resumed(self.state.generation, version)
        self.state = replace(self.state, resume=version, lineage=lineage)

    def _plan_from_slots(self) -> None:
        """A generation of new processes is about to run."""
        if self.state.rung is Rung.START:
            return
        found = self._found([]) if self.state.rung is Rung.FROM_SLOTS else None
        if found is None:
            if self.state.rung is Rung.FROM_SLOTS:
                self.actions.append(StartsAnew(Rung.FROM_SCRIPT, NO_COMMON_VERSION))
            self.state = replace(self.state, rung=Rung.FROM_SCRIPT, bundles=())
        else:
            self.actions.append(RecoveryFound(self.state.generation, found))
        self._resume_at(NO_VERSION if found is None else found.stamp.version)
        self.state = replace(self.state, recovery=found, raised={})
