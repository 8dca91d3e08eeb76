# SPDX-License-Identifier: Apache-2.0
"""A plan of chunks, carried out token by token, shows each row its whole prefix, and once.

The oracle deals out the tokens of requests one by one, lets every rank read what a chunk says, and
puts what all have read behind one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.v1.worker.gpu.pcp.oracle import random_batches
from vllm.distributed.pcp.kv_shards import KVShards
from vllm.v1.attention.backends.pcp.mla.device_plan import gathered_rows
from vllm.v1.attention.backends.pcp.mla.request_chunks import ChunkPlan, RequestChunk, plan_chunks
from vllm.v1.worker.gpu.pcp.layout import PartitionPlan, plan_partition

# Where each DCP rank stands in what is gathered, tokens that a rank keeps in a row.
WORLDS = (((0, 1), 1), ((0, 1), 4), ((0, 2, 1, 3), 1), ((0, 1, 2), 2))
PCP_WORLD_SIZE = 2
# What a rank reads that it does not keep.
PADDING = (-1, -1)


def partitions(num_batches: int) -> Iterator[PartitionPlan]:
    """Yield partitions of random batches, the shortest rows first."""
    for batch in random_batches(PCP_WORLD_SIZE, num_batches, seed=11):
        requests = sorted(batch.requests, key=lambda request: request.num_scheduled)
        columns = [(r.num_scheduled, r.num_computed, r.is_prefilling) for r in requests]
        scheduled, computed, prefilling = (list(column) for column in zip(*columns, strict=True))
        plan = plan_partition(
            np.array(scheduled, dtype=np.int32),
            np.array(computed, dtype=np.int32),
            np.array(prefilling),
            pcp_world_size=PCP_WORLD_SIZE,
        )
        if plan is not None:
            yield plan


def chunks_of(plan: PartitionPlan, rank: int, shards: KVShards, max_rows: int) -> ChunkPlan:
    """Plan the rows of a rank behind its decodes."""
    rows = slice(plan.num_decodes, None)
    req = plan.row_req[rank, rows]
    return plan_chunks(
        plan.num_cached_tokens[req] + plan.row_offset[rank, rows],
        plan.row_len[rank, rows],
        req,
        plan.req_end,
        shards=shards,
        max_rows=max_rows,
    )


def longest(plan: PartitionPlan, shards: KVShards) -> int:
    """Return the rows that the longest request takes."""
    cycle = shards.world_size * shards.interleave
    return -(-int(plan.req_end.max()) // cycle) * cycle


def in_order(chunk: RequestChunk, reqs: list[int], shards: KVShards) -> list[tuple[int, int]]:
    """Return request and position of each token of a chunk, as gathered and put in order."""
    lengths, num_read = np.diff(chunk.cu_seqlens).tolist(), np.diff(chunk.cu_kept).tolist()
    gathered: list[list[tuple[int, int]]] = [[] for _ in shards.gather_order]
    for rank, place in enumerate(shards.gather_order):
        for req, length, num_rows in zip(reqs, lengths, num_read, strict=True):
            kept = [
                (req, position)
                for position in range(length)
                if position // shards.interleave % shards.world_size == rank
            ]
            assert len(kept) <= num_rows
            gathered[place] += kept + [PADDING] * (num_rows - len(kept))
    everything = [token for rows in gathered for token in rows]
    index = gathered_rows(
        torch.from_numpy(chunk.cu_seqlens),
        torch.from_numpy(chunk.cu_kept),
        sum(lengths),
        shards.interleave,
        torch.tensor(shards.gather_order, dtype=torch.int32),
    )
    return [everything[row] for row in index.tolist()]


@pytest.mark.parametrize("max_chunks", [1, 100])
@pytest.mark.parametrize("world", WORLDS)
def test_each_token_sees_its_prefix_in_one_chunk(
    world: tuple[tuple[int, ...], int], max_chunks: int
) -> None:
    order, interleave = world
    shards = KVShards(len(order), 0, interleave, order)
    num_chunks = 0
    for plan in partitions(100):
        max_rows = longest(plan, shards) if max_chunks > 1 else 1 << 30
        for rank in range(PCP_WORLD_SIZE):
            rows = slice(plan.num_decodes, None)
            row_req = plan.row_req[rank, rows]
            chunks = chunks_of(plan, rank, shards, max_rows)
            num_chunks = max(num_chunks, len(chunks.chunks))
            tokens = [
                (int(req), int(plan.num_cached_tokens[req] + offset + token))
                for req, offset, length in zip(
                    row_req, plan.row_offset[rank, rows], plan.row_len[rank, rows], strict=True
                )
                for token in range(length)
            ]
            seen = Counter[int]()
            for chunk in chunks.chunks:
                assert shards.world_size * int(chunk.cu_kept[-1]) <= max_rows
                keys = in_order(chunk, row_req[chunk.row].tolist(), shards)
                for run in chunk.runs:
                    for index in range(run.start, run.stop):
                        seen[index] += 1
                        req, position = tokens[index]
                        visible = keys[chunks.first_key[index] : chunks.stop_key[index]]
                        assert visible == [(req, before) for before in range(position + 1)]
            assert seen == Counter(range(len(tokens)))
    assert (num_chunks > 1) == (max_chunks > 1)


def test_a_chunk_ends_where_the_next_request_has_no_room() -> None:
    shards = KVShards(2, 0, 1, (0, 1))
    num_pairs = 0
    for plan in partitions(100):
        max_rows = longest(plan, shards)
        for chunk, following in pairwise(chunks_of(plan, 0, shards, max_rows).chunks):
            num_pairs += 1
            num_read = int(chunk.cu_kept[-1] + following.cu_kept[1])
            assert shards.world_size * num_read > max_rows
    assert num_pairs > 0


def test_ranks_gather_the_same() -> None:
    shards = KVShards(2, 0, 1, (0, 1))
    for plan in partitions(100):
        first, *others = (
            [
                (plan.row_req[rank, plan.num_decodes :][chunk.row].tolist(), chunk.cu_kept.tolist())
                for chunk in chunks_of(plan, rank, shards, longest(plan, shards)).chunks
            ]
            for rank in range(PCP_WORLD_SIZE)
        )
        assert all(other == first for other in others)


def test_a_request_that_has_no_room_is_noticed() -> None:
    array = np.array([0], dtype=np.int32)
    with pytest.raises(AssertionError, match="room for 8"):
        plan_chunks(
            array, array + 10, array, array + 10, shards=KVShards(2, 0, 1, (0, 1)), max_rows=8
        )
