# SPDX-License-Identifier: Apache-2.0
"""A plan, carried out pair by pair, is causal attention of each row to its request.

The oracle knows the mask that is wanted, one bit for each query and key, and counts how often a
call of the plan lets the one see the other.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.attention.backends.pcp.mla.prefill_plan import (
    KeyBatch,
    PrefillPlan,
    min_batch_tokens,
    plan_prefill,
)

MAX_ROW_TOKENS = 6
# A row: request, first token, number of tokens.
Row = tuple[int, int, int]


def plan(
    rows: list[Row], page_size: int = 1, max_tokens: int = 10_000, max_repeated_tokens: int = 0
) -> PrefillPlan:
    req, start, length = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    return plan_prefill(
        start,
        length,
        req,
        page_size=page_size,
        max_tokens=max_tokens,
        max_repeated_tokens=max_repeated_tokens,
    )


def keys_of(batch: KeyBatch, rows: list[Row]) -> list[tuple[int, int]]:
    """Return request and position of each key of a batch."""
    lengths = np.diff(batch.cu_seqlens)
    return [
        (rows[row][0], start + token)
        for row, start, length in zip(
            batch.row.tolist(), batch.start.tolist(), lengths.tolist(), strict=True
        )
        for token in range(length)
    ]


def carry_out(prefill: PrefillPlan, rows: list[Row]) -> list[npt.NDArray[np.int64]]:
    """Return how often each query of each row sees each token of its request up to the row's
    end."""
    seen = [np.zeros((length, start + length), dtype=np.int64) for _, start, length in rows]
    queries = [(row, token) for row, (_, _, length) in enumerate(rows) for token in range(length)]
    for batch in prefill.batches:
        keys = keys_of(batch, rows)
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


def require_causal(prefill: PrefillPlan, rows: list[Row]) -> None:
    for (_, start, length), seen in zip(rows, carry_out(prefill, rows), strict=True):
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


@given(
    rows=rows_of_a_rank(),
    page_size=st.sampled_from([1, 2, 4]),
    spare=st.sampled_from([0, 7, 1000]),
)
def test_every_query_sees_its_past_once(rows: list[Row], page_size: int, spare: int) -> None:
    max_tokens = min_batch_tokens(MAX_ROW_TOKENS, page_size) + spare
    prefill = plan(rows, page_size, max_tokens)
    require_causal(prefill, rows)
    projected: Counter[tuple[int, int]] = Counter()
    for batch in prefill.batches:
        assert batch.num_tokens == int(batch.cu_seqlens[-1]) <= max_tokens
        assert not (batch.start % page_size).any()
        projected.update(keys_of(batch, rows))
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
    prefill = plan(rows, page_size=4, max_tokens=min_batch_tokens(MAX_ROW_TOKENS, 4))
    require_causal(prefill, rows)
    assert prefill.has_partial_results
    assert len(prefill.batches) > 2
