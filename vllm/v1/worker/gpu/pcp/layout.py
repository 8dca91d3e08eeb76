# SPDX-License-Identifier: Apache-2.0
"""DualChunkSwap: which rank computes which token of a step.

A prefill of ``q`` tokens is cut into ``2P`` contiguous chunks whose lengths differ by at most one;
none is empty once ``q >= 2P``. Pair ``p`` is chunk ``p`` (the head) together with chunk ``2P-1-p``
(the tail): a short causal prefix beside a long one, so that all pairs have nearly the same causal
area. Tokens that do not divide lengthen the tails first, from the middle outwards, then the heads,
which keeps pairs within one token of each other. The m-th partitioned request of a step hands pair
``p`` to rank ``(p + m) % P``, so that no rank always gets the longer one. Every other row, decodes
and prefills shorter than ``2P``, is replicated: all ranks compute it, one of them owns it.

The example used in docs and tests, one prefill A..G with ``P = 2``::

    chunks                A | B C | D E | F G
    rank 0 computes       A F G          rank 1 computes  B C D E
    gathered and padded   F G A _ | B C D E
    gather_idx            5 6 0 - | 1 2 3 4      gathered = global[gather_idx]
    restore_idx           2 4 5 6 7 0 1          global = gathered[restore_idx]

F G comes first on rank 0 since it has context, A to E, and attention backends want rows with
context first.

Everything here is a function of the global batch alone (query lengths, computed tokens, prefill
flags, in batch order), so that all ranks derive the same plan without communicating. Request-state
rows (``idx_mapping``) differ between ranks and must never enter. Only numpy is imported.

Source: DualChunkSwap is the load-balanced context parallelism of arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

# Token of gathered rows that are not written: padding, and copies of a replicated row.
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """How the hidden rows of some global tokens travel back to every rank.

    Attributes:
        send_idx: ``[pcp_world_size, num_rows]`` int32, rank-local token of each row that a rank
            contributes; ranks with fewer rows repeat their token 0.
        recv_idx: ``[num_tokens]`` int32, row of the gathered ``[pcp_world_size * num_rows]`` for
            each requested token, in the order requested.
    """

    send_idx: Int32Array
    recv_idx: Int32Array

    @property
    def num_rows(self) -> int:
        """Rows that every rank contributes to the gather."""
        return int(self.send_idx.shape[1])


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """The partition of one step, the same object on every rank.

    All ranks have the same number of rows ``W``: one for each replicated request and two, head and
    tail, for each partitioned one. Rows stand in the order that attention backends rely on:
    replicated decodes, prefill rows with earlier tokens of their request in the cache (those of
    this step included), rows at the start of their request. Among the second, rows whose request
    has tokens cached from before this step stand first, and of those the replicated ones: up to
    there, rows are of the same requests on every rank. The other groups have as many rows.

    Attributes:
        pcp_world_size: ``P``.
        num_tokens: Tokens of the global batch.
        row_req: ``[P, W]`` int32, request (position in the batch) of each row.
        row_offset: ``[P, W]`` int32, first token of the row, counted from the request's first token
            of this step.
        row_len: ``[P, W]`` int32, tokens of the row, > 0.
        row_token: ``[P, W]`` int32, the row's first token in the global batch.
        row_is_owned: ``[P, W]`` bool, False for the copies of a replicated row on the ranks that do
            not own it.
        num_cached_tokens: ``[num_reqs]`` int32, tokens that a request has in the cache from before
            this step.
        req_end: ``[num_reqs]`` int32, tokens that a request has after this step.
        num_replicated_cached_rows: Replicated rows of requests with cached tokens, the first rows.
        num_decodes: Rows that are decodes, the first of them.
        num_cached_rows: Rows of requests with cached tokens: those, and the partitioned ones, which
            follow.
        num_local_tokens: ``[P]`` int32, tokens that each rank computes.
        num_tokens_after_padding: ``L``, the largest of them or more; every rank runs and gathers so
            many rows.
        slot_idx: ``[P * L]`` int32, global token whose KV the gathered row is, or ``NO_SLOT``. Each
            token of the batch stands here exactly once.
    """

    pcp_world_size: int
    num_tokens: int
    row_req: Int32Array
    row_offset: Int32Array
    row_len: Int32Array
    row_token: Int32Array
    row_is_owned: BoolArray
    num_cached_tokens: Int32Array
    req_end: Int32Array
    num_replicated_cached_rows: int
    num_decodes: int
    num_cached_rows: int
    num_local_tokens: Int32Array
    num_tokens_after_padding: int
    slot_idx: Int32Array

    def query_start_loc(self, pcp_rank: int) -> Int32Array:
        """Return ``[W + 1]`` int32, exclusive prefix sum of the rank's row lengths."""
        return exclusive_sum(self.row_len[pcp_rank])

    def gather_idx(self, pcp_rank: int) -> Int32Array:
        """Return ``[L]`` int32, the global token of each row to run; padding repeats token 0."""
        row_len = self.row_len[pcp_rank]
        num_local_tokens = int(self.num_local_tokens[pcp_rank])
        gather_idx = np.zeros(self.num_tokens_after_padding, dtype=np.int32)
        shift = self.row_token[pcp_rank] - (np.cumsum(row_len, dtype=np.int32) - row_len)
        np.add(
            np.repeat(shift, row_len),
            np.arange(num_local_tokens, dtype=np.int32),
            out=gather_idx[:num_local_tokens],
        )
        return gather_idx

    def restore_idx(self) -> Int32Array:
        """Return ``[num_tokens]`` int32, the gathered row that holds each global token."""
        # NO_SLOT is -1: what is written nowhere lands in the one element too many.
        restore_idx = np.empty(self.num_tokens + 1, dtype=np.int32)
        restore_idx[self.slot_idx] = np.arange(self.slot_idx.shape[0], dtype=np.int32)
        return restore_idx[:-1]

    def plan_restore(self, tokens: Int32Array) -> RestorePlan:
        """Plan the way back of some tokens' hidden rows.

        Args:
            tokens: ``[n]`` int32, global tokens, n > 0.
        """
        gathered = self.restore_idx()[tokens]
        rank = gathered // self.num_tokens_after_padding
        local_token = gathered - rank * self.num_tokens_after_padding
        per_rank = np.bincount(rank, minlength=self.pcp_world_size)
        num_rows = int(per_rank.max())
        by_rank = np.argsort(rank, kind="stable")
        first = np.cumsum(per_rank) - per_rank
        row = np.empty_like(rank)
        row[by_rank] = np.arange(rank.shape[0]) - np.repeat(first, per_rank)
        send_idx = np.zeros((self.pcp_world_size, num_rows), dtype=np.int32)
        send_idx[rank, row] = local_token
        return RestorePlan(send_idx=send_idx, recv_idx=(rank * num_rows + row).astype(np.int32))


def exclusive_sum(lengths: npt.NDArray[np.integer]) -> Int32Array:
    """Return ``[n + 1]`` int32, the sums of the lengths ahead of each, and of all."""
    sums = np.zeros(lengths.shape[0] + 1, dtype=np.int32)
    np.cumsum(lengths, out=sums[1:])
    return sums


def is_partitioned(
    num_scheduled_tokens: Int32Array, is_prefilling: BoolArray, pcp_world_size: int
) -> BoolArray:
    """Return ``[num_reqs]`` bool, the prefills long enough to leave none of 2P chunks empty."""
    return is_prefilling & (num_scheduled_tokens >= 2 * pcp_world_size)


def plan_partition(
    num_scheduled_tokens: Int32Array,
    num_computed_tokens: Int32Array,
    is_prefilling: BoolArray,
    *,
    pcp_world_size: int,
    pad: Callable[[int], int] = int,
) -> PartitionPlan | None:
    """Partition one step.

    Args:
        num_scheduled_tokens: ``[num_reqs]`` int32, tokens of this step, > 0, in batch order.
        num_computed_tokens: ``[num_reqs]`` int32, tokens already in the KV cache.
        is_prefilling: ``[num_reqs]`` bool, False for decodes.
        pcp_world_size: ``P``, >= 2.
        pad: From the largest rank's number of tokens to the rows that every rank runs; the same
            function on every rank.

    Returns:
        The plan, or None if no prefill of the step is partitioned and the step is to be left as it
        is.
    """
    size = pcp_world_size
    partitioned = is_partitioned(num_scheduled_tokens, is_prefilling, size)
    part = np.flatnonzero(partitioned)
    if part.shape[0] == 0:
        return None
    repl = np.flatnonzero(~partitioned)
    num_part, num_repl = part.shape[0], repl.shape[0]
    req = np.concatenate([repl, part, part]).astype(np.int32)

    # Chunks of every rank, all heads before all tails.
    rank = np.arange(size)[:, None]
    pair = (rank - np.arange(num_part)) % size
    chunk = np.concatenate([pair, 2 * size - 1 - pair], axis=1)
    query_len = num_scheduled_tokens[req].astype(np.int64)
    base, num_longer = np.divmod(query_len[num_repl:], 2 * size)
    # Chunks first_longer..first_longer+num_longer-1 have one token more.
    first_longer = np.minimum(size, 2 * size - num_longer)
    # Not np.clip, which checks types and bounds in Python first.
    num_longer_before = np.minimum(np.maximum(chunk - first_longer, 0), num_longer)
    start = chunk * base + num_longer_before
    chunk_len = base + ((chunk >= first_longer) & (num_longer_before < num_longer))

    row_offset = np.zeros((size, req.shape[0]), dtype=np.int32)
    row_offset[:, num_repl:] = start
    row_len = np.empty_like(row_offset)
    row_len[:, :num_repl] = query_len[:num_repl]
    row_len[:, num_repl:] = chunk_len
    row_is_owned = np.ones(row_offset.shape, dtype=np.bool_)
    row_is_owned[:, :num_repl] = np.arange(num_repl) % size == rank

    # 0: decodes; behind cached tokens 1: replicated, 2: partitioned; 3: tails behind tokens of this
    # step alone; 4: rows at the start of their request.
    is_cached = num_computed_tokens[req] > 0
    region = np.where(is_cached, np.int8(2), np.int8(4))
    region[:num_repl] -= is_cached[:num_repl]
    region *= is_prefilling[req]
    num_replicated_cached_rows = int(np.count_nonzero(region < 2))
    num_cached_rows = int(np.count_nonzero(region < 3))
    order = np.argsort(region - ((row_offset > 0) & ~is_cached), axis=1, kind="stable")
    flat_order = order + rank * req.shape[0]

    first_token = np.cumsum(num_scheduled_tokens, dtype=np.int32) - num_scheduled_tokens
    row_req = req[order]
    row_offset = row_offset.ravel()[flat_order]
    row_len = row_len.ravel()[flat_order]
    row_is_owned = row_is_owned.ravel()[flat_order]
    row_token = first_token[row_req] + row_offset
    num_local_tokens = row_len.sum(axis=1, dtype=np.int32)
    num_tokens_after_padding = pad(int(num_local_tokens.max()))
    return PartitionPlan(
        pcp_world_size=size,
        num_tokens=int(num_scheduled_tokens.sum()),
        row_req=row_req,
        row_offset=row_offset,
        row_len=row_len,
        row_token=row_token,
        row_is_owned=row_is_owned,
        num_cached_tokens=num_computed_tokens,
        req_end=num_computed_tokens + num_scheduled_tokens,
        num_replicated_cached_rows=num_replicated_cached_rows,
        num_decodes=int(np.count_nonzero(~is_prefilling)),
        num_cached_rows=num_cached_rows,
        num_local_tokens=num_local_tokens,
        num_tokens_after_padding=num_tokens_after_padding,
        slot_idx=_slot_idx(row_token, row_len, row_is_owned, num_tokens_after_padding),
    )


def _slot_idx(
    row_token: Int32Array,
    row_len: Int32Array,
    row_is_owned: BoolArray,
    num_tokens_after_padding: int,
) -> Int32Array:
    """Return ``[P * L]`` int32, the global token each gathered row writes, or ``NO_SLOT``."""
    # One more row a rank, the padding: then all ranks together are one run of P * L tokens.
    size, width = row_len.shape
    padded_len = np.empty((size, width + 1), dtype=np.int32)
    padded_len[:, :width] = row_len
    padded_len[:, width] = num_tokens_after_padding - row_len.sum(axis=1, dtype=np.int32)
    padded_len = padded_len.ravel()
    run_start = (np.cumsum(padded_len, dtype=np.int32) - padded_len).reshape(size, width + 1)
    # Rows that write nothing are shifted so far down that all of their tokens stay negative.
    shift = np.full((size, width + 1), np.iinfo(np.int32).min // 2, dtype=np.int32)
    np.subtract(row_token, run_start[:, :width], out=shift[:, :width], where=row_is_owned)
    slot_idx = np.repeat(shift.ravel(), padded_len)
    slot_idx += np.arange(slot_idx.shape[0], dtype=np.int32)
    np.maximum(slot_idx, NO_SLOT, out=slot_idx)
    return slot_idx


def max_local_tokens(max_num_batched_tokens: int, max_num_seqs: int, pcp_world_size: int) -> int:
    """Return the most tokens that a rank runs in any step, partitioned or not.

    A partitioned prefill of q tokens leaves a rank at most ``q / P + 2`` of them; each other
    request at most ``2P - 1`` when it prefills. (Steps of decodes are bounded by ``max_num_seqs``
    tokens.)
    """
    share = -(-max_num_batched_tokens // pcp_world_size)
    return min(max_num_batched_tokens, share + max_num_seqs * (2 * pcp_world_size - 1))
