# SPDX-License-Identifier: Apache-2.0
"""Which requests' tokens are gathered together, for rows that may attend to any of them.

With sparse MLA a row attends to tokens selected from its whole request. Where ranks share the KV
cache, each reads what it keeps of some whole requests, all gather, and each goes on with its own
rows of these requests, then with the next chunk. A request is never cut: memory has to have room
for the longest::

    requests           A B C D E F | G H          what is between two bars is a chunk
    rows of a rank     B H A D A G E ...          runs of rows of the same chunk: B | H | A D A ...

Chunks follow from the requests' lengths alone, so that all ranks gather the same. Only numpy is
imported.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm.distributed.pcp.kv_shards import KVShards
from vllm.v1.worker.gpu.pcp.layout import Int32Array, exclusive_sum

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RequestChunk:
    """Requests whose tokens are gathered together.

    Attributes:
        row: ``[n]`` int32, a row of each request, for its block table.
        cu_seqlens: ``[n + 1]`` int32, exclusive prefix sum of the requests' lengths.
        cu_kept: ``[n + 1]`` int32, the same of what each rank reads of them: as much as the rank
            that keeps the most.
        runs: This rank's tokens of these requests, counted from the first of all rows.
    """

    row: Int32Array
    cu_seqlens: Int32Array
    cu_kept: Int32Array
    runs: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The chunks of one step on one rank.

    Attributes:
        chunks: In order; the same requests and lengths on every rank.
        first_key: ``[T]`` int32, where the request of each of this rank's tokens begins among the
            tokens of its chunk.
        stop_key: ``[T]`` int32, where what the token sees ends there: behind itself.
    """

    chunks: tuple[RequestChunk, ...]
    first_key: Int32Array
    stop_key: Int32Array


def plan_chunks(
    row_start: Int32Array,
    row_len: Int32Array,
    row_req: Int32Array,
    req_end: Int32Array,
    *,
    shards: KVShards,
    max_rows: int,
) -> ChunkPlan:
    """Plan which requests are gathered together.

    Args:
        row_start: ``[R]`` int32, position of each row's first token in its request.
        row_len: ``[R]`` int32, tokens of each row, > 0.
        row_req: ``[R]`` int32, numbers of requests, the same set of them on every rank; rows may
            stand in any order.
        req_end: ``[num_reqs]`` int32, tokens of each request, by number, after the step.
        shards: How ranks share the KV cache.
        max_rows: Rows that a gather may have, padding included; at least those of the longest
            request.
    """
    req, first_row, group = np.unique(row_req, return_index=True, return_inverse=True)
    num_tokens = req_end[req].astype(np.int64)
    bounds = _pack(shards.num_gathered(num_tokens), max_rows)
    req_chunk = np.repeat(np.arange(len(bounds)), [high - low for low, high in bounds])
    row_chunk = req_chunk[group]
    cu_rows = exclusive_sum(row_len)
    breaks = np.flatnonzero(np.diff(row_chunk)) + 1
    run_bounds = np.concatenate([[0], breaks, [row_len.shape[0]]])
    req_first = np.empty_like(num_tokens)
    chunks = []
    for number, (low, high) in enumerate(bounds):
        cu_seqlens = exclusive_sum(num_tokens[low:high])
        req_first[low:high] = cu_seqlens[:-1]
        chunks.append(
            RequestChunk(
                row=first_row[low:high].astype(np.int32),
                cu_seqlens=cu_seqlens,
                cu_kept=exclusive_sum(shards.num_kept(num_tokens[low:high], rank=0)),
                runs=tuple(
                    slice(int(cu_rows[run_bounds[run]]), int(cu_rows[run_bounds[run + 1]]))
                    for run in np.flatnonzero(row_chunk[run_bounds[:-1]] == number)
                ),
            )
        )
    first_key = np.repeat(req_first[group], row_len)
    position = np.arange(first_key.shape[0]) + np.repeat(row_start - cu_rows[:-1], row_len)
    stop_key = first_key + position + 1
    return ChunkPlan(tuple(chunks), first_key.astype(np.int32), stop_key.astype(np.int32))


def _pack(sizes: IntArray, max_rows: int) -> list[tuple[int, int]]:
    """Return bounds of runs of requests that fit together."""
    if int(sizes.sum()) <= max_rows:
        return [(0, sizes.shape[0])]
    assert int(sizes.max()) <= max_rows, f"a request of {sizes.max()} rows, room for {max_rows}"
    first, room = [0], max_rows
    for index, size in enumerate(sizes.tolist()):
        if size > room:
            first.append(index)
            room = max_rows
        room -= size
    return list(zip(first, [*first[1:], sizes.shape[0]], strict=True))
