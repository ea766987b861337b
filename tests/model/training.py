"""Training, commit and recovery of a job with one rank on each node and one spare node, as a graph of states.

Steps, rounds, copies, replicas, optimizers, kills of a process or a node, aborts, offers and restores happen in any order that
their conditions allow; the conditions are the functions of commit.py and recovery.py. A swap is told as: each survivor leaves
its step, then all at once the plan is made and older things become void, then each rank restores. How the members of the
job come to agree on that over a bus that loses messages is the other model's subject (swapping.py).

Versions have no bound: a state is stored with its versions counted from the oldest one in use, its generations renumbered
in order, entries of the lineage that concern no stamp left out, the two slots of a pair in a fixed order. The rules only
compare versions and generations with each other, take the two slots alike and use a lineage only for stamps that are there (a
version older than all in use may be any such: it is written -1), so states that differ in nothing else go on alike. Ranks
are alike too, and so are nodes but for what they hold: with two ranks, of states that differ in names only one is stored (so
in the way to a broken promise names may change from one move to the next).

Moves that only enable others are done together with the first of these, since until then nothing differs: a rank hears of a
round's outcome when it begins to copy or to step; all go on as soon as the last has restored. A survivor that has to load
something offers nothing from the plan on: if it has not begun yet, what it holds is void by lineage anyway. A slot that no plan
names and that may be freed is freed at once: that is the worst that may happen to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from model.exploration import Move
from model.worlds import (
    ABORTING,
    CHOSEN,
    DEAD,
    DIRTY,
    LEFT,
    LIVE,
    LOADED,
    LOADING,
    OVER,
    RESTORING,
    RUNNING,
    SKIPPED,
    STEPPING,
    UNDECIDED,
    VOTED,
    Cells,
    Rank,
    World,
    canonical,
    closed,
    covered,
    lineage_of,
    ordered,
    pair,
    put,
    shelve,
    slot,
)
from phoenix_launch.copies import KeptSlot, SourceKind, Stamp
from phoenix_launch.job import commit, recovery
from phoenix_launch.job.commit import Bundle, Copy, CopyPlan, Lineage, Round, Vote
from phoenix_launch.job.recovery import Survivor
from phoenix_launch.wire import Generation

INTERVAL = 2  # with `skips`: at least every other version is copied


def from_slots(*given: Any) -> recovery.Recovery | None:
    """As the product asks for it: nobody serves others from the state that it trains with."""
    return recovery.plan(*given, from_holders=False)


@dataclass(frozen=True, slots=True)
class Rules:
    """What is put to the test; a test may put something wrong in its place."""

    copy_plan: Callable[..., CopyPlan] = commit.copy_plan
    agreed: Callable[..., Round] = commit.agreed
    may_step: Callable[..., bool] = commit.may_step
    may_free: Callable[..., bool] = commit.may_free
    slot_to_fill: Callable[..., int | None] = commit.slot_to_fill
    plan: Callable[..., recovery.Recovery | None] = from_slots
    local_decisions: bool = False  # each rank chooses for itself what it copies
    dirty_offers: bool = False  # a rank that is amid its optimizer offers what it had


class Training:
    """`skips`: the round may leave out a version. `bundles`: of all ranks; the first ones are the private ones in order."""

    def __init__(
        self, bundles: tuple[Bundle, ...], *, faults: int = 2, skips: bool = False, rules: Rules | None = None
    ) -> None:
        ranks = sum(bundle.private for bundle in bundles)
        self.nodes = ranks + 1
        self.bundles, self.skips, self.rules = bundles, skips, rules or Rules()
        self.index = {bundle.key: number for number, bundle in enumerate(bundles)}
        self.ends: set[str] = set()
        rules_ = self.rules
        self._holds = cache(lambda cells, v, line: commit.holds(pair(cells), v, lineage_of(line)))
        self._sealed = cache(self._sealed_in)
        self._common = cache(self._common_in)
        self._to_fill = cache(self._slot_to_fill)
        self._may_step = cache(self._step_allowed)
        self._copies = cache(
            lambda homes: rules_.copy_plan(
                bundles, dict(enumerate(homes)), {node: f"d{node}" for node in sorted(homes)}
            )
        )
        self._filled = cache(lambda homes, node: self._copies(homes).filled_by(node))
        empty: Cells = (None, None)
        self.start = World(
            RUNNING, 1, 0, (), (True,) * self.nodes, tuple(Rank(node, LIVE, 1, 0) for node in range(ranks)),
            tuple(tuple(empty for _ in bundles) for _ in range(self.nodes)), faults,
        )  # fmt: skip

    # --- the rules, as this model asks them; results are kept, as few different questions come up ---

    def _slot_to_fill(self, cells: Cells, complete: int, resume: int, line: tuple[tuple[int, int], ...]) -> int | None:
        its, lineage = pair(cells), lineage_of(line)
        return self.rules.slot_to_fill(its, max(complete, commit.complete_at_resume(its, resume, lineage)), lineage)

    def _step_allowed(
        self,
        plan: CopyPlan,
        node: int,
        decided: Round | None,
        pairs: tuple[Cells, ...],
        line: tuple[tuple[int, int], ...],
    ) -> bool:
        kept = {copy.place: pair(cells) for copy, cells in zip(plan.filled_by(node), pairs, strict=True)}
        return self.rules.may_step(plan, node, decided, kept, lineage_of(line))

    def plan(self, world: World) -> CopyPlan:
        return self._copies(tuple(rank.node for rank in world.ranks))

    def filled_by(self, world: World, node: int) -> tuple[Copy, ...]:
        return self._filled(tuple(rank.node for rank in world.ranks), node)

    def pairs(self, world: World, node: int) -> tuple[Cells, ...]:
        return tuple(world.slots[copy.node][self.index[copy.bundle]] for copy in self.filled_by(world, node))

    def sealed(self, world: World, node: int) -> int:
        """The newest version that all copies that this node fills have."""
        return self._sealed(self.pairs(world, node), world.lineage)

    def _sealed_in(self, pairs: tuple[Cells, ...], line: tuple[tuple[int, int], ...]) -> int:
        versions = {cell[1] for cell in pairs[0] if cell} if pairs else set()
        whole = (v for v in versions if all(self._holds(cells, v, line) for cells in pairs))
        return max(whole, default=commit.NO_VERSION)

    def complete(self, world: World) -> int:
        nodes = {rank.node for rank in world.ranks}
        return min(self.sealed(world, node) for node in nodes)  # ranks seal the same versions

    # --- moves ---

    def moves(self, world: World) -> Iterator[Move[World]]:
        if world.phase == OVER:
            return
        if world.phase == RUNNING:
            self.promise(world)
        for i, rank in enumerate(world.ranks):
            if rank.status in (LIVE, STEPPING):
                yield from self.work(world, i, rank)
            if rank.status == LOADING and world.phase == RESTORING:
                yield self.move(f"rank {i} has restored", self.loaded(world, i, rank))
        if world.phase == ABORTING and all(r.status in (LEFT, DIRTY, DEAD) for r in world.ranks):
            yield from self.swap(world)
        if world.faults:
            for label, after in self.harm(world):
                yield Move(label, canonical(after), fault=True)

    def move(self, label: str, world: World) -> Move[World]:
        return Move(label, canonical(world))

    def work(self, world: World, i: int, rank: Rank) -> Iterator[Move[World]]:
        if world.phase == ABORTING:
            left = LEFT if rank.status == LIVE else DIRTY
            yield self.move(f"rank {i} leaves its step {left}", put(world, i, rank._replace(status=left)))
        if rank.status == STEPPING:
            done = Rank(rank.node, LIVE, world.generation, rank.version + 1, complete=rank.complete)
            yield self.move(f"rank {i} reaches version {done.version}", put(world, i, done))
            return
        if rank.round == UNDECIDED and world.phase == RUNNING:
            yield from self.vote(world, i, rank)
        if rank.round == CHOSEN:
            yield from self.copy(world, i, rank)
        decided = None
        if rank.round in (CHOSEN, SKIPPED):
            decided = Round(rank.version, rank.round == CHOSEN, rank.complete, first=rank.version == world.resume)
        reduced = all(other.version >= rank.version for other in world.ranks)  # all have been in this step's backward
        if reduced and self._may_step(
            self.plan(world), rank.node, decided, self.pairs(world, rank.node), world.lineage
        ):
            for number, cells in enumerate(world.slots[rank.node]):
                torn = (world.generation, rank.version, False) in cells and self.writes(i, number)
                assert not torn, f"rank {i} changes what is being copied"
            yield self.move(f"rank {i} enters its optimizer", put(world, i, rank._replace(status=STEPPING)))

    def writes(self, i: int, number: int) -> bool:
        return i in self.bundles[number].holders

    def vote(self, world: World, i: int, rank: Rank) -> Iterator[Move[World]]:
        if self.rules.local_decisions:
            whole = self.sealed(world, rank.node)
            for outcome in (CHOSEN, SKIPPED):
                yield self.move(f"rank {i} decides", put(world, i, rank._replace(round=outcome, complete=whole)))
            return
        if any(other.round != VOTED for j, other in enumerate(world.ranks) if j != i):
            yield self.move(f"rank {i} votes on {rank.version}", put(world, i, rank._replace(round=VOTED)))
            return
        sealed = [self.sealed(world, r.node) for r in world.ranks]
        for ready in (True, False) if self.skips and rank.version - min(sealed) < INTERVAL else (True,):
            votes = [Vote(r.version, whole, ready) for r, whole in zip(world.ranks, sealed, strict=True)]
            agreed = self.rules.agreed(votes, world.resume)
            chosen = CHOSEN if agreed.copy else SKIPPED
            ranks = tuple(r._replace(round=chosen, complete=agreed.complete) for r in world.ranks)
            after = covered(world._replace(ranks=ranks, slots=self.freed(world, agreed.complete)), agreed.complete)
            yield self.move(f"all agree on {rank.version}: {'copy' if agreed.copy else 'skip'}", after)

    def freed(self, world: World, complete: int) -> tuple[tuple[Cells, ...], ...]:
        named = {(copy.node, self.index[copy.bundle]) for copy in self.plan(world).copies}
        line = lineage_of(world.lineage)
        return tuple(
            tuple(
                cells if (node, number) in named else self._kept(cells, complete, line)
                for number, cells in enumerate(pairs)
            )
            for node, pairs in enumerate(world.slots)
        )

    def _kept(self, cells: Cells, complete: int, line: Lineage) -> Cells:
        first, second = (None if self.rules.may_free(slot(cell), complete, line) else cell for cell in cells)
        return ordered(first, second)

    def copy(self, world: World, i: int, rank: Rank) -> Iterator[Move[World]]:
        """Begin and end of each copy: its own slots one after the other, as a copier is one thread; replicas from these in any
        order."""
        version, now, busy = rank.version, world.generation, False
        for copy in self.filled_by(world, rank.node):
            number = self.index[copy.bundle]
            cells, own = world.slots[copy.node][number], world.slots[rank.node][number]
            if self._holds(cells, version, world.lineage):
                continue
            if busy if copy.node == rank.node else not self._holds(own, version, world.lineage):
                continue  # there is nothing to send yet
            busy = busy or copy.node == rank.node
            if not world.alive[copy.node]:
                continue
            open_ = [cell for cell in cells if cell and not cell[2]]
            if open_:
                ((_, begun, _),) = open_
                assert begun == version, "a copy was left open"
                other = next(cell for cell in cells if cell not in open_)
                stamp = (rank.generation, version, True)
                after = self.met(shelve(world, copy.node, number, ordered(other, stamp)), version)
                yield self.move(f"rank {i} seals {copy}", after)
            else:
                place = self._to_fill(cells, rank.complete, world.resume, world.lineage)
                if place is not None:
                    opened = ordered(cells[1 - place], (now, version, False))
                    yield self.move(f"rank {i} opens {copy}", shelve(world, copy.node, number, opened))

    def met(self, world: World, version: int) -> World:
        """The second round on a generation's first version, when the last copy of it is sealed."""
        if version != world.resume or any(r.round != CHOSEN or r.version != version for r in world.ranks):
            return world
        outcome = self.rules.agreed([Vote(version, self.sealed(world, r.node)) for r in world.ranks], world.resume)
        ranks = tuple(r._replace(complete=outcome.complete) for r in world.ranks)
        return covered(world._replace(ranks=ranks), outcome.complete)

    # --- faults ---

    def harm(self, world: World) -> Iterator[tuple[str, World]]:
        for i, rank in enumerate(world.ranks):
            if rank.status != DEAD:
                yield f"rank {i} is killed", self.struck(world, (i,))
        for node, alive in enumerate(world.alive):
            if alive:
                hit = tuple(i for i, r in enumerate(world.ranks) if r.node == node and r.status != DEAD)
                gone = world._replace(
                    alive=tuple(a and other != node for other, a in enumerate(world.alive)),
                    slots=tuple(tuple((None, None) for _ in p) if n == node else p for n, p in enumerate(world.slots)),
                )
                yield f"node {node} is lost", self.struck(gone, hit, world)

    def struck(self, world: World, hit: tuple[int, ...], before: World | None = None) -> World:
        """`before`: the world with the slots that were lost."""
        after = world._replace(faults=world.faults - 1, cover=max(0, world.cover - 1))
        if world.phase == RUNNING and hit:
            after = after._replace(phase=ABORTING, floor=self.complete(before or world))
        else:
            after = after._replace(floor=commit.NO_VERSION)
        ranks = list(world.ranks)
        for i, rank in enumerate(ranks):
            if i in hit:
                ranks[i] = rank._replace(status=DEAD)
            elif world.phase == RESTORING and hit:
                ranks[i] = rank._replace(status=LEFT if rank.status == LOADED else DIRTY)
        if world.phase == RESTORING and hit:
            after = after._replace(phase=ABORTING)
        return after._replace(ranks=tuple(ranks))

    # --- the swap ---

    def swap(self, world: World) -> Iterator[Move[World]]:
        homes = self.homes(world)
        if homes is None:
            self.ends.add("no node")
            yield Move("no node is left: the job waits, then ends", world._replace(phase=OVER))
            return
        survivors = [
            Survivor(i, r.node, Stamp(Generation(1, r.generation), r.version))
            for i, r in enumerate(world.ranks)
            if r.status == LEFT or (self.rules.dirty_offers and r.status == DIRTY)
        ]
        kept = {
            node: [
                KeptSlot(self.bundles[number].key, its)
                for number, cells in enumerate(pairs)
                for its in map(slot, cells)
                if its is not None
            ]
            for node, pairs in enumerate(world.slots)
            if world.alive[node]
        }
        plan = self.rules.plan(self.bundles, survivors, kept, dict(enumerate(homes)), lineage_of(world.lineage))
        if plan is None:
            self.ends.add(self.excuse(world, survivors, kept))
            yield Move("no common version is left", world._replace(phase=OVER))
            return
        self.judge(world, plan)
        yield self.move(f"all resume at {plan.stamp.version}", self.planned(world, plan, homes))

    def homes(self, world: World) -> tuple[int, ...] | None:
        taken = {r.node for r in world.ranks if world.alive[r.node]}
        free = [node for node in range(self.nodes) if world.alive[node] and node not in taken]
        homes = [r.node if world.alive[r.node] else (free.pop(0) if free else -1) for r in world.ranks]
        return None if -1 in homes else tuple(homes)

    def planned(self, world: World, plan: recovery.Recovery, homes: tuple[int, ...]) -> World:
        began, stamp = world.generation + 1, plan.stamp
        lineage = lineage_of(world.lineage).resumed(Generation(1, began), stamp.version)
        ranks = tuple(
            Rank(homes[i], LOADING if i in plan.moved else LOADED, stamp.generation.n, stamp.version)
            for i in range(len(world.ranks))
        )
        after = World(
            RESTORING, began, stamp.version, tuple((s.generation.n, s.version) for s in lineage.resumes),
            world.alive, ranks, tuple(tuple(closed(cells) for cells in pairs) for pairs in world.slots), world.faults,
            world.cover,
        )  # fmt: skip
        return self.running(after) if not plan.moved else after

    def loaded(self, world: World, i: int, rank: Rank) -> World:
        after = put(world, i, rank._replace(status=LOADED))
        return self.running(after) if all(r.status == LOADED for r in after.ranks) else after

    def running(self, world: World) -> World:
        stamps = {(r.generation, r.version) for r in world.ranks}
        assert len(stamps) == 1, f"ranks resume with different states: {sorted(stamps)}"
        return world._replace(phase=RUNNING, ranks=tuple(r._replace(status=LIVE) for r in world.ranks))

    # --- promises ---

    def promise(self, world: World) -> None:
        """From the first optimizer of a generation on, one version is complete: each single fault leaves it. After that fault
        slots alone have a common version: processes may all be killed."""
        began = any(r.status == STEPPING or r.version > world.resume for r in world.ranks)
        if began:
            assert self.complete(world) >= 0, "nothing is complete although an optimizer has run"
        if world.cover:
            assert self._common(world.slots, world.lineage), "slots alone have no common version"

    def _common_in(self, slots: tuple[tuple[Cells, ...], ...], line: tuple[tuple[int, int], ...]) -> bool:
        lineage = lineage_of(line)
        versions = [
            {cell for pairs in slots for cell in pairs[number] if commit.intact(slot(cell), lineage)}
            for number in range(len(self.bundles))
        ]
        return bool(set.intersection(*versions))

    def excuse(self, world: World, survivors: list[Survivor], kept: Mapping[int, list[KeptSlot]]) -> str:
        """No common version: only if some bundle has no copy at all any more, or none that can be given away, and never after
        a single fault once a version was complete."""
        lineage = lineage_of(world.lineage)
        copies = {k.bundle for slots in kept.values() for k in slots if commit.intact(k.slot, lineage)}
        live = {s.rank for s in survivors}
        assert world.floor < 0, "there is no common version although one was complete"
        if any(bundle.key not in copies and not live & set(bundle.holders) for bundle in self.bundles):
            return "no version"
        out_of_reach = [b for b in self.bundles if b.key not in copies and not live >= set(b.holders)]
        assert out_of_reach, "there is no common version although every bundle has a copy"
        return "no slot"  # a rank that is live has it, which nobody serves from

    def judge(self, world: World, plan: recovery.Recovery) -> None:
        stamp = plan.stamp
        cell = (stamp.generation.n, stamp.version, True)
        for i, sources in plan.sources.items():
            for source in sources:
                if source.kind in (SourceKind.ITSELF, SourceKind.HOLDER):
                    giver = world.ranks[i if source.kind is SourceKind.ITSELF else source.holder]
                    there = giver.status == LEFT and (giver.generation, giver.version) == cell[:2]
                else:
                    there = world.alive[source.node] and cell in world.slots[source.node][self.index[source.bundle]]
                assert there, f"rank {i} is to load what is not there: {source}"
        assert stamp.version >= world.floor, "a version is lost that was complete"
        lost = recovery.lost_steps((r.version for r in world.ranks), stamp.version)
        assert lost <= (INTERVAL if self.skips else 1), f"{lost} completed steps are lost"

    def goal(self, world: World) -> bool:
        """The job goes on: it has completed a version of this generation's own; or it has come to an orderly end."""
        if world.phase == OVER:
            return True
        return world.phase == RUNNING and self.complete(world) > world.resume
