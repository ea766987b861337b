"""Cases that go wrong in every way, to see that the ranks say which one it was and go on with the next."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist
from case_table import Rank, case


@case()
def one_rank_is_late_for_ever(rank: Rank) -> object:
    if rank.number != 2:
        dist.all_reduce(torch.ones(1))
    else:
        signal.pause()
    return None


@case()
def one_rank_fails(rank: Rank) -> object:
    if rank.number == 1:
        raise LookupError("rank 1 has lost it")
    dist.all_reduce(torch.ones(1))
    return None


@case()
def one_process_ends(rank: Rank) -> object:
    if rank.number == 3:
        os._exit(0)
    return rank.number


@case()
def backends_differ(rank: Rank) -> object:
    return torch.tensor([0.1]) + (1e-8 if rank.backend == "phoenix" and rank.number == 2 else 0.0)


@case()
def all_is_well(rank: Rank) -> object:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor
