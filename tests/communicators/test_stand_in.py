"""Operations that do not communicate leave plausible values, never what was in memory before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from phoenix_runtime.communicators import stand_in

RANK = 1
GARBAGE = 7.7e30


def garbage(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, GARBAGE if dtype.is_floating_point else 1 << 50, dtype=dtype)


OWN = torch.tensor([1.0, 2.0])


def broadcast_options(root: int) -> Any:
    options = c10d.BroadcastOptions()
    options.rootRank = root
    return options


@pytest.mark.parametrize(
    ("operation", "output", "arguments", "expected"),
    [
        ("allgather", [[garbage(2), garbage(2)]], lambda out: (out, [OWN]), [[OWN, OWN]]),
        ("all_gather_single", garbage(4), lambda out: (out, OWN), torch.tensor([1.0, 2.0, 1.0, 2.0])),
        ("all_gather_single_coalesced", [garbage(2, 2)], lambda out: (out, [OWN]), [torch.stack([OWN, OWN])]),
        ("allgather_coalesced", [[garbage(2)], [garbage(2)]], lambda out: (out, [OWN]), [[OWN], [OWN]]),
        ("gather", [[garbage(2), garbage(2)]], lambda out: (out, [OWN]), [[OWN, OWN]]),
        ("gather", [], lambda out: (out, [OWN]), []),
        ("scatter", [garbage(2)], lambda out: (out, [[OWN, OWN + 1]]), [OWN + 1]),
        ("scatter", [garbage(2)], lambda out: (out, []), [torch.zeros(2)]),
        ("reduce_scatter", [garbage(2)], lambda out: (out, [[OWN, OWN + 1]]), [OWN + 1]),
        ("reduce_scatter_single", garbage(2), lambda out: (out, torch.arange(4.0)), torch.tensor([2.0, 3.0])),
        ("reduce_scatter_single_coalesced", [garbage(1)], lambda out: (out, [OWN]), [torch.tensor([2.0])]),
        ("all_to_all_single", garbage(2), lambda out: (out, OWN, [], []), OWN),
        ("all_to_all_single", garbage(3), lambda out: (out, OWN, [3], [2]), torch.tensor([1.0, 2.0, 0.0])),
        ("alltoall", [garbage(1), garbage(2)], lambda out: (out, [OWN, OWN]), [torch.tensor([1.0]), OWN]),
        ("recv", [garbage(2)], lambda out: (out, 0, 0), [torch.zeros(2)]),
        ("recv_anysource", [garbage(2, dtype=torch.int64)], lambda out: (out, 0), [torch.zeros(2, dtype=torch.int64)]),
        ("all_gather_single", garbage(0), lambda out: (out, torch.ones(0)), torch.ones(0)),
    ],
)
def test_every_output_is_filled_as_if_all_ranks_had_sent_what_this_one_did(
    operation: str, output: Any, arguments: Callable[[Any], tuple[Any, ...]], expected: Any
) -> None:
    stand_in.fill(operation, RANK, arguments(output))
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "root", "kept"), [(torch.int64, 0, False), (torch.int64, RANK, True), (torch.float32, 0, True)]
)
def test_sizes_that_were_never_received_are_zero(dtype: torch.dtype, root: int, kept: bool) -> None:
    tensor = garbage(3, dtype=dtype)
    before = tensor.clone()
    stand_in.fill("broadcast", RANK, ([tensor], broadcast_options(root)))
    assert torch.equal(tensor, before if kept else torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("operation", ["allreduce", "reduce", "barrier", "send"])
def test_what_writes_into_its_own_input_leaves_it(operation: str) -> None:
    tensor = OWN.clone()
    stand_in.fill(operation, RANK, ([tensor],))
    assert torch.equal(tensor, OWN)


def test_a_tensor_that_needs_a_gradient_can_be_filled() -> None:
    output = torch.full((2,), GARBAGE, requires_grad=True)
    stand_in.fill("recv", RANK, ([output], 0, 0))
    assert torch.equal(output.detach(), torch.zeros(2)) and output.grad_fn is None
