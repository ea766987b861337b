"""What is restored from slots goes on bit for bit: in new processes, and in an old one that goes back to an older version."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from checkpoint_nodes import G1, CheckpointNode
from one_rank import MAKES, Rank, adam
from torch import nn

from phoenix_launch.checkpoint.pairs import SlotRefusedError
from phoenix_launch.copies import SourceKind, Stamp
from phoenix_launch.messages import Ground
from phoenix_runtime import ScriptError
from phoenix_runtime.checkpoint.filling import Footing
from phoenix_runtime.checkpoint.memory import data_sum

FOLDER: Final = Path(__file__).parent
EARLY: Final = ("fsdp early", "zero early")
INTERRUPTED: Final = "interrupted"
TIMEOUT: Final = 280.0

# --- whole ranks -----------------------------------------------------------------------------------------------------


def kinds() -> list[str]:
    """Read, not imported, as in test_repeated_steps.py."""
    for statement in ast.parse((FOLDER / "small_models.py").read_text()).body:
        if isinstance(statement, ast.AnnAssign) and getattr(statement.target, "id", "") == "MODELS":
            assert isinstance(statement.value, ast.Dict)
            return [ast.literal_eval(key) for key in statement.value.keys if key is not None]
    raise AssertionError("small_models.py has no MODELS")


def parameters() -> list[Any]:
    """Kinds whose state looks like another one's are run by hand, as are all of which whole jobs lose ranks (tests/swaps)."""
    here = ("ddp with buffers and unused", EARLY[0])
    return [pytest.param(kind, marks=[] if kind in here else [pytest.mark.slow]) for kind in (*kinds(), *EARLY)]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """All jobs are forked from one process, in which torch is loaded."""
    selected = [item.callspec.params.get("kind") for item in request.session.items if hasattr(item, "callspec")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH_", "GLOO_"))}
    paths = [str(FOLDER), str(FOLDER.parent / "checkpoint"), environment.get("PYTHONPATH", "")]
    chosen = [kind for kind in [*kinds(), *EARLY, INTERRUPTED] if kind in selected]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(FOLDER / "copied_ranks.py"), *chosen],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, done.stderr[-3000:]
    return {line["kind"]: line for line in lines}


@pytest.mark.timeout(TIMEOUT + 20)
@pytest.mark.parametrize("kind", parameters())
def test_new_processes_go_on_from_the_slots_bit_for_bit(found: dict[str, dict[str, Any]], kind: str) -> None:
    job = found[kind]
    assert "error" not in job, job["error"]
    assert job["resumed"] == job["calm"]
    assert len(set(job["calm"])) > 1, "each rank has something of its own: random numbers, shards, buffers"
    assert job["at"] == (0 if kind in EARLY else 2)  # the newest that was begun before the loss
    assert job["complete after"] == [4] * 4
    assert not job["words"]


@pytest.mark.timeout(TIMEOUT + 20)
@pytest.mark.parametrize("kind", [INTERRUPTED])
def test_a_round_that_is_broken_off_holds_nobody_and_the_next_generation_copies_on(
    found: dict[str, dict[str, Any]], kind: str
) -> None:
    job = found[kind]
    assert "error" not in job, job["error"]
    assert job["resumed"] == job["calm"]
    assert job["complete after"] == [4] * 4
    assert job["left within"] < 2.0


# --- one rank --------------------------------------------------------------------------------------------------------


@pytest.fixture
def rank_with(start_node: Callable[[int], CheckpointNode]) -> Any:
    node = start_node(0)
    node.follow(G1)
    ranks: list[Rank] = []

    def make(name: str = "adam", **options: Any) -> Rank:
        ranks.append(Rank(node, MAKES[name], **options))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.copier.end()


@pytest.mark.parametrize("name", MAKES)
def test_a_new_process_has_the_same_optimizer_state(rank_with: Callable[..., Rank], name: str) -> None:
    rank = rank_with(name)
    rank.step()
    rank.step()
    expected = rank.bits()
    rank.step()  # copies what was expected at its entry
    again = rank_with(name, seed=1)
    again.restore(2)
    assert again.bits() == expected and again.state.step == 2
    again.step()
    assert again.bits() == rank.bits()


@pytest.mark.parametrize("name", ["adam", "momentum", "numbers"])
def test_a_process_that_is_ahead_goes_back_to_before_its_optimizer_had_a_state(
    rank_with: Callable[..., Rank], name: str
) -> None:
    rank = rank_with(name)
    before = rank.bits()
    rank.step()
    after = rank.bits()
    weights = list(rank.model.parameters())
    rank.restore(0)
    assert rank.bits() == before
    assert not rank.optimizer.state
    assert all(one is other for one, other in zip(weights, rank.model.parameters(), strict=True))
    rank.copier.resume(Footing(G1, Ground({0: 0}, ((0, "a"),), (rank.node.peer,)), 0, rank.node.path))
    rank.step()
    assert rank.bits() == after


def test_what_a_rank_holds_itself_is_not_touched(rank_with: Callable[..., Rank]) -> None:
    rank = rank_with()
    rank.step()
    bits = rank.bits()
    rank.restore(0, SourceKind.ITSELF)
    assert rank.bits() == bits


def test_a_bundle_that_only_another_process_holds_is_refused(rank_with: Callable[..., Rank]) -> None:
    rank = rank_with()
    rank.step()
    with pytest.raises(SlotRefusedError, match="from rank"):
        rank.restore(0, SourceKind.HOLDER)


@pytest.fixture
def replicated_rank(start_node: Callable[[int], CheckpointNode]) -> Iterator[Rank]:
    """Its copies are on three nodes, one version after its first step."""
    nodes = [start_node(index) for index in range(3)]
    for node in nodes:
        node.follow(G1, nodes)
    rank = Rank(nodes[0], adam, others=nodes[1:])
    rank.step()
    rank.step()
    yield rank
    rank.copier.end()


@pytest.mark.parametrize("damaged", [(0,), (0, 1), (0, 2)])
def test_a_copy_with_a_flipped_bit_is_never_loaded_and_the_next_one_is_taken(
    replicated_rank: Rank, damaged: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    rank = replicated_rank
    rank.restore(1)
    expected = rank.bits()
    rank.step()
    every = [rank.node, *rank.others]
    for index in damaged:
        every[index].flip_a_bit("rank 0", Stamp(G1, 1))
    capsys.readouterr()
    rank.restore(1)
    assert rank.bits() == expected
    assert capsys.readouterr().err.count("was damaged in memory: another copy is taken") == sum(
        index < min({0, 1, 2} - set(damaged)) for index in damaged
    )
    rank.restore(1)
    assert rank.bits() == expected
    again = capsys.readouterr().err.count("was damaged in memory: another copy is taken")
    assert again == (1 in damaged), "the node does not offer its own any more; what another keeps is not its to judge"


def test_without_any_intact_copy_it_is_refused_and_the_nodes_own_is_not_offered_any_more(replicated_rank: Rank) -> None:
    rank = replicated_rank
    for node in (rank.node, *rank.others):
        node.flip_a_bit("rank 0", Stamp(G1, 1))
    bits = rank.bits()
    with pytest.raises(SlotRefusedError, match="damaged"):
        rank.restore(1, nodes=())
    assert rank.bits() == bits, "of a slot everything is known before anything is loaded"
    with pytest.raises(SlotRefusedError, match="damaged"):
        rank.restore(1)
    while any(kept.bundle == "rank 0" and kept.slot.stamp.version == 1 for kept in rank.node.kept.kept):
        rank.node.until_told()


def test_a_checksum_changes_with_every_bit_of_the_data() -> None:
    for size in (0, 1, 8191, 8192, 8193, 100_000):
        data = bytearray(torch.randint(0, 256, (size,), dtype=torch.uint8).tolist())
        sum_ = data_sum(memoryview(data))
        for place in {0, size // 2, size - 1} if size else ():
            for bit in range(8):
                data[place] ^= 1 << bit
                assert data_sum(memoryview(data)) != sum_
                data[place] ^= 1 << bit
        assert data_sum(memoryview(data)) == sum_
        assert data_sum(memoryview(data + b"\0")) != sum_


def test_a_version_that_is_not_there_is_refused(rank_with: Callable[..., Rank]) -> None:
    rank = rank_with()
    rank.step()
    with pytest.raises(SlotRefusedError, match="does not keep it"):
        rank.restore(7)


def test_another_model_than_was_copied_is_named(rank_with: Callable[..., Rank]) -> None:
    rank = rank_with()
    rank.step()
    rank.step()
    for change, words in (
        (lambda model: setattr(model, "second", nn.Linear(5, 3)), r"model\.second\.weight is .*\[3, 5\] here"),
        (lambda model: setattr(model, "third", nn.Linear(1, 1)), r"model\.third\.weight is not both"),
        (lambda model: delattr(model, "second"), r"model\.second\.weight is not both"),
    ):
        again = rank_with(change=change)
        with pytest.raises(ScriptError, match=words):
            again.restore(1)


def test_memory_that_is_not_contiguous_keeps_its_order(rank_with: Callable[..., Rank]) -> None:
    def turn(model: nn.Module) -> None:
        model.first.weight.data = torch.rand(6, 5).t()

    rank = rank_with(seed=3, change=turn)
    expected = rank.bits()
    rank.step()
    again = rank_with(seed=4, change=turn)
    again.restore(0)
    assert again.bits() == expected and again.model.first.weight.stride() == (1, 5)
