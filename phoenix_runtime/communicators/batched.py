"""batch_isend_irecv on swappable groups. torch coalesces only where `type(group) is ProcessGroup`; NCCL needs it always.

Several sends and receives that NCCL does not know to belong together may wait for each other for ever. gloo needs none of
this. (Not run on a GPU yet.)
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from phoenix_runtime.communicators.group import PhoenixGroup

_plain = distributed_c10d.batch_isend_irecv


def coalesce_swappable() -> None:
    """Take torch's function's place; whoever imported it by name before keeps torch's own."""
    if distributed_c10d.batch_isend_irecv is _plain:
        distributed_c10d.batch_isend_irecv = batch_isend_irecv
        dist.batch_isend_irecv = batch_isend_irecv


def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    group = p2p_op_list[0].group if p2p_op_list else None
    group = group if group is not None else dist.group.WORLD
    if not isinstance(group, PhoenixGroup):
        return _plain(p2p_op_list)
    device = p2p_op_list[0].tensor.device
    if not group.inner._get_backend(device).supports_coalescing:
        return _plain(p2p_op_list)
    distributed_c10d._check_p2p_op_list(p2p_op_list)
    group._start_coalescing(device)
    for operation in p2p_op_list:
        peer = "group_dst" if operation.op is dist.isend else "group_src"
        arguments: dict[str, Any] = {peer: operation.group_peer}
        operation.op(operation.tensor, group=operation.group, tag=operation.tag, **arguments)
    return [group._end_coalescing(device)]
