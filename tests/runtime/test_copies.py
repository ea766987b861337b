"""What single ranks decide to copy is, all together, what the commit rule's plan says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phoenix_launch.job import commit
from phoenix_launch.messages import Ground
from phoenix_runtime.checkpoint.copies import OwnCopy, copies_of, nodes_of, slice_of


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Ground, list[commit.Bundle]]:
    nodes = draw(st.permutations(range(draw(st.integers(1, 5)))))
    ranks = range(draw(st.integers(1, 8)))
    places = {rank: draw(st.sampled_from(nodes)) for rank in ranks}
    inhabited = [node for node in nodes if node in places.values()]
    domains = tuple((node, draw(st.sampled_from("abc"))) for node in inhabited)
    sets = draw(st.sets(st.frozensets(st.sampled_from(ranks), min_size=1), max_size=6))
    table = [commit.Bundle(str(sorted(holders)), tuple(sorted(holders))) for holders in sets]
    table += [commit.Bundle(f"private {rank}", (rank,), private=True) for rank in ranks]
    return Ground(places, domains, ()), table


@given(jobs())
def test_all_ranks_together_fill_the_whole_plan_each_copy_once(job: tuple[Ground, list[commit.Bundle]]) -> None:
    ground, table = job
    found: list[commit.Copy] = []
    for rank, node in ground.places.items():
        for copy in copies_of(rank, [bundle for bundle in table if rank in bundle.holders], ground):
            if copy.part:
                continue  # it is filled together with part 0
            found.append(commit.Copy(copy.bundle, node, node))
            found.extend(commit.Copy(copy.bundle, replica, node) for replica in copy.replicas)
    assert sorted(found) == sorted(commit.copy_plan(table, ground.places, dict(ground.domains)).copies)


def test_the_ranks_of_a_node_fill_together_what_they_hold_together() -> None:
    ground = Ground({0: 0, 1: 0, 2: 1, 3: 1}, ((0, "a"), (1, "b")), ())
    everywhere = commit.Bundle("ranks 0-3", (0, 1, 2, 3))
    alone = {rank: commit.Bundle(f"private {rank}", (rank,), private=True) for rank in range(4)}
    assert copies_of(0, [everywhere, alone[0]], ground) == (OwnCopy("ranks 0-3", (), 0, 2), OwnCopy("private 0", (1,)))
    assert copies_of(1, [everywhere, alone[1]], ground) == (OwnCopy("ranks 0-3", (), 1, 2), OwnCopy("private 1", (1,)))
    assert copies_of(2, [everywhere, alone[2]], ground) == (OwnCopy("ranks 0-3", (), 0, 2), OwnCopy("private 2", (0,)))


def test_what_goes_to_another_node_is_filled_by_one_rank() -> None:
    """It has a checksum, which is made over the whole."""
    ground = Ground({0: 0, 1: 0, 2: 1}, ((0, "a"), (1, "b")), ())
    pair = commit.Bundle("ranks 0-1", (0, 1))
    assert copies_of(0, [pair], ground) == (OwnCopy("ranks 0-1", (1,)),)
    assert copies_of(1, [pair], ground) == ()


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_slices_are_neighbours_and_leave_nothing_out(sizes: list[int], parts: int) -> None:
    found = [slice_of(sizes, part, parts) for part in range(parts)]
    assert [index for each in found for index in each] == list(range(len(sizes)))
    share = sum(sizes) / parts
    assert all(sum(sizes[i] for i in each) <= share + max(sizes, default=0) for each in found)


def test_slices_of_equal_tensors_are_equal() -> None:
    assert [len(slice_of([8] * 12, part, 4)) for part in range(4)] == [3, 3, 3, 3]


def test_a_node_that_cannot_be_reached_is_passed_over() -> None:
    ground = Ground({0: 0, 1: 1, 2: 2}, ((0, "a"), (1, "b"), (2, "c")), ())
    private = commit.Bundle("private 0", (0,), private=True)
    assert copies_of(0, [private], ground) == (OwnCopy("private 0", (1,)),)
    assert copies_of(0, [private], ground, {1}) == (OwnCopy("private 0", (2,)),)
    assert copies_of(0, [private], ground, {1, 2}) == (OwnCopy("private 0"),)
    assert nodes_of(private, ground, {1}) == (0, 2)


def test_replicas_are_as_many_and_as_far_away_as_the_job_wants() -> None:
    domains = ((0, "a"), (1, "b"), (2, "c"), (3, "d"))
    ground = Ground({rank: rank for rank in range(4)}, domains, (), replicas=2, distance=2)
    private = commit.Bundle("private 1", (1,), private=True)
    assert copies_of(1, [private], ground) == (OwnCopy("private 1", (3, 0)),)
