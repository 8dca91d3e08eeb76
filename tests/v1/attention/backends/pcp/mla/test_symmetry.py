# SPDX-License-Identifier: Apache-2.0
"""Ranks that share the KV cache issue the same collectives in every step.

Random global batches go through what a worker does with them: the manager, vLLM's own metadata
builder under ours, the cache update and both ways of attention. In place of process groups stands
what writes down operation, group, shape and dtype. Nothing waits for anybody, so nothing hangs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.v1.worker.gpu.pcp.oracle import random_batches
from tests.v1.worker.gpu.pcp.test_manager import make_batch
from vllm.distributed.pcp import kv_gather, shard_collectives
from vllm.distributed.pcp.step import REPLICATED, StepState, set_step_state
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.pcp.mla import latent, shared_decode
from vllm.v1.attention.backends.pcp.mla.latent import PlannedPrefillMixin, PlanPrefillMixin
from vllm.v1.attention.backends.pcp.mla.prefill_plan import PrefillPlan, plan_prefill
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pcp import copies
from vllm.v1.worker.gpu.pcp import manager as manager_module
from vllm.v1.worker.gpu.pcp.manager import PCPManager

# In all worlds together.
NUM_BATCHES = 5_000
PAGE_SIZE, WORKSPACE = 4, 1024
LATENT, ROPE, NOPE, V_DIM, NUM_HEADS = 4, 4, 2, 2, 2
# P, TP, D, tokens that a rank keeps in a row.
WORLDS = ((2, 1, 2, 1), (3, 1, 3, 1), (4, 1, 4, 4), (2, 2, 2, 1), (2, 2, 4, 1), (2, 1, 1, 1))
# Which rows the stock builders take for decodes.
FAMILIES = {
    "FLASH_ATTN_MLA": (QueryLenSupport.VARLEN, 512),
    "all others": (QueryLenSupport.UNIFORM, 128),
}


class Group:
    """A process group that only one rank is in; it gets its own tensors from the others."""

    device_communicator = None

    def __init__(self, name: str, size: int, rank: int, log: list[str]) -> None:
        self.name, self.world_size, self.rank_in_group, self.log = name, size, rank, log
        self.ranks = list(range(size))
        self.device_group = self

    def write(self, operation: str, tensor: torch.Tensor) -> None:
        self.log.append(f"{operation} {self.name} {list(tensor.shape)} {tensor.dtype}")

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        self.write("all_gather", tensor)
        return torch.cat([tensor] * self.world_size, dim=dim)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.write("all_reduce", tensor)
        return tensor


def all_gather_into_tensor(output: torch.Tensor, own: torch.Tensor, group: Group) -> None:
    assert output.shape[0] == group.world_size * own.shape[0]
    group.write("all_gather_into_tensor", own)


class Gather:
    """A gather of new latents."""

    identity = torch.arange(10_000)

    def __init__(self, group: Group) -> None:
        self.group = group

    def begin(self, num_tokens: int, row_bytes: int) -> torch.Tensor:
        self.rows = torch.zeros(num_tokens, row_bytes, dtype=torch.uint8)
        self.group.write("kv_gather", self.rows)
        return self.rows

    def finish(self) -> torch.Tensor:
        return self.rows.repeat(self.group.world_size, 1)


class PrefillBackend:
    """Attends, and computes nothing."""

    def prepare_metadata(self, metadata: Any) -> None:
        """Take the metadata of a step."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> Any:
        assert (kwargs["cu_seqlens_q"][-1], kwargs["cu_seqlens_k"][-1]) == (len(q), len(k))
        out = torch.zeros(len(q), NUM_HEADS, V_DIM)
        return (out, torch.zeros(NUM_HEADS, len(q))) if kwargs["return_softmax_lse"] else out


class StockImpl(MLACommonImpl[Any]):
    """A stock backend that computes nothing."""

    def do_kv_cache_update(self, *args: Any) -> None:
        """Write nothing."""

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        assert attn_metadata.decode.seq_lens.shape[0] == attn_metadata.num_decodes
        return q[..., :LATENT], torch.zeros(q.shape[:2])


class Impl(PlannedPrefillMixin, StockImpl):
    """Ours over it, without an engine."""

    def __init__(self, pcp: int, dcp: int) -> None:
        self.pcp_world_size, self.num_shards = pcp, dcp
        self.num_head_shards = max(1, dcp // pcp)
        self.head_size, self.kv_lora_rank = LATENT + ROPE, LATENT
        self.num_heads, self.qk_nope_head_dim, self.v_head_dim = NUM_HEADS, NOPE, V_DIM
        self.kv_cache_dtype = "auto"
        self._use_flashinfer_concat_mla_k = False
        self.kv_b_proj: Any = lambda x: (torch.zeros(len(x), NUM_HEADS * (NOPE + V_DIM)), None)


def make_builder(family: str, pcp: int, manager: PCPManager) -> Any:
    """Return our builder over the stock one, without an engine."""
    support, threshold = FAMILIES[family]

    class Builder(PlanPrefillMixin, MLACommonMetadataBuilder[Any]):
        query_len_support = support

    builder: Any = object.__new__(Builder)
    builder.metadata_cls = MLACommonMetadata
    builder.device = torch.device("cpu")
    builder.reorder_batch_threshold = threshold
    builder.page_size = PAGE_SIZE
    builder.q_data_type = torch.float32
    builder.model_config = SimpleNamespace(dtype=torch.float32, get_head_size=lambda: 576)
    builder.chunked_prefill_workspace_size = WORKSPACE
    builder.chunked_prefill_workspace = torch.empty(WORKSPACE, LATENT + ROPE)
    builder._prefill_backend, builder._has_plan = PrefillBackend(), True
    builder.dcp_world_size, builder._pcp_rank = 1, manager.pcp_rank
    builder.shards, builder.gathered = manager.shards, None
    builder.cp_kv_cache_interleave_size = manager.shards.interleave
    if manager.shards.world_size > 1:
        builder._share(pcp)
    return builder


@dataclass
class Rank:
    """One rank: its groups, its worker's parts, what it has issued."""

    groups: dict[str, Group]
    manager: PCPManager
    impl: Impl
    builders: dict[str, Any]
    log: list[str]

    def run(self, batch: InputBatch) -> dict[str, list[str]]:
        """Return the collectives of one layer in a step, with the backends of each family."""
        step = self.manager.partition_batch(batch)
        slot_mapping = torch.zeros(1, batch.num_tokens, dtype=torch.int64)
        if step is None:
            set_step_state(REPLICATED)
            shards = self.manager.shards
            num_kept = shards.num_kept(batch.seq_lens, shards.rank)
            batch = dataclasses.replace(batch, dcp_local_seq_lens=num_kept)
        else:
            set_step_state(StepState(is_partitioned=True, plan=step.plan))
            slot_mapping = self.manager.prepare_slot_mappings(step, slot_mapping)
            batch = step.local_batch
        common = common_metadata(batch, slot_mapping[0])
        issued = {}
        for family, builder in self.builders.items():
            self.log.clear()
            metadata = builder.build(0, common)
            self._attend(metadata, slot_mapping[0], batch.num_tokens_after_padding)
            issued[family] = list(self.log)
        return issued

    def _attend(self, metadata: Any, slot_mapping: torch.Tensor, num_rows: int) -> None:
        """Do what vLLM's layer does."""
        cache, scale = torch.zeros(1, PAGE_SIZE, LATENT + ROPE), torch.ones(1)
        kv_c, k_pe = torch.zeros(num_rows, LATENT), torch.zeros(num_rows, 1, ROPE)
        self.impl.do_kv_cache_update(kv_c, k_pe, cache, slot_mapping, "auto", scale)
        num_mqa = metadata.num_decode_tokens
        num_mha = metadata.num_actual_tokens - num_mqa
        if num_mha > 0:
            q = torch.zeros(num_mha, NUM_HEADS, NOPE + ROPE)
            output = torch.zeros(num_mha, NUM_HEADS * V_DIM)
            self.impl.forward_mha(q, kv_c, k_pe, cache, metadata, scale, output)
        if num_mqa > 0:
            q_latent = torch.zeros(num_mqa, NUM_HEADS, LATENT)
            q_pe = torch.zeros(num_mqa, NUM_HEADS, ROPE)
            out, _ = self.impl.forward_mqa((q_latent, q_pe), cache, metadata, None)
            assert out.shape == (num_mqa, NUM_HEADS, LATENT)


def common_metadata(batch: InputBatch, slot_mapping: torch.Tensor) -> CommonAttentionMetadata:
    """Return what the runner tells builders of a batch."""
    seq_lens = torch.from_numpy(batch.num_computed_tokens_np + batch.num_scheduled_tokens)
    return CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc,
        query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np),
        seq_lens=batch.seq_lens,
        num_reqs=batch.num_reqs,
        num_actual_tokens=batch.num_tokens,
        max_query_len=int(batch.num_scheduled_tokens.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=torch.zeros(batch.num_reqs, 1, dtype=torch.int32),
        slot_mapping=slot_mapping,
        seq_lens_cpu_upper_bound=seq_lens,
        dcp_local_seq_lens=batch.dcp_local_seq_lens,
    )


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Return what says which rank this process is; kernels compute nothing."""
    process = SimpleNamespace(groups={})
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for module in (shard_collectives, manager_module):
        for name in ("tp", "pcp", "dcp"):
            monkeypatch.setattr(
                module, f"get_{name}_group", lambda name=name: process.groups[name], raising=False
            )
    monkeypatch.setattr(
        shared_decode,
        "get_tensor_model_parallel_rank",
        lambda: process.groups["tp"].rank_in_group,
    )
    monkeypatch.setattr(kv_gather, "get_pcp_group", lambda: process.groups["pcp"])
    monkeypatch.setattr(latent, "get_kv_gather", lambda: Gather(process.groups["pcp"]))
    dist = SimpleNamespace(all_gather_into_tensor=all_gather_into_tensor)
    monkeypatch.setattr(shard_collectives, "dist", dist)
    nothing: Any = lambda *args, **kwargs: None
    ops = SimpleNamespace(concat_and_cache_mla=nothing, gather_and_maybe_dequant_cache=nothing)
    monkeypatch.setattr(latent, "ops", ops)
    monkeypatch.setattr(latent, "merge_attn_states", SimpleNamespace(merge_attn_states=nothing))
    # No pinned memory without a GPU.
    monkeypatch.setattr(copies, "async_copy_to_gpu", lambda array, device: torch.from_numpy(array))
    yield process
    torch.set_num_threads(num_threads)
    set_step_state(REPLICATED)


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
        builders = {family: make_builder(family, pcp, manager) for family in FAMILIES}
        ranks.append(Rank(process.groups, manager, Impl(pcp, dcp), builders, log))
    return ranks


def global_batches(pcp: int, num_batches: int) -> Iterator[InputBatch]:
    """Yield batches as the runner makes them: the shortest rows first."""
    for batch in random_batches(pcp, num_batches, seed=5):
        requests = sorted(batch.requests, key=lambda request: request.num_scheduled)
        yield make_batch([(r.num_scheduled, r.num_computed, r.is_prefilling) for r in requests])


def collectives_of(
    process: SimpleNamespace, ranks: list[Rank], batch: InputBatch
) -> list[dict[str, list[str]]]:
    """Return what each rank issues in a step."""
    issued = []
    for rank in ranks:
        process.groups = rank.groups
        issued.append(rank.run(batch))
    return issued


def test_a_plan_is_made_once_and_not_before_attention(
    process: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has nothing to do before the first layer."""
    plans = []

    def plan(*args: Any, **kwargs: Any) -> PrefillPlan:
        plans.append(plan_prefill(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr(latent, "plan_prefill", plan)
    rank = make_ranks(process, (2, 1, 1, 1))[0]
    batch = make_batch([(600, 0, True)])
    metadata = rank.builders["FLASH_ATTN_MLA"].build(0, common_metadata(batch, batch.positions))
    assert not plans
    for _ in range(2):
        rank._attend(metadata, batch.positions, batch.num_tokens)
    assert len(plans) == 1


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: "pcp{}-tp{}-dcp{}-{}".format(*world))
def test_ranks_issue_the_same_collectives(
    process: SimpleNamespace, world: tuple[int, int, int, int]
) -> None:
    pcp, _, dcp, _ = world
    ranks = make_ranks(process, world)
    seen: dict[str, set[str]] = {family: set() for family in FAMILIES}
    for batch in global_batches(pcp, -(-NUM_BATCHES // len(WORLDS))):
        first, *others = collectives_of(process, ranks, batch)
        assert all(other == first for other in others)
        for family, issued in first.items():
            seen[family].update(" ".join(line.split()[:2]) for line in issued)
    expected = {"kv_gather pcp"}
    if dcp > 1:
        expected |= {"all_gather dcp", "all_reduce dcp", "all_gather_into_tensor dcp"}
    if dcp > pcp:
        expected |= {"all_gather tp"}
    assert seen == dict.fromkeys(FAMILIES, expected)


MUTANTS = {
    "chunks of one token are decodes": ("end_decodes_at", lambda common, num_decodes: common),
    "batches are planned from a rank's own rows": (
        "plan_prefill",
        lambda *rows, **kwargs: plan_prefill(*rows, **{**kwargs, "req_end": None}),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_rank_that_goes_by_its_own_rows_is_noticed(
    process: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(latent, *MUTANTS[name])
    ranks = make_ranks(process, (2, 1, 2, 1))
    differs = False
    for batch in global_batches(2, 200):
        first, second = collectives_of(process, ranks, batch)
        differs |= first != second
    assert differs


def test_caches_are_not_shared_with_a_prefill_backend_that_takes_no_plan() -> None:
    class Builder(PlanPrefillMixin, MLACommonMetadataBuilder[Any]):
        pass

    builder: Any = object.__new__(Builder)
    builder._has_plan = False
    builder._prefill_backend = SimpleNamespace(get_name=lambda: "OTHER")
    with pytest.raises(NotImplementedError, match="got OTHER"):
        builder._share(2)
