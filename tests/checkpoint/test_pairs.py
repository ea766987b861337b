"""A pair of slots under concurrent writers, readers and generations: nobody waits for ever, and nobody writes over a reader."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from phoenix_launch.checkpoint import pairs as pairs_module
from phoenix_launch.checkpoint.layout import Entry, Layout
from phoenix_launch.checkpoint.pairs import Grant, NoRoomError, SlotPairs, SlotRefusedError, Standing, Wish
from phoenix_launch.checkpoint.slots import SlotMemory, SlotWriter, slot_size
from phoenix_launch.copies import Stamp
from phoenix_launch.job.commit import Lineage
from phoenix_launch.wire import Generation

G1, G2 = Generation(1, 1), Generation(1, 2)
LAYOUT = Layout.of([Entry("w", "float32", (8,), 32)])
SECONDS = 10.0


def wish(version: int, *, writer: object = "w", generation: Generation = G1, complete: int = -1) -> Wish:
    return Wish(
        writer=writer,
        generation=generation,
        bundle="b",
        stamp=Stamp(generation, version),
        complete=complete,
        size=slot_size(LAYOUT, 0),
    )


def begun(pairs: SlotPairs, asked: Wish) -> Grant:
    grant = pairs.begin(asked, 0.0)
    assert grant is not None
    return grant


def write(grant: Grant) -> None:
    writer = SlotWriter(grant.memory.descriptor)
    writer.begin("job", grant.wish.bundle, grant.wish.stamp, LAYOUT)
    writer.seal()
    writer.close()


def sealed(pairs: SlotPairs, asked: Wish) -> None:
    grant = begun(pairs, asked)
    write(grant)
    pairs.seal(grant)


def versions(pairs: SlotPairs) -> list[int]:
    return [kept.slot.stamp.version for kept in pairs.kept()[1]]


@pytest.fixture
def pairs() -> SlotPairs:
    pairs = SlotPairs("job")
    pairs.follow(Standing(G1))
    return pairs


def test_only_one_writer_fills_a_pair_at_a_time(pairs: SlotPairs, eventually: Callable[..., object]) -> None:
    first = begun(pairs, wish(0))
    with pytest.raises(SlotRefusedError, match="in use"):
        pairs.begin(wish(0, writer="another"), 0.01)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(pairs.begin, wish(0, writer="another"), SECONDS)
        write(first)
        pairs.seal(first)
        assert waiting.result(SECONDS) is None, "it is there by now"


def test_what_a_writer_began_and_never_sealed_it_may_begin_again(pairs: SlotPairs) -> None:
    first = begun(pairs, wish(0))
    again = begun(pairs, wish(1))
    assert again.memory is first.memory
    write(again)
    with pytest.raises(SlotRefusedError, match="does not hold"):
        pairs.seal(first)
    assert versions(pairs) == []


def test_a_slot_is_not_written_over_while_it_is_sent(pairs: SlotPairs) -> None:
    sealed(pairs, wish(0))
    sealed(pairs, wish(1))
    with ThreadPoolExecutor(1) as other:
        with pairs.reading("b", Stamp(G1, 0)) as memory:
            assert memory is not None
            with pytest.raises(SlotRefusedError, match="in use"):
                pairs.begin(wish(2, complete=1), 0.01)
            waiting = other.submit(pairs.begin, wish(2, complete=1), SECONDS)
            assert memory.header() is not None
        grant = waiting.result(SECONDS)
        assert grant is not None and grant.memory is memory


def test_a_seal_that_is_missing_or_of_another_copy_is_not_taken(pairs: SlotPairs) -> None:
    with pytest.raises(SlotRefusedError, match="does not hold a whole copy"):
        pairs.seal(begun(pairs, wish(0)))
    grant = begun(pairs, wish(0))
    writer = SlotWriter(grant.memory.descriptor)
    writer.begin("another job", "b", Stamp(G1, 0), LAYOUT)
    writer.seal()
    with pytest.raises(SlotRefusedError, match="does not hold a whole copy"):
        pairs.seal(grant)
    assert versions(pairs) == []


def test_an_open_slot_gets_other_memory_when_the_generation_changes(pairs: SlotPairs) -> None:
    old = begun(pairs, wish(0))
    pairs.follow(Standing(G2))
    new = begun(pairs, wish(0, writer="new", generation=G2))
    assert new.memory is not old.memory
    write(old)
    with pytest.raises(SlotRefusedError, match="may not write"):
        pairs.seal(old)
    write(new)
    pairs.seal(new)
    assert pairs.kept()[1][0].slot.stamp == Stamp(G2, 0)


def test_a_writer_that_knows_of_a_generation_first_is_waited_for(pairs: SlotPairs) -> None:
    with pytest.raises(SlotRefusedError, match="may not write"):
        pairs.begin(wish(0, generation=G2), 0.01)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(pairs.begin, wish(0, generation=G2), SECONDS)
        pairs.follow(Standing(G2))
        assert waiting.result(SECONDS) is not None


def test_an_older_generations_word_is_not_heard(pairs: SlotPairs) -> None:
    pairs.follow(Standing(G2))
    pairs.follow(Standing(G1))
    assert pairs.generation == G2
    with pytest.raises(SlotRefusedError, match="may not write"):
        pairs.begin(wish(0), 0.0)


def test_a_version_that_a_later_generation_made_void_cannot_be_written(pairs: SlotPairs) -> None:
    pairs.follow(Standing(G2, 3, Lineage().resumed(G2, 3)))
    with pytest.raises(SlotRefusedError, match="is void"):
        pairs.begin(replace(wish(4, generation=G2), stamp=Stamp(G1, 4)), 0.0)
    begun(pairs, replace(wish(3, generation=G2), stamp=Stamp(G1, 3)))


def test_a_new_generation_lets_go_what_is_older_than_the_version_it_resumed_at(pairs: SlotPairs) -> None:
    sealed(pairs, wish(2))
    sealed(pairs, wish(3))
    pairs.follow(Standing(G2, 3, Lineage().resumed(G2, 3)))
    with pytest.raises(SlotRefusedError, match="still needed"):
        pairs.begin(replace(wish(4, generation=G2)), 0.0)
    sealed(pairs, wish(4, generation=G2, complete=3))
    assert sorted(versions(pairs)) == [3, 4]


def test_memory_that_comes_too_late_is_not_handed_out(pairs: SlotPairs, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def slow(size: int) -> SlotMemory:
        asked.set()
        assert go_on.wait(SECONDS)
        return SlotMemory(size)

    monkeypatch.setattr(pairs_module, "SlotMemory", slow)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(pairs.begin, wish(0), SECONDS)
        assert asked.wait(SECONDS)
        pairs.follow(Standing(G2))
        go_on.set()
        with pytest.raises(SlotRefusedError, match="replaced meanwhile"):
            waiting.result(SECONDS)
    monkeypatch.undo()
    sealed(pairs, wish(0, generation=G2))


def test_every_change_of_what_is_kept_is_told() -> None:
    told: list[list[int]] = []
    watched = SlotPairs("job", lambda: told.append(versions(watched)))
    watched.follow(Standing(G1))
    sealed(watched, wish(0))
    sealed(watched, wish(1))
    begun(watched, wish(2, complete=1))
    assert [entry for i, entry in enumerate(told) if i == 0 or entry != told[i - 1]] == [[], [0], [0, 1], [1]]


# --- memory ----------------------------------------------------------------------------------------------------------


def test_a_copy_for_which_there_is_no_room_is_refused_before_anything_is_overwritten() -> None:
    free = [1e12]
    pairs = SlotPairs("job", free=lambda: free[0])
    pairs.follow(Standing(G1))
    sealed(pairs, wish(0))
    sealed(pairs, wish(1))
    free[0] = 0
    with pytest.raises(NoRoomError, match="copies in memory need"):
        pairs.begin(replace(wish(2, complete=1), size=1 << 30), 0.0)
    assert versions(pairs) == [0, 1]
    sealed(pairs, wish(2, complete=1))
    assert versions(pairs) == [2, 1], "what needs no more memory goes on"


def test_what_later_versions_will_need_counts_already_at_the_first() -> None:
    pairs = SlotPairs("job", free=lambda: 1e12, limit=1 << 20)
    pairs.follow(Standing(G1))
    with pytest.raises(NoRoomError, match="--copy-memory allows 1 MiB"):
        pairs.begin(replace(wish(0), expected=1 << 20), 0.0)
    sealed(pairs, wish(0))


def test_pairs_of_other_bundles_count_too() -> None:
    pairs = SlotPairs("job", free=lambda: 1e12, limit=4 * SlotMemory(1).size)
    pairs.follow(Standing(G1))
    for bundle in ("a", "b"):
        begun(pairs, replace(wish(0), bundle=bundle))
    with pytest.raises(NoRoomError):
        pairs.begin(replace(wish(0), bundle="c"), 0.0)


def test_copies_that_a_generation_no_longer_makes_here_go_when_a_later_version_is_complete(pairs: SlotPairs) -> None:
    for bundle in ("b", "gone"):
        sealed(pairs, replace(wish(3), bundle=bundle))
    pairs.follow(Standing(G2, 3, Lineage((Stamp(G2, 3),))))
    sealed(pairs, wish(4, generation=G2, complete=3))
    assert [(kept.bundle, kept.slot.stamp.version) for kept in pairs.kept()[1]] == [("b", 3), ("b", 4), ("gone", 3)]
    sealed(pairs, wish(5, generation=G2, complete=4))
    assert [(kept.bundle, kept.slot.stamp.version) for kept in pairs.kept()[1]] == [("b", 5), ("b", 4)]


def test_the_arithmetic_waits_for_all_workers_of_the_node_and_counts_replicas_like_those_it_gives() -> None:
    unit = SlotMemory(1).size
    pairs = SlotPairs("job", free=lambda: 1e12, limit=unit)
    pairs.workers = 2
    pairs.follow(Standing(G1))
    pairs.announce("w", [("b", 100, 1)])
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(pairs.begin, wish(0), SECONDS)
        pairs.announce("another", [("c", unit, 0), ("d", unit, 1)])
        with pytest.raises(NoRoomError) as found:
            waiting.result(SECONDS)
    error = found.value
    assert (error.need, error.limited, error.replicas) == (2 * 3 * unit + 2 * 2 * unit, True, True)


def test_what_a_worker_that_is_gone_wanted_does_not_count() -> None:
    unit = SlotMemory(1).size
    pairs = SlotPairs("job", free=lambda: 1e12, limit=2 * unit)
    pairs.follow(Standing(G1))
    pairs.announce("gone", [("c", 100 * unit, 1)])
    pairs.forget_writer("gone")
    sealed(pairs, wish(0))
