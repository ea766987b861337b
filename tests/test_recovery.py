"""The plan of a recovery: what it decides for typical faults, and what holds for whatever the survivors may offer."""

from __future__ import annotations

import random
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from phoenix_launch.copies import KeptSlot, Slot, Source, SourceKind, Stamp, StartupCopy
from phoenix_launch.job.commit import Bundle, Lineage, intact
from phoenix_launch.job.recovery import Recovery, Survivor, lost_steps, plan, startups
from phoenix_launch.wire import Generation

G1, G2, G3 = (Generation(1, n) for n in (1, 2, 3))
OWN = (Bundle("own0", (0,), private=True), Bundle("own1", (1,), private=True))
SHARED = Bundle("shared", (0, 1))
DDP = (*OWN, SHARED)


def at(version: int, generation: Generation = G1) -> Stamp:
    return Stamp(generation, version)


def kept(bundle: str, *versions: int) -> list[KeptSlot]:
    return [KeptSlot(bundle, Slot(at(version))) for version in versions]


def test_a_dead_process_is_restored_from_the_slots_of_its_own_node() -> None:
    slots = {0: kept("own0", 4, 5) + kept("own1", 4, 5), 1: kept("own1", 4, 5) + kept("own0", 4, 5)}
    found = plan(OWN, [Survivor(0, 0, at(5))], slots, {0: 0, 1: 1}, Lineage())
    assert found == Recovery(
        at(5),
        {0: (Source("own0", SourceKind.ITSELF, 0),), 1: (Source("own1", SourceKind.OWN_NODE, 1),)},
    )


def test_a_dead_node_is_restored_from_its_partner() -> None:
    found = plan(OWN, [Survivor(0, 0, at(5))], {0: kept("own0", 4, 5) + kept("own1", 4, 5)}, {0: 0, 1: 2}, Lineage())
    assert found is not None
    assert found.sources[1] == (Source("own1", SourceKind.OTHER_NODE, 0),)
    assert found.moved == {1}


def test_a_survivor_that_is_ahead_goes_back() -> None:
    slots = {0: kept("own0", 4, 5) + kept("own1", 4, 5)}
    found = plan(OWN, [Survivor(0, 0, at(6))], slots, {0: 0, 1: 2}, Lineage())
    assert found is not None
    assert found.stamp == at(5)
    assert found.sources[0] == (Source("own0", SourceKind.OWN_NODE, 0),)


def test_a_live_replica_gives_what_no_slot_has() -> None:
    found = plan(DDP, [Survivor(0, 0, at(5))], {0: kept("own1", 5)}, {0: 0, 1: 2}, Lineage())
    assert found is not None
    assert found.sources[1] == (
        Source("own1", SourceKind.OTHER_NODE, 0),
        Source("shared", SourceKind.HOLDER, 0, holder=0),
    )


def test_a_dirty_survivor_gives_nothing_but_its_nodes_slots() -> None:
    slots = {0: kept("own0", 4) + kept("own1", 4, 5)}
    found = plan(OWN, [Survivor(0, 0, None)], slots, {0: 0, 1: 2}, Lineage())
    assert found is not None
    assert found.stamp == at(4)


def test_what_is_void_by_lineage_is_neither_loaded_nor_taken_from_a_survivor() -> None:
    slots = {0: kept("own0", 5, 6) + kept("own1", 5, 6)}
    found = plan(OWN, [Survivor(0, 0, at(6))], slots, {0: 0, 1: 2}, Lineage().resumed(G2, 5))
    assert found is not None
    assert found.stamp == at(5)


def test_without_a_common_version_there_is_no_plan() -> None:
    slots = {0: kept("own0", 4) + kept("own1", 5)}
    assert plan(OWN, [Survivor(0, 0, None)], slots, {0: 0, 1: 2}, Lineage()) is None
    assert plan(OWN, [Survivor(0, 0, at(5))], {}, {0: 0, 1: 2}, Lineage()) is None


def test_a_start_needs_the_newest_copy_of_the_private_bundle_that_is_not_void() -> None:
    slots = {0: kept("own0", 6) + kept("own1", 4, 5), 1: kept("own1", 5, 6) + kept("shared", 6), 2: kept("own1", 6)}
    found = startups(DDP, slots, {1: 1}, Lineage())
    assert found == {1: StartupCopy(Source("own1", SourceKind.OWN_NODE, 1), at(6))}
    voided = Lineage((at(5, G2),))
    assert startups(DDP, slots, {1: 2}, voided) == {1: StartupCopy(Source("own1", SourceKind.OTHER_NODE, 0), at(5))}
    assert startups(DDP, {}, {1: 2}, voided) == {}


def test_steps_that_all_had_completed_are_counted_as_lost() -> None:
    assert lost_steps([6, 6], 5) == 1
    assert lost_steps([6, 5], 5) == 0


# --- whatever the survivors offer ------------------------------------------------------------------------------------

stamps = st.builds(Stamp, st.sampled_from((G1, G2)), st.integers(0, 3))
tables = st.sampled_from(
    (OWN, DDP, (*DDP, Bundle("own2", (2,))), (Bundle("all", (0, 1, 2)), Bundle("own2", (2,), private=True)))
)
lineages = st.sampled_from((Lineage(), Lineage().resumed(G2, 1), Lineage().resumed(G2, 0).resumed(G3, 2)))


@st.composite
def faults(draw: st.DrawFn) -> tuple[tuple[Bundle, ...], list[Survivor], dict[int, list[KeptSlot]], Lineage]:
    bundles = draw(tables)
    ranks = sorted({rank for bundle in bundles for rank in bundle.holders})
    alive = draw(st.sets(st.sampled_from(ranks)))
    survivors = [Survivor(rank, rank, draw(st.none() | stamps)) for rank in sorted(alive)]
    slots = st.builds(
        KeptSlot,
        st.sampled_from([bundle.key for bundle in bundles]),
        st.builds(Slot, stamps, st.just(""), st.booleans()),
    )
    return bundles, survivors, {node: draw(st.lists(slots, max_size=8)) for node in range(3)}, draw(lineages)


PLACES = {0: 0, 1: 1, 2: 2}


def available(
    bundle: Bundle, survivors: list[Survivor], slots: Mapping[int, list[KeptSlot]], lineage: Lineage
) -> set[Stamp]:
    found = {s.live for s in survivors if s.rank in bundle.holders and s.live and lineage.loadable(s.live)}
    for here in slots.values():
        found |= {k.slot.stamp for k in here if k.bundle == bundle.key and intact(k.slot, lineage)}
    return found


@settings(max_examples=100, deadline=None)
@given(faults(), st.integers(0, 1 << 30))
def test_the_plan_takes_the_newest_common_version_from_sources_that_have_it(
    fault: tuple[tuple[Bundle, ...], list[Survivor], dict[int, list[KeptSlot]], Lineage], seed: int
) -> None:
    bundles, survivors, slots, lineage = fault
    ranks = {rank for bundle in bundles for rank in bundle.holders}
    places = {rank: PLACES[rank] for rank in ranks}
    found = plan(bundles, survivors, slots, places, lineage)
    common = set.intersection(*(available(bundle, survivors, slots, lineage) for bundle in bundles))
    if found is None:
        assert not common
        return
    assert found.stamp in common
    assert found.stamp.version == max(stamp.version for stamp in common)
    live = {s.rank for s in survivors if s.live == found.stamp}
    for rank, sources in found.sources.items():
        assert [s.bundle for s in sources] == [b.key for b in sorted(bundles) if rank in b.holders]
        for source in sources:
            having = {
                node for node, here in slots.items()
                if any(k.bundle == source.bundle and k.slot.sealed and k.slot.stamp == found.stamp for k in here)
            }  # fmt: skip
            match source.kind:
                case SourceKind.ITSELF:
                    assert rank in live
                case SourceKind.OWN_NODE:
                    assert source.node == places[rank] in having and rank not in live
                case SourceKind.OTHER_NODE:
                    assert source.node in having and places[rank] not in having and rank not in live
                case SourceKind.HOLDER:
                    assert source.holder in live and not having and rank not in live
    chance = random.Random(seed)
    shuffled = [chance.sample(list(its), len(its)) for its in (bundles, survivors)]
    later = {node: chance.sample(slots[node], len(slots[node])) for node in chance.sample(list(slots), len(slots))}
    assert plan(shuffled[0], shuffled[1], later, places, lineage) == found  # type: ignore[arg-type]
