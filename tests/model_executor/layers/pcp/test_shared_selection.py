# SPDX-License-Identifier: Apache-2.0
"""Scores of a run of queries are computed in parts that have room in memory."""

from __future__ import annotations

import pytest

NUM_SCORES = 1 << 18


@pytest.mark.parametrize("num_keys", [1, 1000, NUM_SCORES // 2, NUM_SCORES, 2 * NUM_SCORES])
def test_parts_have_room(monkeypatch: pytest.MonkeyPatch, num_keys: int) -> None:
    from vllm.model_executor.layers.pcp.shared_selection import bounded

    monkeypatch.setenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "1")
    run = slice(7, 607)
    parts = bounded(run, num_keys)
    assert [token for part in parts for token in range(part.start, part.stop)] == [*range(7, 607)]
    for part in parts:
        # One query has to have room.
        assert part.stop - part.start == 1 or (part.stop - part.start) * num_keys <= NUM_SCORES
    fewest = -(-600 // max(1, NUM_SCORES // num_keys))
    assert len(parts) == fewest
