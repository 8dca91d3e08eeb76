# SPDX-License-Identifier: Apache-2.0
"""Which ranks share one copy of the KV cache: DCP groups beside PCP groups.

Ranks are numbered PCP-major, TP-minor. vLLM cuts DCP groups out of that numbering, which makes them
parts of a TP group. With P > 1 a DCP group goes along the PCP axis first, then along TP::

    TP = 2, P = 2    TP [0 1] [2 3]    PCP [0 2] [1 3]
    D = P            DCP [0 2] [1 3]   these ranks have the same heads
    D = TP x P       DCP [0 2 1 3]     heads differ between the TP halves

A rank's place in such a list, its DCP rank, says which tokens it keeps. ``torch.distributed`` sorts
the ranks of a group: collectives hand out their results in the order of ``gather_order``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import (
    GroupCoordinator,
    get_dcp_group,
    get_pcp_group,
    get_tp_group,
    get_world_group,
    init_model_parallel_group,
)


def dcp_group_ranks(
    world_size: int,
    tensor_parallel_size: int,
    prefill_context_parallel_size: int,
    decode_context_parallel_size: int,
) -> list[list[int]]:
    """Return the global ranks of every DCP group, in the order of their DCP ranks.

    Args:
        world_size: All ranks; those that differ in anything but PCP and TP are never in one group.
        tensor_parallel_size: Its axis is the innermost.
        prefill_context_parallel_size: Its axis is the next.
        decode_context_parallel_size: 1, P or TP x P.
    """
    ranks = torch.arange(world_size)
    ranks = ranks.view(-1, prefill_context_parallel_size, tensor_parallel_size).transpose(1, 2)
    groups: list[list[int]] = ranks.reshape(-1, decode_context_parallel_size).tolist()
    return groups


def init_dcp_group() -> None:
    """Put this package's DCP group in place of the one that vLLM has just initialised.

    Nothing may have kept the group itself; ``make_pcp_runner`` sets the rank that the stock runner
    has kept. With P = 1, or where both have the same ranks, vLLM's stays.

    Collectives: process groups are created by all ranks of the world.
    """
    old = get_dcp_group()
    world_size = dist.get_world_size()
    groups = dcp_group_ranks(
        world_size, get_tp_group().world_size, get_pcp_group().world_size, old.world_size
    )
    if sorted(groups) == torch.arange(world_size).view(-1, old.world_size).tolist():
        return
    old.destroy()
    world = get_world_group()
    parallel_state._DCP = init_model_parallel_group(
        groups, world.local_rank, dist.get_backend(world.device_group), group_name="dcp"
    )


def gather_order(group: GroupCoordinator) -> list[int]:
    """Return where what each rank of a group sent stands in a gathered tensor, by rank in group."""
    in_order = sorted(group.ranks)
    return [in_order.index(rank) for rank in group.ranks]
