# SPDX-License-Identifier: Apache-2.0
"""The best of what ranks selected, each from the keys that it keeps.

A token that is among the best k of all is among the best k of the rank that keeps it, so k
candidates of each rank are enough. A candidate is one number, its score above its position, so that
sorting numbers sorts candidates: all ranks find the same, and of equal scores the first positions.
"""

from __future__ import annotations

import torch

from vllm.distributed.pcp.kv_shards import KVShards
from vllm.distributed.pcp.shard_collectives import gather_shards

_LARGEST = torch.iinfo(torch.int32).max
_NOTHING = torch.iinfo(torch.int64).min


def pack_candidates(logits: torch.Tensor, selected: torch.Tensor, shards: KVShards) -> torch.Tensor:
    """Return ``[n, k]`` int64, greater for better candidates.

    Args:
        logits: ``[n, num_keys]`` float32, scores of what this rank keeps of each row's request.
        selected: ``[n, k]`` int32, positions among these, and -1.
        shards: How ranks share the KV cache.
    """
    is_token = selected >= 0
    kept = selected.masked_fill(~is_token, 0).long()
    # Of the two zeros one would be the greater.
    bits = logits.gather(1, kept).add_(0.0).view(torch.int32)
    order = bits ^ ((bits >> 31) & _LARGEST)
    run = kept // shards.interleave * shards.world_size + shards.rank
    position = run * shards.interleave + kept % shards.interleave
    candidates = (order.long() << 32) | (_LARGEST - position)
    return candidates.masked_fill_(~is_token, _NOTHING)


def best_candidates(candidates: torch.Tensor) -> torch.Tensor:
    """Return ``[n, k]`` int32, positions in each row's request, the best first, then -1.

    Args:
        candidates: ``[D, n, k]`` int64, in any order of ranks.
    """
    num_shards, num_rows, num_selected = candidates.shape
    by_row = candidates.transpose(0, 1).reshape(num_rows, num_shards * num_selected)
    best = by_row.topk(num_selected, dim=1).values
    position = _LARGEST - (best & 0xFFFFFFFF)
    return position.masked_fill_(best == _NOTHING, -1).int()


def gather_candidates(candidates: torch.Tensor, shards: KVShards) -> torch.Tensor:
    """Return ``[D, n, k]`` int64, everybody's.

    Args:
        candidates: ``[n, k]`` int64, the same shape on every rank.
        shards: How ranks share the KV cache.

    Collectives: one all_gather on the DCP group.
    """
    num_rows, num_selected = candidates.shape
    gathered = candidates.new_empty(shards.world_size * num_rows, num_selected)
    own_rows = shards.own_rows(gathered)
    own_rows.copy_(candidates)
    gather_shards(gathered, own_rows)
    return gathered.view(shards.world_size, num_rows, num_selected)
