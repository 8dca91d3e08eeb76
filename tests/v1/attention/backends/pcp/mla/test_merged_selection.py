# SPDX-License-Identifier: Apache-2.0
"""The best candidates of ranks that share keys are the best of all keys."""

from __future__ import annotations

from random import Random

import pytest
import torch

from vllm.distributed.pcp.kv_shards import KVShards
from vllm.v1.attention.backends.pcp.mla.merged_selection import best_candidates, pack_candidates

NUM_SELECTED = 5
# Less keys than are selected, fewer than there are ranks, and none.
NUM_KEYS = (40, 17, 6, 5, 3, 1, 0)
# Many are equal; the two zeros are, too.
SCORES = (-2.5, -1e-30, -0.0, 0.0, 1e-30, 0.5, 3e38, -3e38)


def best(scores: list[float], keys: list[int]) -> list[int]:
    """Return the best keys; of equal ones the first."""
    return sorted(keys, key=lambda key: (-scores[key], key))[:NUM_SELECTED]


@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_candidates_are_merged(world_size: int, interleave: int) -> None:
    random = Random(world_size * interleave)
    rows = [random.choices(SCORES, k=num_keys) for num_keys in NUM_KEYS]
    candidates = []
    for rank in range(world_size):
        logits = torch.full((len(rows), max(NUM_KEYS)), torch.nan)
        selected = torch.full((len(rows), NUM_SELECTED), -1, dtype=torch.int32)
        for row, scores in enumerate(rows):
            kept = [k for k in range(len(scores)) if k // interleave % world_size == rank]
            logits[row, : len(kept)] = torch.tensor([scores[k] for k in kept])
            chosen = [kept.index(key) for key in best(scores, kept)]
            random.shuffle(chosen)
            selected[row, : len(chosen)] = torch.tensor(chosen)
        shards = KVShards(world_size, rank, interleave)
        candidates.append(pack_candidates(logits, selected, shards))
    random.shuffle(candidates)
    merged = best_candidates(torch.stack(candidates))
    assert merged.dtype == torch.int32
    for positions, scores in zip(merged.tolist(), rows, strict=True):
        expected = best(scores, list(range(len(scores))))
        assert positions == expected + [-1] * (NUM_SELECTED - len(expected))
