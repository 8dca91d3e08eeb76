# SPDX-License-Identifier: Apache-2.0
"""Ranks that share the caches of sparse MLA issue the same collectives in every step.

As ``test_symmetry``: random global batches go through the manager, our builders, the one of the
indexer over vLLM's own, the indexer's write and selection, the update of the latents and attention.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.v1.attention.backends.pcp.mla.test_symmetry import (
    WORLDS,
    Gather,
    Group,
    common_metadata,
    global_batches,
)
from tests.v1.attention.backends.pcp.mla.test_symmetry import process as process
from vllm.distributed.pcp import kv_gather
from vllm.distributed.pcp.kv_shards import KVShards
from vllm.distributed.pcp.step import REPLICATED, StepState, set_step_state
from vllm.model_executor.layers.pcp import shared_selection, sparse_attn_indexer
from vllm.model_executor.layers.pcp.shared_selection import SharedSelection
from vllm.model_executor.layers.pcp.sparse_attn_indexer import write_keys
from vllm.v1.attention.backends.pcp.mla import shared_rows, shared_sparse
from vllm.v1.attention.backends.pcp.mla.indexer import SharedIndexerMetadataBuilder
from vllm.v1.attention.backends.pcp.mla.request_chunks import plan_chunks
from vllm.v1.attention.backends.pcp.mla.shared_sparse import (
    KeptTokensMixin,
    SharedSparseBuilderMixin,
    SharedSparseMixin,
)
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pcp.manager import PCPManager

# In all worlds together.
NUM_BATCHES = 5_000
SHARED_WORLDS = tuple(world for world in WORLDS if world[2] > 1)
# The longest request of a batch has room, two of them have not.
MAX_ROWS = 5184
LATENT, ROPE, NUM_HEADS, INDEX_DIM, TOPK, BLOCK_SIZE = 4, 4, 2, 16, 8, 4
MAX_TOKENS = 1024


class StockImpl(KeptTokensMixin):
    """A stock backend that computes nothing."""

    lse_base_on_e = True

    def do_kv_cache_update(self, *args: Any) -> None:
        """Write nothing."""

    def attend(
        self, q: Any, cache: torch.Tensor, slots: torch.Tensor, num_slots: torch.Tensor, _: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        assert slots.shape == (len(q), TOPK)
        return q[..., :LATENT], torch.zeros(q.shape[:2])


class Impl(SharedSparseMixin, StockImpl):
    """Ours over it, without an engine."""

    def __init__(self, pcp: int, shards: KVShards) -> None:
        self.pcp_world_size, self.num_shards = pcp, shards.world_size
        self.num_head_shards = max(1, shards.world_size // pcp)
        self.shards, self.max_rows = shards, MAX_ROWS
        self.num_heads, self.kv_lora_rank, self.kv_cache_dtype = NUM_HEADS, LATENT, "auto"
        self._row = (LATENT + ROPE, torch.float32)
        self.topk_indices_buffer = torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int32)


class Builder(SharedSparseBuilderMixin):
    """Ours of attention, without an engine."""

    def __init__(self, shards: KVShards) -> None:
        self.shards, self.max_rows = shards, MAX_ROWS
        self.kv_cache_spec: Any = SimpleNamespace(block_size=BLOCK_SIZE)


def make_indexer_builder(shards: KVShards) -> Any:
    """Return ours of the indexer over the stock one, without an engine."""
    builder: Any = object.__new__(SharedIndexerMetadataBuilder)
    builder.shards, builder.max_rows = shards, MAX_ROWS
    builder.reorder_batch_threshold, builder.use_flattening = 1, False
    builder.compress_ratio, builder.num_speculative_tokens = 1, 0
    builder.decode_lens_buffer = torch.zeros(MAX_TOKENS, dtype=torch.int32)
    builder.scheduler_metadata_buffer = torch.empty(0)
    return builder


@dataclasses.dataclass
class Rank:
    """One rank: its groups, its worker's parts, what it has issued."""

    groups: dict[str, Group]
    manager: PCPManager
    impl: Any
    builder: Any
    indexer_builder: Any
    log: list[str]

    def run(self, batch: InputBatch) -> list[str]:
        """Return the collectives of one layer in a step."""
        shards = self.manager.shards
        step = self.manager.partition_batch(batch)
        slot_mapping = torch.zeros(1, batch.num_tokens, dtype=torch.int64)
        if step is None:
            set_step_state(REPLICATED)
            num_kept = shards.num_kept(batch.seq_lens, shards.rank)
            batch = dataclasses.replace(batch, dcp_local_seq_lens=num_kept)
        else:
            set_step_state(StepState(is_partitioned=True, plan=step.plan))
            slot_mapping = self.manager.prepare_slot_mappings(step, slot_mapping)
            batch = step.local_batch
        common = common_metadata(batch, slot_mapping[0])
        num_rows = batch.num_tokens_after_padding
        self.log.clear()
        keys, cache = torch.zeros(num_rows, INDEX_DIM), torch.zeros(1, BLOCK_SIZE, LATENT + ROPE)
        write_keys(keys, cache, slot_mapping[0], INDEX_DIM, "ue8m0")
        SharedSelection(shards, MAX_ROWS, INDEX_DIM, TOPK, 4096).select(
            torch.zeros(num_rows, 1, INDEX_DIM),
            torch.zeros(num_rows, 1),
            cache,
            self.indexer_builder.build(0, common),
            self.impl.topk_indices_buffer[:num_rows],
        )
        metadata = self.builder.build(0, common)
        kv_c, k_pe = torch.zeros(num_rows, LATENT), torch.zeros(num_rows, 1, ROPE)
        scale = torch.ones(1)
        self.impl.do_kv_cache_update(kv_c, k_pe, cache, slot_mapping[0], "auto", scale)
        num_tokens = metadata.num_actual_tokens
        q = tuple(torch.zeros(num_tokens, NUM_HEADS, width) for width in (LATENT, ROPE))
        out, _ = self.impl.forward_mqa(q, cache, metadata, None)
        assert out.shape == (num_tokens, NUM_HEADS, LATENT)
        return list(self.log)


@pytest.fixture
def sparse_process(process: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return what says which rank this process is; kernels compute nothing."""
    nothing: Any = lambda *args, **kwargs: None
    ops = SimpleNamespace(
        cp_gather_indexer_k_quant_cache=nothing,
        indexer_k_quant_and_cache=nothing,
        top_k_per_row_decode=lambda _logits, _n, _lens, selected, *sizes: selected.fill_(-1),
        top_k_per_row_prefill=nothing,
    )
    scores: Any = lambda q, *args, **kwargs: torch.zeros(len(q[0]), 4)
    for module in (shared_selection, sparse_attn_indexer):
        monkeypatch.setattr(module, "ops", ops)
    first_rows: Any = lambda _table, _cu_kept, num_read, _size: torch.zeros(num_read).int()
    monkeypatch.setattr(shared_sparse, "slots_to_read", first_rows)
    # What others put in is not there.
    nobody: Any = lambda candidates: candidates[0].int().fill_(-1)
    monkeypatch.setattr(shared_selection, "best_candidates", nobody)
    for name in ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"):
        monkeypatch.setattr(shared_selection, name, scores)
    group: Any = lambda: process.groups["pcp"]
    for module in (sparse_attn_indexer, shared_rows):
        monkeypatch.setattr(module, "get_pcp_group", group)
    monkeypatch.setattr(sparse_attn_indexer, "get_kv_gather", lambda: Gather(group()))
    monkeypatch.setattr(kv_gather, "get_pcp_group", group)
    monkeypatch.setattr(workspace, "_manager", None)
    workspace.init_workspace_manager(torch.device("cpu"))
    return process


def make_ranks(process: SimpleNamespace, world: tuple[int, int, int, int]) -> list[Rank]:
    """Return all ranks of a world."""
    pcp, tp, dcp, interleave = world
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=64),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=interleave),
    )
    ranks = []
    for rank in range(pcp * tp):
        pcp_rank, tp_rank = divmod(rank, tp)
        places = {
            "tp": (tp, tp_rank),
            "pcp": (pcp, pcp_rank),
            "dcp": (dcp, (tp_rank * pcp + pcp_rank) % dcp),
        }
        log: list[str] = []
        process.groups = {name: Group(name, *place, log) for name, place in places.items()}
        manager = PCPManager(config, torch.device("cpu"))
        # Of the steps, the smaller ones are padded to the rows of a CUDA graph.
        manager.graphs.allocate(32, torch.device("cpu"))
        manager.graphs.num_rows = np.array([16, 32])
        shards = manager.shards
        ranks.append(
            Rank(
                process.groups,
                manager,
                Impl(pcp, shards),
                Builder(shards),
                make_indexer_builder(shards),
                log,
            )
        )
    return ranks


def collectives_of(
    process: SimpleNamespace, ranks: list[Rank], batch: InputBatch
) -> list[list[str]]:
    """Return what each rank issues in a step."""
    issued = []
    for rank in ranks:
        process.groups = rank.groups
        issued.append(rank.run(batch))
    return issued


@pytest.mark.slow
@pytest.mark.parametrize("world", SHARED_WORLDS, ids=lambda w: "pcp{}-tp{}-dcp{}-{}".format(*w))
def test_ranks_issue_the_same_collectives(
    sparse_process: SimpleNamespace, world: tuple[int, int, int, int]
) -> None:
    pcp, _, dcp, _ = world
    ranks = make_ranks(sparse_process, world)
    seen: set[str] = set()
    most = 0
    for batch in global_batches(pcp, -(-NUM_BATCHES // len(SHARED_WORLDS))):
        first, *others = collectives_of(sparse_process, ranks, batch)
        assert all(other == first for other in others)
        seen.update(" ".join(line.split()[:2]) for line in first)
        most = max(most, len(first))
    expected = {"kv_gather pcp", "all_gather_into_tensor dcp", "all_gather dcp", "all_reduce dcp"}
    assert seen == expected | ({"all_gather tp"} if dcp > pcp else set())
    # Two gathers of new rows, three or four exchanges of decodes, three for each of some chunks.
    assert most > 2 + 4 + 3


def own_ends(*rows: Any, **kwargs: Any) -> Any:
    """Plan from a rank's own rows: up to where the last of them ends."""
    row_start, row_len, row_req, req_end = rows
    ends = np.zeros_like(req_end)
    np.maximum.at(ends, row_req, row_start + row_len)
    return plan_chunks(row_start, row_len, row_req, ends, **kwargs)


MUTANTS: dict[str, tuple[str, Any]] = {
    "chunks of one token are decodes": (
        "get_step_state",
        lambda: SimpleNamespace(is_partitioned=False, plan=None),
    ),
    "batches are planned from a rank's own rows": ("plan_chunks", own_ends),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_rank_that_goes_by_its_own_rows_is_noticed(
    sparse_process: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(shared_rows, *MUTANTS[name])
    ranks = make_ranks(sparse_process, (2, 1, 2, 1))
    differs = False
    for batch in global_batches(2, 200):
        first, second = collectives_of(sparse_process, ranks, batch)
        differs |= first != second
    assert differs
