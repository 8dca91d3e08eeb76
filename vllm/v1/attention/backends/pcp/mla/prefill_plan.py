# SPDX-License-Identifier: Apache-2.0
"""Which keys the prefill rows of a step attend to, so that each is up-projected once.

MLA caches one latent a token. Prefills attend in the heads' own space: latents are read from the
cache and up-projected to K and V. A rank has two rows of a partitioned request, and the keys of the
head row, all tokens up to its end, are the first keys of the tail row. So the request's latents
are read and up-projected once, from 0 to the end of its last row, and each row attends to its
prefix of them, its own tokens included: causally, the last query to the last key. Nothing has to be
merged.

Memory bounds how many tokens are up-projected at a time. A longer request is cut into pieces, never
inside a row; rows then attend to the pieces before them in full and causally to the one they are
in, and only then are partial results merged. Pieces of different requests share a batch.

::

    cache of a request     0 ............ head ............ tail
    piece, up-projected    |<-------------------------------->|
    head's keys            |<---------------->|
    tail's keys            |<-------------------------------->|

Where that is little, the head's keys are up-projected a second time, as if it were a request of its
own: then one launch does for all rows, and short steps wait for launches, not for the GPU.

The attention kernel takes runs of consecutive rows whose keys lie behind one another. Keys between
two rows' keys, the rest of a piece behind a head, are handed to a sequence without queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


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
        num_tokens: All of them.
        row: ``[num_pieces]`` int32, a row of the request of each piece, for its block table.
        start: ``[num_pieces]`` int32, first token of each piece in its request, a multiple of the
            page size.
        cu_seqlens: ``[num_pieces + 1]`` int32, exclusive prefix sum of the pieces' lengths.
        calls: What attends to them.
    """

    num_tokens: int
    row: Int32Array
    start: Int32Array
    cu_seqlens: Int32Array
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


def plan_prefill(
    row_start: Int32Array,
    row_len: Int32Array,
    row_req: Int32Array,
    *,
    page_size: int,
    max_tokens: int,
    max_repeated_tokens: int = 0,
) -> PrefillPlan:
    """Plan the attention of prefill rows, which may stand in any order.

    Args:
        row_start: ``[R]`` int32, position of each row's first token in its request.
        row_len: ``[R]`` int32, tokens of each row, > 0.
        row_req: ``[R]`` int32, anything that tells requests apart; rows of one do not overlap.
        page_size: Pieces start at multiples of it.
        max_tokens: Tokens of a batch, at most; see ``min_batch_tokens``.
        max_repeated_tokens: Tokens that may be up-projected a second time, to save launches.
    """
    first_query = np.cumsum(row_len, dtype=np.int64) - row_len
    row_end = row_start + row_len
    last_row, group = _requests(row_end, row_req)
    num_keys = row_end[last_row]
    num_repeated = int(row_end.sum()) - int(num_keys.sum())
    if 0 < num_repeated <= max_repeated_tokens and int(row_end.sum()) <= max_tokens:
        last_row = group = np.arange(row_end.shape[0])
        num_keys = row_end
    if int(num_keys.sum()) <= max_tokens:
        # One piece a request, one batch: what nearly every step is.
        piece_group = np.arange(last_row.shape[0])
        piece_start = np.zeros_like(num_keys)
        piece_end = num_keys
        bounds = [(0, last_row.shape[0])]
    else:
        piece_group, piece_start, piece_end, bounds = _cut(
            row_start, row_end, group, num_keys, page_size=page_size, max_tokens=max_tokens
        )
    batches = []
    attended = np.zeros(row_len.shape[0], dtype=np.int64)
    for low, high in bounds:
        start, end = piece_start[low:high], piece_end[low:high]
        cu_seqlens = np.zeros(high - low + 1, dtype=np.int32)
        np.cumsum(end - start, out=cu_seqlens[1:])
        # Position in the batch of each row's piece; a batch has one piece of a request.
        position = np.full(last_row.shape[0], -1)
        position[piece_group[low:high]] = np.arange(high - low)
        piece = position[group]
        attends = (piece >= 0) & (start[piece] < row_end)
        attended += attends
        is_full = attends & (end[piece] <= row_start)
        calls: list[AttendCall] = []
        for is_causal, members in ((False, is_full), (True, attends & ~is_full)):
            rows = np.flatnonzero(members)
            calls += _calls(
                rows,
                piece[rows],
                np.minimum(end[piece[rows]], row_end[rows]) - start[piece[rows]],
                cu_seqlens,
                first_query[rows],
                row_len[rows],
                is_causal=is_causal,
            )
        batches.append(
            KeyBatch(
                num_tokens=int(cu_seqlens[-1]),
                row=last_row[piece_group[low:high]].astype(np.int32),
                start=start.astype(np.int32),
                cu_seqlens=cu_seqlens,
                calls=tuple(calls),
            )
        )
    return PrefillPlan(tuple(batches), has_partial_results=bool((attended > 1).any()))


def min_batch_tokens(max_row_tokens: int, page_size: int) -> int:
    """Return the least ``max_tokens`` that a plan works with: a head and a tail that touch."""
    return 2 * (max_row_tokens + page_size)


def _requests(row_end: Int32Array, row_req: Int32Array) -> tuple[IntArray, IntArray]:
    """Return the last row of each request, in the order of rows, and each row's request."""
    order = np.lexsort((row_end, row_req))
    is_last = np.append(np.diff(row_req[order]) != 0, True)
    by_req = order[is_last]
    last_row = np.sort(by_req)
    group = np.empty(row_req.shape[0], dtype=np.int64)
    group[order] = np.searchsorted(last_row, by_req)[np.cumsum(is_last) - is_last]
    return last_row, group


def _cut(
    row_start: Int32Array,
    row_end: Int32Array,
    group: IntArray,
    num_keys: Int32Array,
    *,
    page_size: int,
    max_tokens: int,
) -> tuple[IntArray, IntArray, IntArray, list[tuple[int, int]]]:
    """Cut requests into pieces and pack these: groups, starts, ends, bounds of the batches."""
    pieces: list[tuple[int, int, int]] = []
    bounds: list[tuple[int, int]] = []
    first, num_tokens = 0, 0
    for index, total in enumerate(num_keys.tolist()):
        start = 0
        while start < total:
            end = total
            if total - start > max_tokens:
                members = group == index
                end = _last_cut(row_start[members], row_end[members], start + max_tokens, page_size)
            assert start < end, f"rows longer than a batch of {max_tokens} tokens"
            # Two pieces of a request never share a batch: a row has one place to look in.
            if start > 0 or num_tokens + end - start > max_tokens:
                if first < len(pieces):
                    bounds.append((first, len(pieces)))
                first, num_tokens = len(pieces), 0
            pieces.append((index, start, end))
            num_tokens += end - start
            start = end
    bounds.append((first, len(pieces)))
    table = np.array(pieces, dtype=np.int64)
    return table[:, 0], table[:, 1], table[:, 2], bounds


def _last_cut(row_start: Int32Array, row_end: Int32Array, limit: int, page_size: int) -> int:
    """Return the last page boundary up to ``limit`` that is inside none of a request's rows."""
    cut = limit // page_size * page_size
    while True:
        inside = (row_start < cut) & (cut < row_end)
        if not inside.any():
            return cut
        cut = int(row_start[inside].min()) // page_size * page_size


def _calls(
    rows: IntArray,
    piece: IntArray,
    num_keys: IntArray,
    cu_seqlens: Int32Array,
    first_query: IntArray,
    num_queries: Int32Array,
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
