# SPDX-License-Identifier: Apache-2.0
"""A plan, carried out pair by pair, is causal attention of each row to its request.

The oracle knows the mask that is wanted, one bit for each query and key, and counts how often a
call of the plan lets the one see the other. Where ranks share the KV cache, it deals out the tokens
one by one, and lets every rank read what the plan says.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed.pcp.kv_shards import UNSHARED, KVShards
from vllm.v1.attention.backends.pcp.mla.device_plan import gathered_rows
from vllm.v1.attention.backends.pcp.mla.prefill_plan import (
    KeyBatch,
    PrefillPlan,
    plan_prefill,
)

MAX_ROW_TOKENS = 6
# A row: request, first token, number of tokens.
Row = tuple[int, int, int]
# A key: request, position.
Key = tuple[int, int]


def plan(
    rows: list[Row],
    page_size: int = 1,
    max_tokens: int = 10_000,
    shards: KVShards = UNSHARED,
    ends: dict[int, int] | None = None,
    max_repeated_tokens: int = 0,
) -> PrefillPlan:
    req, start, length = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    return plan_prefill(
        start,
        length,
        req,
        page_size=page_size,
        max_tokens=max_tokens,
        shards=shards,
        req_end=None if ends is None else np.array([ends[r] for r in range(len(ends))]),
        max_repeated_tokens=max_repeated_tokens,
    )


def keys_of(batch: KeyBatch, rows: list[Row]) -> list[Key]:
    """Return the keys of a batch, where ranks do not share."""
    lengths = np.diff(batch.cu_seqlens)
    return [
        (rows[row][0], start + token)
        for row, start, length in zip(
            batch.row.tolist(), batch.start.tolist(), lengths.tolist(), strict=True
        )
        for token in range(length)
    ]


def gathered_keys_of(
    batch: KeyBatch, rows: list[Row], shards: KVShards, ends: dict[int, int]
) -> list[Key]:
    """Return the keys of a batch, where ranks share: each reads its part, all of them gather."""
    nothing = (-1, -1)
    parts: list[list[Key]] = [[] for _ in range(shards.world_size)]
    for rank, place in enumerate(shards.gather_order):
        for row, start, length in zip(
            batch.row.tolist(), batch.start.tolist(), np.diff(batch.cu_kept).tolist(), strict=True
        ):
            req = rows[row][0]
            kept = [
                (req, token)
                for token in range(ends[req])
                if token // shards.interleave % shards.world_size == rank
            ]
            read = kept[start : start + length]
            parts[place] += read + [nothing] * (length - len(read))
    index = gathered_rows(
        torch.from_numpy(batch.cu_seqlens),
        torch.from_numpy(batch.cu_kept),
        batch.num_tokens,
        shards.interleave,
        torch.tensor(shards.gather_order, dtype=torch.int32),
    )
    gathered = [key for part in parts for key in part]
    return [gathered[row] for row in index.tolist()]


def carry_out(
    prefill: PrefillPlan, rows: list[Row], keys_by_batch: list[list[Key]] | None = None
) -> list[npt.NDArray[np.int64]]:
    """Return how often each query of each row sees each token of its request up to the row's
    end."""
    seen = [np.zeros((length, start + length), dtype=np.int64) for _, start, length in rows]
    queries = [(row, token) for row, (_, _, length) in enumerate(rows) for token in range(length)]
    if keys_by_batch is None:
        keys_by_batch = [keys_of(batch, rows) for batch in prefill.batches]
    for batch, keys in zip(prefill.batches, keys_by_batch, strict=True):
        for call in batch.calls:
            ours, theirs = queries[call.queries], keys[call.keys]
            bounds = (call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist())
            assert (bounds[0][-1], bounds[1][-1]) == (len(ours), len(theirs))
            for q0, q1, k0, k1 in zip(
                bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False
            ):
                if q0 == q1:
                    continue
                assert q1 - q0 <= call.max_seqlen_q
                assert 0 < k1 - k0 <= call.max_seqlen_k, "a row without keys poisons a merge"
                for index, (row, token) in enumerate(ours[q0:q1]):
                    hidden = q1 - q0 - 1 - index if call.is_causal else 0
                    for req, position in theirs[k0 : k1 - hidden]:
                        assert req == rows[row][0]
                        seen[row][token, position] += 1
    return seen


def require_causal(
    prefill: PrefillPlan, rows: list[Row], keys_by_batch: list[list[Key]] | None = None
) -> None:
    counts = carry_out(prefill, rows, keys_by_batch)
    for (_, start, length), seen in zip(rows, counts, strict=True):
        wanted = np.tril(np.ones((length, start + length), dtype=np.int64), start)
        assert seen.tolist() == wanted.tolist()


@st.composite
def rows_of_a_rank(draw: st.DrawFn) -> list[Row]:
    """Draw requests of one row or two, in any order."""
    rows = []
    for req in range(draw(st.integers(1, 5))):
        start = draw(st.sampled_from([0, 0, 1, 7, 39]))
        length = draw(st.integers(1, MAX_ROW_TOKENS))
        rows.append((req, start, length))
        if draw(st.booleans()):
            tail = start + length + draw(st.sampled_from([0, 0, 1, 5, 30]))
            rows.append((req, tail, draw(st.integers(1, MAX_ROW_TOKENS))))
    return draw(st.permutations(rows))


@settings(deadline=None)
@given(
    rows=rows_of_a_rank(),
    page_size=st.sampled_from([1, 2, 4]),
    spare=st.sampled_from([0, 7, 1000]),
)
def test_every_query_sees_its_past_once(rows: list[Row], page_size: int, spare: int) -> None:
    max_tokens = page_size + spare
    prefill = plan(rows, page_size, max_tokens)
    require_causal(prefill, rows)
    projected: Counter[tuple[int, int]] = Counter()
    for batch in prefill.batches:
        assert batch.num_tokens == int(batch.cu_seqlens[-1]) <= max_tokens
        assert not (batch.start % page_size).any()
        projected.update(keys_of(batch, rows))
    for batch, following in pairwise(prefill.batches):
        is_next_piece = following.start[0] > 0
        assert is_next_piece or batch.num_tokens + following.cu_seqlens[1] > max_tokens
    # Each token up to the end of its request's last row, and none twice.
    ends = {req: max(s + n for r, s, n in rows if r == req) for req, _, _ in rows}
    assert projected == Counter(
        {(req, token): 1 for req, end in ends.items() for token in range(end)}
    )


def test_head_and_tail_share_one_projection_and_nothing_is_merged() -> None:
    rows = [(0, 30, 10), (0, 0, 10)]
    prefill = plan(rows)
    (batch,) = prefill.batches
    assert batch.num_tokens == 40
    assert [call.is_causal for call in batch.calls] == [True, True]
    assert not prefill.has_partial_results


@pytest.mark.parametrize("num_requests", [1, 2, 50])
def test_the_number_of_launches_does_not_grow_with_requests(num_requests: int) -> None:
    """Tails with context first, then heads at the start, as a rank of a fresh batch has them."""
    tails = [(req, 30 + req, 10) for req in range(num_requests)]
    heads = [(req, 0, 10) for req in range(num_requests)]
    (batch,) = plan(tails + heads).batches
    assert len(batch.calls) == 2


def test_little_is_projected_twice_for_one_launch() -> None:
    rows = [(0, 30, 10), (1, 9, 4), (0, 0, 10)]
    prefill = plan(rows, max_repeated_tokens=10)
    require_causal(prefill, rows)
    (batch,) = prefill.batches
    assert batch.num_tokens == 40 + 13 + 10
    assert len(batch.calls) == 1
    assert len(plan(rows, max_repeated_tokens=9).batches[0].calls) > 1


def test_long_requests_are_merged_from_pieces() -> None:
    rows = [(0, 20, 6), (0, 60, 6), (1, 0, 3)]
    prefill = plan(rows, page_size=4, max_tokens=20)
    require_causal(prefill, rows)
    assert prefill.has_partial_results
    assert len(prefill.batches) > 2


@st.composite
def shared_caches(draw: st.DrawFn) -> list[KVShards]:
    """Draw how two to four ranks share the KV cache, as each of them sees it."""
    size, interleave = draw(st.integers(2, 4)), draw(st.sampled_from([1, 2, 4]))
    order = tuple(draw(st.permutations(range(size))))
    return [KVShards(size, rank, interleave, order) for rank in range(size)]


@st.composite
def rows_of_ranks(draw: st.DrawFn, num_ranks: int) -> tuple[list[list[Row]], dict[int, int]]:
    """Draw the rows of every rank, and each request's tokens after the step.

    Requests are computed by all ranks, or cut into chunks of which each rank has a head and a tail.
    """
    rows: list[list[Row]] = [[] for _ in range(num_ranks)]
    ends = {}
    for req in range(draw(st.integers(1, 4))):
        start = draw(st.sampled_from([0, 0, 1, 7, 39]))
        if draw(st.booleans()):
            length = draw(st.integers(1, MAX_ROW_TOKENS))
            for own in rows:
                own.append((req, start, length))
            ends[req] = start + length
            continue
        lengths = [draw(st.integers(1, MAX_ROW_TOKENS)) for _ in range(2 * num_ranks)]
        starts = [start + sum(lengths[:chunk]) for chunk in range(2 * num_ranks)]
        for rank, own in enumerate(rows):
            for chunk in (rank, 2 * num_ranks - 1 - rank):
                own.append((req, starts[chunk], lengths[chunk]))
        ends[req] = start + sum(lengths)
    return [draw(st.permutations(own)) for own in rows], ends


@settings(deadline=None)
@given(
    data=st.data(), ranks=shared_caches(), pages=st.integers(1, 2), spare=st.sampled_from([0, 9])
)
def test_ranks_that_share_read_alike_and_every_query_sees_its_past_once(
    data: st.DataObject, ranks: list[KVShards], pages: int, spare: int
) -> None:
    rows_by_rank, ends = data.draw(rows_of_ranks(len(ranks)))
    page_size = pages * ranks[0].interleave
    max_tokens = len(ranks) * page_size + spare
    read = []
    for shards, rows in zip(ranks, rows_by_rank, strict=True):
        # Whatever may be repeated, nothing is: it would depend on a rank's rows.
        prefill = plan(rows, page_size, max_tokens, shards, ends, max_repeated_tokens=1000)
        keys = [gathered_keys_of(batch, rows, shards, ends) for batch in prefill.batches]
        require_causal(prefill, rows, keys)
        read.append(
            [
                (
                    [rows[row][0] for row in batch.row.tolist()],
                    batch.start.tolist(),
                    batch.cu_kept.tolist(),
                )
                for batch in prefill.batches
            ]
        )
        for batch in prefill.batches:
            assert len(ranks) * int(batch.cu_kept[-1]) <= max_tokens
            assert batch.num_tokens <= max_tokens
            assert not (batch.start % page_size).any()
        # No more is up-projected than this rank attends to.
        needed = Counter(dict.fromkeys(ends, 0))
        for req, start, length in rows:
            needed[req] = max(needed[req], start + length)
        assert sum(len(batch) for batch in keys) == sum(needed.values())
    assert all(other == read[0] for other in read)


def test_a_rank_without_keys_in_a_batch_takes_part_in_its_gather() -> None:
    """The second piece is that of the last chunks alone."""
    shards = KVShards(2, 0, 1, (0, 1))
    prefill = plan([(0, 0, 4), (0, 4, 4)], 4, 8, shards, {0: 16})
    assert [int(batch.cu_kept[-1]) for batch in prefill.batches] == [4, 4]
    assert [batch.num_tokens for batch in prefill.batches] == [8, 0]
    assert prefill.batches[1].calls == ()
