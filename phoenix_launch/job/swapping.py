"""A fault in a job whose workers know the runtime: survivors keep their processes, lost ranks are made anew. Pure.

A swap is one phase with three questions, each answered by whole-state reports: have all survivors left their step and
said what they hold, and does nothing live that the new generation does not name? Then `recovery.plan` says where all go
on from. Are the addresses of all known? Has every rank restored? Then the generation runs. A further failure begins the next
generation from where this one is; what was said to this one is not used again. When no node can take a lost rank, the same
generation waits with its survivors parked.
"""

from __future__ import annotations

from dataclasses import replace

from phoenix_launch.errors import EXIT_WORKER_FAILED
from phoenix_launch.job import placement, recovery
from phoenix_launch.job.commit import NO_VERSION, Bundle
from phoenix_launch.job.events import FaultFound, GenerationBegun, GenerationRuns, WaitingForNode
from phoenix_launch.job.losses import is_bug, loss
from phoenix_launch.job.recovery import Survivor
from phoenix_launch.job.state import SIGTERM, Ended, Holder, Member, Outcome, Phase, Rung, State, Swap, how
from phoenix_launch.job.transition import Transition


class Swapping(Transition):
    def _resilient(self) -> bool:
        """Whether a fault is repaired rather than answered by a restart: all ranks have said that they can be."""
        state = self.state
        return state.rung is not Rung.START or all(
            (holder := state.holders.get(place.rank)) is not None and holder.runtime is not None
            for place in state.places
        )

    def _failed(self) -> list[Ended]:
        failed = [ended for ended in self.state.ended.values() if ended.report.code != 0]
        return sorted(failed, key=lambda ended: (ended.at, ended.rank))

    # --- a fault ---

    def _repair(self) -> None:
        """Ranks ended or their node is gone: take the next rung of the ladder, or end the job."""
        if self._stop_for_a_bug():
            return
        rung = self._next_rung()
        self.state = replace(self.state, bundles=bundles(self.state) or self.state.bundles)
        if rung is None:
            outcome = Outcome(exit_code=EXIT_WORKER_FAILED, text="faults came again before a step was completed")
            self._enter(Phase.STOPPING, outcome=outcome, signal=SIGTERM, grace=self.state.rules.shutdown_timeout)
        elif rung is Rung.IN_PLACE:
            self._swap(self._lost())
        else:
            self._anew(rung)

    def _stop_for_a_bug(self) -> bool:
        """Say what ended, and stop when it would only come again."""
        for ended in self._failed():
            self.actions.append(
                FaultFound(
                    kind="worker", node=ended.node, ranks=(ended.rank,), detail=how(ended.report.code), cause=ended
                )
            )
            state, holder = self.state, self.state.holders[ended.rank]
            new = loss(ended.report, holder.step)
            together = {**state.raised, ended.rank: new}
            bug = is_bug(new, state.losses.get(ended.rank), together, len(state.places))
            self.state = replace(state, losses={**state.losses, ended.rank: new}, raised=together)
            if bug:
                grace = state.rules.shutdown_timeout
                self._enter(Phase.STOPPING, outcome=self._failure(ended), signal=SIGTERM, grace=grace)
                return True
        return False

    def _next_rung(self) -> Rung | None:
        """A rung has failed when no version became complete since it was taken. None: so has the last one."""
        state = self.state
        kept = [holder for holder in state.holders.values() if holder.rank not in self._lost()]
        if state.phase in (Phase.SWAPPING, Phase.WAITING):
            new = any(state.holders[ended.rank].born == state.generation for ended in self._failed())
            return Rung.FROM_SLOTS if new else Rung.IN_PLACE
        progress = any(h.runtime is not None and h.runtime.complete > state.resume for h in state.holders.values())
        if not progress and state.rung is not Rung.START:
            return Rung(state.rung + 1) if state.rung < Rung.FROM_SCRIPT else None
        swappable = all(holder.runtime is not None and holder.step >= 1 for holder in kept)
        return Rung.IN_PLACE if swappable else Rung.FROM_SLOTS

    def _lost(self) -> frozenset[int]:
        """Ranks that no process holds any more, as far as is known."""
        state = self.state
        return frozenset(place.rank for place in state.places if not held(state, place.rank))

    def _anew(self, rung: Rung) -> None:
        """Every worker ends, new ones come: from the slots, or as the script itself does it."""
        self.state = replace(self.state, rung=rung, swap=None, recovery=None, holders={})
        self._refill()

    # --- the swap ---

    def _swap(self, lost: frozenset[int]) -> None:
        """Begin the next generation with the processes that are left; or wait with them for a node."""
        state = self.state
        kept = {rank: holder for rank, holder in state.holders.items() if holder.seen and rank not in lost}
        same = state.phase is Phase.WAITING and len(kept) == len(state.holders)
        generation = state.generation if same else state.generation.following()
        lineup = placement.refilled(state.lineup, self._seatable(), len(state.lineup))
        store_node = state.store_node if self._lives(state.store_node) else -1
        if lineup is None:
            if placement.refilled(state.lineup, self._seatable(), state.rules.seats_min) is not None:
                self._anew(Rung.FROM_SCRIPT)  # with fewer ranks no bundle is what it was
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
        if self._lost():
            self._repair()
        elif state.swap.recovery is None:
            self._settle_offers()
        elif self._restored():
            self._enter(Phase.RUNNING, swap=None, recovery=state.swap.recovery, raised={})
            self.actions.append(GenerationRuns(state.generation))
        elif self.now - state.swap.planned > state.rules.start_timeout:
            late = [h for h in state.holders.values() if not has_restored(state, h)]
            self._late(late, f"did not restore its state within {state.rules.start_timeout:g} s")
            self._anew(Rung.FROM_SLOTS)

    def _restored(self) -> bool:
        return all(has_restored(self.state, holder) for holder in self.state.holders.values())

    def _settle_offers(self) -> None:
        state, rules = self.state, self.state.rules
        late = [h for h in state.holders.values() if not has_joined(state, h) and h.born < state.generation]
        slow = self._not_quiet()
        if not late and not slow:
            self._plan()
        elif late and self.now - state.since > rules.abort_timeout:
            self._late(late, f"did not leave its step within {rules.abort_timeout:g} s")
            if 2 * len(late) > len(state.places):
                self._anew(Rung.FROM_SLOTS)
            else:
                self._swap(frozenset(holder.rank for holder in late))
        elif slow and self.now - state.since > rules.shutdown_timeout + rules.teardown_timeout:
            for member in slow:
                self._lose(member.index, "did not end its old workers in time")
            self._repair()

    def _late(self, late: list[Holder], detail: str) -> None:
        for holder in late:
            self.actions.append(FaultFound(kind="worker", node=holder.node, ranks=(holder.rank,), detail=detail))

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
        state = self.state
        assert state.swap is not None
        survivors = [
            Survivor(holder.rank, holder.node, holder.runtime.live)
            for holder in state.holders.values()
            if holder.runtime is not None and has_joined(state, holder) and holder.born < state.generation
        ]
        found = self._planned(survivors)
        if found is None:
            self._anew(Rung.FROM_SCRIPT)
            return
        self.state = replace(self.state, swap=replace(state.swap, recovery=found, planned=self.now))

    def _planned(self, survivors: list[Survivor]) -> recovery.Recovery | None:
        """Where this generation goes on; with that, whatever lies beyond is void, whether it comes to run or not."""
        state = self.state
        kept = {m.index: m.kept for m in state.members.values() if m.alive and m.offered >= state.generation}
        places = {place.rank: place.node for place in state.places}
        found = recovery.plan(state.bundles, survivors, kept, places, state.lineage) if state.bundles else None
        version = found.stamp.version if found is not None else NO_VERSION
        self.state = replace(state, resume=version, lineage=state.lineage.resumed(state.generation, version))
        return found

    def _plan_from_slots(self) -> None:
        """A generation of new processes is about to run."""
        if self.state.rung is Rung.START:
            return
        found = self._planned([]) if self.state.rung is Rung.FROM_SLOTS else None
        if found is None:
            lineage = self.state.lineage.resumed(self.state.generation, NO_VERSION)
            self.state = replace(self.state, rung=Rung.FROM_SCRIPT, resume=NO_VERSION, lineage=lineage)
        self.state = replace(self.state, recovery=found, raised={})


def held(state: State, rank: int) -> bool:
    holder = state.holders.get(rank)
    return holder is not None and rank not in state.ended and state.members[holder.node].alive


def has_joined(state: State, holder: Holder) -> bool:
    """It knows of this generation, and does nothing of an older one any more."""
    return holder.runtime is not None and holder.runtime.joined == state.generation


def has_restored(state: State, holder: Holder) -> bool:
    return has_joined(state, holder) and holder.runtime is not None and holder.runtime.restored == state.generation


def addresses(state: State) -> dict[int, str]:
    """By rank, where its communicators of this generation are; empty until all have said."""
    found = {
        holder.rank: holder.runtime.address
        for holder in state.holders.values()
        if holder.runtime is not None and has_joined(state, holder) and holder.runtime.address
    }
    return found if len(found) == len(state.places) else {}


def bundles(state: State) -> tuple[Bundle, ...]:
    """The table of bundles, from what each rank says that it holds; empty when not all have said."""
    holders: dict[str, list[int]] = {}
    private: set[str] = set()
    for place in state.places:
        holder = state.holders.get(place.rank)
        if holder is None or holder.runtime is None or not holder.runtime.holds:
            return ()
        private.add(holder.runtime.private)
        for key in holder.runtime.holds:
            holders.setdefault(key, []).append(place.rank)
    return tuple(Bundle(key, tuple(ranks), private=key in private) for key, ranks in sorted(holders.items()))
