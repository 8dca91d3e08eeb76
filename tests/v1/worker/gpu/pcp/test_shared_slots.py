# SPDX-License-Identifier: Apache-2.0
"""Ranks that share the KV cache write each new token once, where its reader looks for it.

vLLM's own block tables say which slots a rank has; ours are for the gathered rows of all ranks.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import Interpreter
from tests.v1.worker.gpu.pcp.test_manager import BATCHES, BLOCK_SIZE, make_batch

# P, TP, D.
WORLDS = ((2, 1, 2), (3, 1, 3), (2, 2, 2), (2, 2, 4))

# Of each rank: its DCP rank, and what it writes, token of the batch and slot.
Written = list[tuple[int, list[tuple[int, int]]]]


def written_by_ranks(
    name: str, world: tuple[int, int, int], interleave: int
) -> tuple[Written, list[list[int]]]:
    """Return what each rank writes, and the block table of each request of the batch."""
    from vllm.distributed.pcp.kv_shards import KVShards
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.pcp import copies
    from vllm.v1.worker.gpu.pcp import manager as manager_module
    from vllm.v1.worker.gpu.pcp.manager import PCPManager

    pcp, tp, dcp = world
    config: Any = types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=4096, max_num_seqs=64),
        parallel_config=types.SimpleNamespace(cp_kv_cache_interleave_size=interleave),
    )
    device = torch.device("cpu")
    batch = make_batch(BATCHES[name])
    num_blocks = -(-int(batch.seq_lens.max()) // (BLOCK_SIZE * dcp))
    tables = [
        (np.random.default_rng(req).permutation(100)[:num_blocks] + 100 * req).tolist()
        for req in range(batch.num_reqs)
    ]
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "async_copy_to_gpu", lambda array, device: torch.from_numpy(array))
        for rank in range(pcp * tp):
            pcp_rank, tp_rank = divmod(rank, tp)
            dcp_rank = (tp_rank * pcp + pcp_rank) % dcp
            group = types.SimpleNamespace(world_size=pcp, rank_in_group=pcp_rank)
            shards = KVShards(dcp, dcp_rank, interleave)
            patch.setattr(manager_module, "get_pcp_group", lambda group=group: group)
            patch.setattr(manager_module, "kv_shards", lambda _, shards=shards: shards)
            manager = PCPManager(config, device)
            block_tables = BlockTables(
                [BLOCK_SIZE],
                batch.num_reqs,
                batch.num_tokens,
                [num_blocks],
                device,
                [BLOCK_SIZE],
                dcp,
                dcp_rank,
                interleave,
            )
            for req, row in enumerate(batch.idx_mapping_np.tolist()):
                block_tables.append_block_ids(row, (tables[req],), overwrite=True)
            block_tables.apply_staged_writes()
            slots = block_tables.compute_slot_mappings(
                batch.idx_mapping, batch.query_start_loc, batch.positions, batch.num_tokens
            )
            step = manager.partition_batch(batch)
            assert step is not None
            mapping = manager.prepare_slot_mappings(step, slots)[0]
            assert mapping.shape[0] == pcp * step.plan.num_tokens_after_padding
            rows = torch.nonzero(mapping >= 0).flatten()
            tokens = step.slot_idx[rows].tolist()
            written.append((dcp_rank, list(zip(tokens, mapping[rows].tolist(), strict=True))))
    return written, tables


@pytest.mark.parametrize("interleave", [1, 2, BLOCK_SIZE])
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: "pcp{}-tp{}-dcp{}".format(*world))
@pytest.mark.parametrize("name", ["mixed", "many prefills"])
def test_each_rank_writes_what_it_keeps_and_nothing_else(
    interpreter: Interpreter,
    name: str,
    world: tuple[int, int, int],
    interleave: int,
) -> None:
    written, tables = interpreter(written_by_ranks, name, world, interleave)
    dcp = world[2]
    expected: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(dcp)}
    token = 0
    for req, (scheduled, computed, _) in enumerate(BATCHES[name]):
        for position in range(computed, computed + scheduled):
            keeper = position // interleave % dcp
            # What the keeper has of the request by then, one behind the other.
            place = sum(p // interleave % dcp == keeper for p in range(position))
            slot = tables[req][place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            expected[keeper].append((token, slot))
            token += 1
    for dcp_rank, ours in written:
        assert sorted(ours) == expected[dcp_rank]
