# SPDX-License-Identifier: Apache-2.0
"""What a rank attends to in a partitioned step while D ranks share one copy of the KV cache.

A row's keys are of two kinds. Those of *this step* were gathered for the cache in this very layer:
each rank has them all, and its own rows attend to them causally. Of those *cached* before a rank
keeps a part, and all of a row's queries see all of them: each rank attends to what it keeps for the
rows of all ranks, gathered, and the partial results go back. Replicated rows need no gather, all
ranks have them.

    a row of rank 1    0 ........ num_cached ...... start ... stop
    cached             |<------------>|                              a part of it on each rank
    this step                         |<---------------------->|     causal, on rank 1

Only numpy is imported; shapes are functions of the global batch alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm.distributed.pcp.kv_shards import KVShards
from vllm.v1.worker.gpu.pcp.layout import Int32Array, PartitionPlan, exclusive_sum


@dataclass(frozen=True, slots=True)
class StepKeys:
    """Keys of this step that the rows of a rank attend to, row by row.

    The head and the tail of a request see a prefix each of the same keys. Each has its own copy of
    them, 1 + 1 / 2P times the step's tokens in all, so that one launch attends for all rows.

    Attributes:
        key_idx: ``[num_keys]`` int32, the gathered row of each key.
        cu_seqlens: ``[W + 1]`` int32, exclusive prefix sum of the keys of each row.
        max_seqlen: Most keys of a row.
    """

    key_idx: Int32Array
    cu_seqlens: Int32Array
    max_seqlen: int


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """Partitioned rows with cached tokens, of all ranks, as sequences over what this rank keeps.

    Attributes:
        num_tokens: Queries that each rank puts in, as many as the rank with most of them has.
        cu_seqlens: ``[D * (n + 1) + 1]`` int32: ``n`` rows of each rank, and what fills up its
            queries; ranks as they stand in a gathered tensor.
        seq_lens: ``[D * (n + 1)]`` int32, keys here; none for what fills up.
        table_row: ``[D * (n + 1)]`` int32, a row of this rank with the same request's block table.
        max_query_len: Most queries of a sequence, at least 2.
        max_seq_len: Most keys of a sequence, at least 1.
    """

    num_tokens: int
    cu_seqlens: Int32Array
    seq_lens: Int32Array
    table_row: Int32Array
    max_query_len: int
    max_seq_len: int


def plan_step_keys(plan: PartitionPlan, pcp_rank: int) -> StepKeys:
    """Plan what the rows of a rank see of this step."""
    num_keys = plan.row_offset[pcp_rank] + plan.row_len[pcp_rank]
    cu_seqlens = exclusive_sum(num_keys)
    first_token = plan.row_token[pcp_rank] - plan.row_offset[pcp_rank]
    token = np.repeat(first_token - cu_seqlens[:-1], num_keys)
    token += np.arange(token.shape[0], dtype=np.int32)
    return StepKeys(plan.restore_idx()[token], cu_seqlens, int(num_keys.max()))


def plan_gathered_rows(plan: PartitionPlan, pcp_rank: int, shards: KVShards) -> GatheredRows | None:
    """Plan what the partitioned rows of all ranks see of this rank's cache; None if nothing."""
    rows = slice(plan.num_replicated_cached_rows, plan.num_cached_rows)
    num_rows = rows.stop - rows.start
    if num_rows == 0:
        return None
    row_len = plan.row_len[:, rows]
    num_tokens = row_len.sum(axis=1, dtype=np.int32)
    max_num_tokens = int(num_tokens.max())
    query_len = np.column_stack([row_len, max_num_tokens - num_tokens])
    # The same requests in the same order on every rank. What fills up has a table as well.
    row_req = plan.row_req[pcp_rank, rows]
    table_row = np.arange(rows.start, rows.stop + 1, dtype=np.int32)
    table_row[-1] = rows.start
    seq_lens = np.zeros_like(table_row)
    num_cached = plan.num_cached_tokens[row_req].astype(np.int64)
    seq_lens[:-1] = shards.num_kept(num_cached, shards.rank)

    # Ranks are numbered TP-minor, and so stand in what is gathered.
    num_ranks = shards.world_size
    query_len = np.repeat(query_len, num_ranks // plan.pcp_world_size, axis=0)
    return GatheredRows(
        num_tokens=max_num_tokens,
        cu_seqlens=exclusive_sum(query_len.ravel()),
        seq_lens=np.tile(seq_lens, num_ranks),
        table_row=np.tile(table_row, num_ranks),
        # FlashAttention 2 takes 1 to mean that each sequence has one query.
        max_query_len=max(2, int(query_len.max())),
        max_seq_len=max(1, int(seq_lens.max())),
    )


def max_gathered_tokens(num_tokens: int, max_num_seqs: int, pcp_world_size: int) -> int:
    """Return the most tokens of partitioned rows that a rank has, of ``num_tokens`` in a step.

    A prefill of q >= 2P tokens leaves a rank at most ``ceil(q / P)`` of them.
    """
    num_requests = min(max_num_seqs, num_tokens // (2 * pcp_world_size))
    return -(-num_tokens // pcp_world_size) + num_requests


def max_step_keys(num_tokens: int, max_num_seqs: int, pcp_world_size: int) -> int:
    """Return the most keys that ``plan_step_keys`` plans for a step of ``num_tokens``.

    A head and a tail that are a pair end where q + q / 2P tokens do together, or one more.
    """
    num_requests = min(max_num_seqs, num_tokens // (2 * pcp_world_size))
    return num_tokens + -(-num_tokens // (2 * pcp_world_size)) + 2 * num_requests
