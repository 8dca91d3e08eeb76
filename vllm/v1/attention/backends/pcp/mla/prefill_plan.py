# SPDX-License-Identifier: Apache-2.0
"""Which keys the prefill rows of a step attend to, so that each is up-projected once.

MLA caches one latent a token. Prefills attend in the heads' own space: latents are read from the
cache and up-projected to K and V. A rank has two rows of a partitioned request, and the keys of the
head row, all tokens up to its end, are the first keys of the tail row. So the request's latents
are read and up-projected once, from 0 to the end of its last row, and each row attends to its
prefix of them, its own tokens included: causally, the last query to the last key. Nothing has to be
merged.

Memory bounds how many tokens are up-projected at a time. A longer request is cut into pieces, and
so is a row in which one ends; rows then attend to the pieces before them in full and causally to
the one they are in, and only then are partial results merged. Pieces of different requests share a
batch.

::

    cache of a request     0 ............ head ............ tail
    piece, up-projected    |<-------------------------------->|
    head's keys            |<---------------->|
    tail's keys            |<-------------------------------->|

Where that is little, the head's keys are up-projected a second time, as if it were a request of its
own: then one launch does for all rows, and short steps wait for launches, not for the GPU.

Where ranks share the KV cache, each reads what it keeps of a piece, all gather, and each
up-projects only what its own rows attend to. Batches and what is read for them then follow from the
requests' lengths alone, so that all ranks gather the same, a rank without keys in a batch too.
Which rows a rank has must not show in them, so that no head is a request of its own.

The attention kernel takes runs of consecutive rows whose keys lie behind one another. Keys between
two rows' keys, the rest of a piece behind a head, are handed to a sequence without queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm.distributed.pcp.kv_shards import UNSHARED, KVShards
from vllm.v1.worker.gpu.pcp.layout import Int32Array, exclusive_sum

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttendCall:
    """One launch of variable-length attention.

    Attributes:
        queries: Tokens of the rows, counted from the first prefill token.
        keys: Tokens of the batch.
        is_causal: The last query of a row sees its last key, the one before it one less, and so on;
            otherwise all queries see all keys.
        cu_seqlens_q: ``[num_sequences + 1]`` int32, from 0 to the number of queries.
        cu_seqlens_k: ``[num_sequences + 1]`` int32, from 0 to the number of keys.
        max_seqlen_q: Most queries of a row.
        max_seqlen_k: Most keys of a row.
    """

    queries: slice
    keys: slice
    is_causal: bool
    cu_seqlens_q: Int32Array
    cu_seqlens_k: Int32Array
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """Latents that are up-projected together.

    Attributes:
        num_tokens: All of them; 0 where only other ranks' rows attend.
        row: ``[num_pieces]`` int32, a row of the request of each piece, for its block table.
        start: ``[num_pieces]`` int32, where each piece starts in what a rank keeps of its request,
            a multiple of the page size.
        cu_seqlens: ``[num_pieces + 1]`` int32, exclusive prefix sum of the pieces' lengths.
        cu_kept: ``[num_pieces + 1]`` int32, the same of how much is read for each: the most that a
            rank keeps of the whole piece, or the piece itself where ranks do not share.
        calls: What attends to them.
    """

    num_tokens: int
    row: Int32Array
    start: Int32Array
    cu_seqlens: Int32Array
    cu_kept: Int32Array
    calls: tuple[AttendCall, ...]


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The prefill attention of one step on one rank.

    Attributes:
        batches: In order.
        has_partial_results: Some row attends in more than one batch.
    """

    batches: tuple[KeyBatch, ...]
    has_partial_results: bool


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of queries: ``[R]`` each, the request by its place among the requests."""

    start: IntArray
    end: IntArray
    req: IntArray


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Runs of tokens that are read together: ``[num_pieces]`` each."""

    req: IntArray
    start: IntArray
    end: IntArray


def plan_prefill(
    row_start: Int32Array,
    row_len: Int32Array,
    row_req: Int32Array,
    *,
    page_size: int,
    max_tokens: int,
    max_repeated_tokens: int = 0,
    shards: KVShards = UNSHARED,
    req_end: Int32Array | None = None,
) -> PrefillPlan:
    """Plan the attention of prefill rows, which may stand in any order.

    Args:
        row_start: ``[R]`` int32, position of each row's first token in its request.
        row_len: ``[R]`` int32, tokens of each row, > 0.
        row_req: ``[R]`` int32, numbers of requests, in whose order they are read; rows of one do
            not overlap.
        page_size: What a rank keeps of a piece starts at a multiple of it.
        max_tokens: Tokens of a batch, gathered padding included; at least ``page_size`` of each
            rank.
        max_repeated_tokens: Tokens that may be up-projected a second time, to save launches; none
            are where ranks share.
        shards: How ranks share the KV cache.
        req_end: ``[num_reqs]`` int32, tokens of each request, by number, after the step. None where
            ranks do not share; where they do, each has rows of all requests that are planned.
    """
    row_end = row_start.astype(np.int64) + row_len
    req, first_row, group = np.unique(row_req, return_index=True, return_inverse=True)
    # Up to the end of its last row here.
    num_needed = np.zeros(first_row.shape[0], dtype=np.int64)
    np.maximum.at(num_needed, group, row_end)
    num_projected = int(row_end.sum())
    num_repeated = num_projected - int(num_needed.sum())
    if req_end is None and 0 < num_repeated <= max_repeated_tokens and num_projected <= max_tokens:
        first_row = group = np.arange(row_end.shape[0])
        num_needed = row_end
    rows = _Rows(row_start.astype(np.int64), row_end, group)
    num_read = num_needed if req_end is None else req_end[req].astype(np.int64)
    pieces, bounds = _cut(num_read, shards, page_size=page_size, max_tokens=max_tokens)
    rows = _split(rows, pieces)
    num_queries = rows.end - rows.start
    first_query = np.cumsum(num_queries) - num_queries
    batches = []
    attended = np.zeros(num_queries.shape[0], dtype=np.int64)
    for low, high in bounds:
        piece_req, start = pieces.req[low:high], pieces.start[low:high]
        end = np.minimum(pieces.end[low:high], num_needed[piece_req])
        cu_seqlens = exclusive_sum(np.maximum(end - start, 0))
        # Position in the batch of each row's piece; a batch has one piece of a request.
        position = np.full(first_row.shape[0], -1)
        position[piece_req] = np.arange(high - low)
        piece = position[rows.req]
        attends = (piece >= 0) & (start[piece] < rows.end)
        attended += attends
        is_full = attends & (end[piece] <= rows.start)
        calls: list[AttendCall] = []
        for is_causal, members in ((False, is_full), (True, attends & ~is_full)):
            row = np.flatnonzero(members)
            calls += _calls(
                row,
                piece[row],
                np.minimum(end[piece[row]], rows.end[row]) - start[piece[row]],
                cu_seqlens,
                first_query[row],
                num_queries[row],
                is_causal=is_causal,
            )
        batches.append(
            KeyBatch(
                num_tokens=int(cu_seqlens[-1]),
                row=first_row[piece_req].astype(np.int32),
                start=(start // shards.world_size).astype(np.int32),
                cu_seqlens=cu_seqlens,
                cu_kept=exclusive_sum(shards.num_kept(pieces.end[low:high] - start, rank=0)),
                calls=tuple(calls),
            )
        )
    return PrefillPlan(tuple(batches), has_partial_results=bool((attended > 1).any()))


def _cut(
    num_tokens: IntArray, shards: KVShards, *, page_size: int, max_tokens: int
) -> tuple[_Pieces, list[tuple[int, int]]]:
    """Cut requests into pieces and pack these into batches: the pieces, and bounds of batches."""
    num_reqs = num_tokens.shape[0]
    if int(shards.num_gathered(num_tokens).sum()) <= max_tokens:
        # One piece a request, one batch: what nearly every step is.
        return _Pieces(np.arange(num_reqs), np.zeros_like(num_tokens), num_tokens), [(0, num_reqs)]
    step = page_size * shards.world_size
    longest = max_tokens // step * step
    assert longest > 0, f"a batch of {max_tokens} tokens has no room for a page of each rank"
    req = np.repeat(np.arange(num_reqs), num_tokens // longest + 1)
    start = (np.arange(req.shape[0]) - np.searchsorted(req, req)) * longest
    end = np.minimum(start + longest, num_tokens[req])
    is_piece = start < end
    pieces = _Pieces(req[is_piece], start[is_piece], end[is_piece])
    # Two pieces of a request never share a batch: a row has one place to look in.
    first = [0]
    room = max_tokens
    sizes = shards.num_gathered(pieces.end - pieces.start)
    for index, size in enumerate(sizes.tolist()):
        if index > 0 and (pieces.start[index] > 0 or size > room):
            first.append(index)
            room = max_tokens
        room -= size
    return pieces, list(zip(first, [*first[1:], sizes.shape[0]], strict=True))


def _split(rows: _Rows, pieces: _Pieces) -> _Rows:
    """Cut rows in which a piece of their request ends."""
    start, end, req = rows.start, rows.end, rows.req
    for index in np.flatnonzero(pieces.start).tolist():
        cut = pieces.start[index]
        for row in np.flatnonzero((req == pieces.req[index]) & (start < cut) & (cut < end)):
            start, end = np.insert(start, row + 1, cut), np.insert(end, row, cut)
            req = np.insert(req, row, req[row])
    return _Rows(start, end, req)


def _calls(
    rows: IntArray,
    piece: IntArray,
    num_keys: IntArray,
    cu_seqlens: Int32Array,
    first_query: IntArray,
    num_queries: IntArray,
    *,
    is_causal: bool,
) -> list[AttendCall]:
    """Return a call for each run of consecutive rows whose pieces ascend."""
    if rows.shape[0] == 0:
        return []
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(piece) <= 0)) + 1
    calls = []
    for low, high in zip([0, *breaks.tolist()], [*breaks.tolist(), rows.shape[0]], strict=True):
        first_key = cu_seqlens[piece[low:high]]
        stop_key = first_key + num_keys[low:high]
        # A row and the keys up to the next row's, in turn; the last row has none behind it.
        seqlens = np.zeros((2, 2 * (high - low) - 1), dtype=np.int64)
        seqlens[0, ::2] = num_queries[low:high]
        seqlens[1, ::2] = num_keys[low:high]
        seqlens[1, 1::2] = first_key[1:] - stop_key[:-1]
        seqlens = seqlens[:, seqlens.any(axis=0)]
        cu = np.zeros((2, seqlens.shape[1] + 1), dtype=np.int32)
        np.cumsum(seqlens, axis=1, out=cu[:, 1:])
        calls.append(
            AttendCall(
                queries=slice(
                    int(first_query[low]), int(first_query[high - 1] + num_queries[high - 1])
                ),
                keys=slice(int(first_key[0]), int(stop_key[-1])),
                is_causal=is_causal,
                cu_seqlens_q=cu[0],
                cu_seqlens_k=cu[1],
                max_seqlen_q=int(num_queries[low:high].max()),
                max_seqlen_k=int(num_keys[low:high].max()),
            )
        )
    return calls
