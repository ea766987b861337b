"""One of a thing is not called several."""

from __future__ import annotations

import pytest

from phoenix_launch.job.environment import job_wide_environment
from phoenix_launch.wording import MOST_NAMES, counted, names_listed, ranks_named, size_named


def test_numbers_and_their_nouns_agree() -> None:
    assert [counted(number, "node") for number in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]


@pytest.mark.parametrize(
    ("ranks", "text"), [((), "no rank"), ((7,), "rank 7"), ((2, 3), "ranks 2-3"), ((4, 0, 1), "ranks 0-1,4")]
)
def test_ranks_are_named_in_short(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_named(ranks) == text


def test_a_list_of_names_fits_into_a_line() -> None:
    assert names_listed(["a", "b"]) == "a, b"
    assert names_listed([str(n) for n in range(MOST_NAMES + 2)]).endswith(" and 2 more")


def test_one_core_is_no_cores() -> None:
    _, remark = job_wide_environment({}, cores=1, workers_on_machine=2, workers_per_node=2)
    assert "(1 core for 2 workers)" in remark


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (512, "512 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (150 << 20, "150 MiB"), (3.2 * (1 << 30), "3.2 GiB"),
     (1 << 40, "1 TiB"), (5000 << 40, "5000 TiB")],
)  # fmt: skip
def test_sizes_have_three_digits(size: float, text: str) -> None:
    assert size_named(size) == text
