# SPDX-License-Identifier: Apache-2.0
"""Collectives between ranks that share one copy of the KV cache.

Shapes come from the global batch, so that all ranks agree on them. On GPUs they run on the current
stream and never make the host wait.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from vllm.distributed.parallel_state import get_dcp_group, get_tp_group
from vllm.distributed.pcp.collectives import pynccl_communicator
from vllm.distributed.pcp.groups import gather_order
from vllm.distributed.pcp.kv_shards import KVShards


def kv_shards(interleave: int) -> KVShards:
    """Return how the ranks of this process's DCP group share the KV cache."""
    group = get_dcp_group()
    return KVShards(group.world_size, group.rank_in_group, interleave, tuple(gather_order(group)))


def gather_shards(gathered: torch.Tensor, own_rows: torch.Tensor) -> None:
    """Fill in what the other ranks have in their parts.

    Args:
        gathered: ``[D * num_rows, width]``, contiguous, the same shape on every rank; FP8 as bytes,
            NCCL knows none.
        own_rows: ``KVShards.own_rows`` of it, filled.

    Collectives: one all_gather on the DCP group.
    """
    group = get_dcp_group()
    pynccl = pynccl_communicator(group)
    if pynccl is None:
        dist.all_gather_into_tensor(gathered, own_rows, group=group.device_group)
    else:
        pynccl.all_gather(gathered, own_rows)


def exchange_blocks(*exchanges: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Send each rank its block, and receive this rank's from each, by place in ``gather_order``.

    Args:
        *exchanges: ``[B, ...]`` to send and ``[D, ...]`` to fill, contiguous, the same shapes on
            every rank. Place p is sent block ``p % B``: its own, with B = D; with B = D / P that of
            its heads, since ranks are numbered TP-minor.

    Collectives: an all-to-all for each exchange on the DCP group, on GPUs as one NCCL group: one
    launch.
    """
    group = get_dcp_group()
    size = group.world_size
    pynccl = pynccl_communicator(group)
    if pynccl is None:
        for sent, received in exchanges:
            blocks = sent.repeat(size // sent.shape[0], *[1] * (sent.dim() - 1))
            dist.all_to_all_single(received, blocks, group=group.device_group)
        return
    pynccl.group_start()
    for sent, received in exchanges:
        for peer in range(size):
            pynccl.send(sent[peer % sent.shape[0]], peer)
            pynccl.recv(received[peer], peer)
    pynccl.group_end()


def gather_heads(q: torch.Tensor) -> torch.Tensor:
    """Return ``[num_tokens, TP * num_heads, head_size]``, the heads of all TP ranks in rank order.

    Args:
        q: ``[num_tokens, num_heads, head_size]``, of any strides and any dtype, the same shape on
            every rank.

    Collectives: one all_gather on the TP group.
    """
    # NCCL knows no FP8, shared memory no bytes.
    rows = q.contiguous().view(torch.uint8) if q.dtype.itemsize == 1 else q.contiguous()
    return get_tp_group().all_gather(rows, dim=1).view(q.dtype)


def gather_lse(lse: torch.Tensor) -> torch.Tensor:
    """Return ``[D, num_tokens, num_heads]``, everybody's, in no particular order.

    Args:
        lse: ``[num_tokens, num_heads]``, contiguous, the same shape on every rank.

    Collectives: one all_gather on the DCP group.
    """
    return get_dcp_group().all_gather(lse, dim=0).view(-1, *lse.shape)


def sum_over_shards(partial: torch.Tensor) -> torch.Tensor:
    """Return the sum over ranks, the same bits on each.

    Args:
        partial: Contiguous, the same shape on every rank; may be overwritten.

    Collectives: one all_reduce on the DCP group.
    """
    return get_dcp_group().all_reduce(partial)
