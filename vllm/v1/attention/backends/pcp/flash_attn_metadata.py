# SPDX-License-Identifier: Apache-2.0
"""What the rows of a step attend to on this rank, for FLASH_ATTN; see ``flash_attn``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

import vllm.envs as envs
from vllm.distributed.parallel_state import get_pcp_group
from vllm.distributed.pcp.shard_collectives import kv_shards
from vllm.distributed.pcp.step import get_step_state
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn as stock
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.context_plan import plan_gathered_rows, plan_step_keys
from vllm.v1.attention.backends.pcp.kv_gather import RowsPerRequestMixin
from vllm.v1.worker.gpu.pcp.copies import copy_to_device

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec
    from vllm.v1.worker.gpu.pcp.layout import PartitionPlan


@dataclass
class StepRows:
    """All rows of this rank, over this step's keys.

    Attributes:
        key_idx: ``[num_keys]`` int32, gathered row of each key; None if the keys are the layer's.
        cu_seqlens_k: ``[num_rows + 1]`` int32.
        max_seqlen_k: Most keys of a row.
    """

    key_idx: torch.Tensor | None
    cu_seqlens_k: torch.Tensor
    max_seqlen_k: int


@dataclass
class CachedRows:
    """Rows over what this rank keeps of the cache.

    Attributes:
        first_token: This rank's token that the first result is for.
        num_tokens: Results for this rank.
        num_sent_tokens: Queries that each rank puts in, at least as many.
        cu_seqlens_q: ``[num_rows + 1]`` int32.
        seqused_k: ``[num_rows]`` int32, keys here.
        block_table: ``[num_rows, max_num_blocks]`` int32.
        max_seqlen_q: Most queries of a row.
        max_seqlen_k: At least as many keys as any row has here.
        num_splits: FlashAttention 3's; 0 leaves it to the kernel.
        scheduler_metadata: FlashAttention 3's, or None.
    """

    first_token: int
    num_tokens: int
    num_sent_tokens: int
    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    block_table: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    num_splits: int
    scheduler_metadata: torch.Tensor | None = None


@dataclass
class SharedCacheMetadata(FlashAttentionMetadata):
    """The stock metadata, and what is attended to where.

    Attributes:
        step: What rows see of this step; None if all of it is in the cache for them.
        replicated: What replicated rows see of the cache; None if nothing.
        gathered: What the partitioned rows of all ranks see of the cache; None if nothing.
    """

    step: StepRows | None = None
    replicated: CachedRows | None = None
    gathered: CachedRows | None = None


class PCPFlashAttentionMetadataBuilder(RowsPerRequestMixin, FlashAttentionMetadataBuilder):
    """Buffers for two rows a request; with D > 1, says what is attended to where."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._plans_kernel = self.aot_schedule
        self._shares_cache = self.dcp_world_size > 1
        if self._shares_cache:
            self._pcp_rank: int = get_pcp_group().rank_in_group
            self._num_query_groups = self.dcp_world_size // get_pcp_group().world_size
            self._shards = kv_shards(self.cp_kv_cache_interleave_size)
            # The stock builder would plan for the heads of all D ranks, and make the host wait for
            # its count of what this one keeps.
            self.dcp_world_size = 1
            self.aot_schedule = False
            self.supports_update_block_table = False

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """Return what a graph may hold; with D > 1, rows of one length."""
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if vllm_config.parallel_config.decode_context_parallel_size == 1:
            return support
        return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda level: level.value)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        """Build as usual; with D > 1, say what is attended to where."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not self._shares_cache:
            return metadata
        plan = get_step_state().plan
        if plan is not None or metadata.max_query_len > 1:
            # In no CUDA graph. With the splits that graphs ask for, FlashAttention 3 would allocate
            # so many results of every token.
            metadata.max_num_splits = 1 if envs.VLLM_BATCH_INVARIANT else 0
        if plan is not None:
            return self._build_partitioned(metadata, plan)
        return self._build_replicated(
            metadata, common_attn_metadata, plans_kernel=self._plans_kernel and not fast_build
        )

    def _build_replicated(
        self,
        metadata: FlashAttentionMetadata,
        common: CommonAttentionMetadata,
        *,
        plans_kernel: bool,
    ) -> SharedCacheMetadata:
        step, seqused_k = None, common.dcp_local_seq_lens
        if metadata.max_query_len > 1:
            step = StepRows(None, metadata.query_start_loc, metadata.max_query_len)
            if not has_cached_tokens(common):
                return SharedCacheMetadata(**vars(metadata), step=step)
            seqused_k = self._num_kept_before(metadata)
        assert seqused_k is not None
        replicated = self._replicated_rows(
            metadata,
            seqused_k,
            num_rows=common.num_reqs,
            num_tokens=metadata.num_actual_tokens,
            max_query_len=metadata.max_query_len,
        )
        if plans_kernel and not envs.VLLM_BATCH_INVARIANT:
            replicated.scheduler_metadata = self._plan_kernel(replicated)
        return SharedCacheMetadata(**vars(metadata), step=step, replicated=replicated)

    def _num_kept_before(self, metadata: FlashAttentionMetadata) -> torch.Tensor:
        """Return ``[num_rows]`` int32, what this rank keeps of the tokens ahead of each row."""
        num_cached = metadata.seq_lens - metadata.query_start_loc.diff()
        return self._shards.num_kept(num_cached, self._shards.rank)

    def _replicated_rows(
        self,
        metadata: FlashAttentionMetadata,
        seqused_k: torch.Tensor,
        *,
        num_rows: int,
        num_tokens: int,
        max_query_len: int,
    ) -> CachedRows:
        """Return the first rows of a step, which all ranks run."""
        max_num_kept = self._shards.num_kept(np.array([metadata.max_seq_len]), rank=0)
        return CachedRows(
            first_token=0,
            num_tokens=num_tokens,
            num_sent_tokens=num_tokens,
            cu_seqlens_q=metadata.query_start_loc[: num_rows + 1],
            seqused_k=seqused_k[:num_rows],
            block_table=metadata.block_table[:num_rows],
            max_seqlen_q=max_query_len,
            max_seqlen_k=max(1, int(max_num_kept[0])),
            num_splits=metadata.max_num_splits,
        )

    def _plan_kernel(self, rows: CachedRows) -> torch.Tensor:
        """Have FlashAttention 3 plan its launch once for all layers."""
        is_quantized = is_quantized_kv_cache(self.cache_config.cache_dtype)
        # What the stock builder calls, a twin on CPUs.
        plan = stock.get_scheduler_metadata  # type: ignore[attr-defined]  # imported there
        planned: torch.Tensor = plan(
            batch_size=rows.seqused_k.shape[0],
            max_seqlen_q=rows.max_seqlen_q,
            max_seqlen_k=rows.max_seqlen_k,
            num_heads_q=self.num_heads_q * self._num_query_groups,
            num_heads_kv=self.num_heads_kv,
            headdim=self.headdim,
            cache_seqlens=rows.seqused_k,
            qkv_dtype=current_platform.fp8_dtype() if is_quantized else self.kv_cache_dtype,
            cu_seqlens_q=rows.cu_seqlens_q,
            page_size=self.block_size,
            causal=False,
            num_splits=rows.num_splits,
        )
        if not self.use_full_cuda_graph:
            return planned
        # Where graphs read it. What lies behind must be zero, or more blocks would start.
        length = planned.shape[0]
        self.scheduler_metadata[length:] = 0
        self.scheduler_metadata[:length] = planned
        return self.scheduler_metadata[:length]

    def _build_partitioned(
        self, metadata: FlashAttentionMetadata, plan: PartitionPlan
    ) -> SharedCacheMetadata:
        keys = plan_step_keys(plan, self._pcp_rank)
        rows = plan_gathered_rows(plan, self._pcp_rank, self._shards)
        arrays = [keys.key_idx, keys.cu_seqlens]
        if rows is not None:
            arrays += [rows.cu_seqlens, rows.seq_lens, rows.table_row]
        key_idx, cu_seqlens_k, *of_rows = copy_to_device(*arrays, device=self.device)

        row_len = plan.row_len[self._pcp_rank]
        num_replicated = plan.num_replicated_cached_rows
        num_replicated_tokens = int(row_len[:num_replicated].sum())
        replicated = gathered = None
        if num_replicated > 0:
            replicated = self._replicated_rows(
                metadata,
                self._num_kept_before(metadata),
                num_rows=num_replicated,
                num_tokens=num_replicated_tokens,
                max_query_len=int(row_len[:num_replicated].max()),
            )
        if rows is not None:
            cu_seqlens_q, seqused_k, table_row = of_rows
            gathered = CachedRows(
                first_token=num_replicated_tokens,
                num_tokens=int(row_len[num_replicated : plan.num_cached_rows].sum()),
                num_sent_tokens=rows.num_tokens,
                cu_seqlens_q=cu_seqlens_q,
                seqused_k=seqused_k,
                block_table=metadata.block_table.index_select(0, table_row),
                max_seqlen_q=rows.max_query_len,
                max_seqlen_k=rows.max_seq_len,
                num_splits=metadata.max_num_splits,
            )
        step = StepRows(key_idx, cu_seqlens_k, keys.max_seqlen)
        return SharedCacheMetadata(
            **vars(metadata), step=step, replicated=replicated, gathered=gathered
        )


def has_cached_tokens(common: CommonAttentionMetadata) -> bool:
    """Say whether any row may see more than this step; all ranks of a replicated step agree."""
    assert common.seq_lens_cpu_upper_bound is not None
    query_lens = common.query_start_loc_cpu[: common.num_reqs + 1].diff()
    return not common.seq_lens_cpu_upper_bound[: common.num_reqs].equal(query_lens)
