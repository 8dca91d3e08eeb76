# SPDX-License-Identifier: Apache-2.0
"""What the MLA backends share: latents of all ranks in the cache, prefills that read them there.

``do_kv_cache_update`` gathers the step's new latents before it writes them, or copies them from
rank to rank, as the other backends do with K and V. In the gathered buffer a token is one row of
bytes: its latent and behind it its rotary key, in the model's dtype, or quantised as the cache is.

Rows that the stock builder counts as decodes take the stock path: queries are projected into the
latent space and attend to the paged cache. For the other rows stock code attends to the new tokens
and to the context apart and merges; every row would read and up-project its context. Here both are
one, from the cache (``prefill_plan``), which also does away with the order of rows that the stock
path asks for. A prefill backend without ``attend`` keeps the stock path, and rows out of order are
told to it.

Where ranks share the KV cache (D > 1), prefills read what this rank keeps, gather it over DCP and
put it in order; decodes are those of ``shared_decode``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm import _custom_ops as ops
from vllm.distributed.parallel_state import get_pcp_group
from vllm.distributed.pcp.kv_gather import get_kv_gather
from vllm.distributed.pcp.kv_shards import UNSHARED, KVShards
from vllm.distributed.pcp.peer_caches import get_peer_caches
from vllm.distributed.pcp.shard_collectives import gather_shards, kv_shards
from vllm.distributed.pcp.step import get_step_state
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonImpl,
    MLACommonMetadataBuilder,
    MLACommonPrefillMetadata,
)
from vllm.utils.math_utils import round_up
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backends.pcp.kv_gather import RowsPerRequestMixin
from vllm.v1.attention.backends.pcp.mla.concat_keys import concat_keys
from vllm.v1.attention.backends.pcp.mla.device_plan import DeviceBatch, DeviceCall, plan_to_device
from vllm.v1.attention.backends.pcp.mla.prefill_backend import AttendingPrefillBackend
from vllm.v1.attention.backends.pcp.mla.prefill_plan import PrefillPlan, plan_prefill
from vllm.v1.attention.backends.pcp.mla.shared_decode import (
    SharedDecodeMixin,
    end_decodes_at,
    shard_view,
)
from vllm.v1.attention.ops import merge_attn_states
from vllm.v1.worker.gpu.pcp.copies import copy_to_device
from vllm.v1.worker.gpu.pcp.layout import Int32Array

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionImplBase, CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec

    class _ImplBase(AttentionImplBase[Any]):
        def do_kv_cache_update(
            self,
            kv_c_normed: torch.Tensor,
            k_pe: torch.Tensor,
            kv_cache: torch.Tensor,
            slot_mapping: torch.Tensor,
            kv_cache_dtype: str,
            k_scale: torch.Tensor,
        ) -> None: ...

    class _DenseImplBase(SharedDecodeMixin, MLACommonImpl[Any]): ...

    class _BuilderBase(RowsPerRequestMixin, MLACommonMetadataBuilder[Any]): ...
else:
    _ImplBase = object
    _DenseImplBase = SharedDecodeMixin
    _BuilderBase = RowsPerRequestMixin

# Up-projecting so many tokens takes the GPU about as long as the host takes for a launch.
MAX_REPEATED_TOKENS = 4096

# Log-sum-exp of no keys at all. Finite, so that merging two of them is not NaN.
NO_KEYS = -1e30


@dataclass
class UnorderedPrefillMetadata(MLACommonPrefillMetadata):
    """Prefill rows for the stock path, some without context ahead of some with.

    Attributes:
        has_no_context: ``[T]`` bool, tokens whose row has no context.
    """

    has_no_context: torch.Tensor | None = None


@dataclass
class PCPPrefillMetadata(MLACommonPrefillMetadata):
    """Prefill rows of a step, planned when the first layer attends.

    The device is then busy with what is in front of attention, and would else wait for the plan.

    Attributes:
        rows: Of each row its first position, its tokens and its request, ``[R]`` int32 each.
        make_plan: Makes the plan of rows.
        workspace: ``[max_tokens, head_size]``, the latents of a batch.
        shards: How ranks share the KV cache.
        gathered: ``[max_tokens, head_size]``, where they do, the latents as they are gathered.
    """

    rows: tuple[Int32Array, Int32Array, Int32Array] | None = None
    make_plan: Callable[..., PrefillPlan] | None = None
    workspace: torch.Tensor | None = None
    shards: KVShards = UNSHARED
    gathered: torch.Tensor | None = None

    @functools.cached_property
    def plan(self) -> PrefillPlan:
        """The plan."""
        assert self.make_plan is not None
        assert self.rows is not None
        return self.make_plan(*self.rows)

    @functools.cached_property
    def batches(self) -> list[DeviceBatch]:
        """The plan's batches on the device."""
        return plan_to_device(self.plan, self.block_table, self.shards)

    def of_tokens(self, tokens: Int32Array) -> PCPPrefillMetadata:
        """Return the metadata of some tokens alone, each a row.

        Args:
            tokens: ``[n]`` int32, counted from the first prefill token, in order; of a request one.
        """
        assert self.rows is not None
        row_start, row_len, row_req = self.rows
        row_end = np.cumsum(row_len, dtype=np.int32)
        row = np.searchsorted(row_end, tokens, side="right").astype(np.int32)
        position = row_start[row] + row_len[row] - (row_end[row] - tokens)
        (row_device,) = copy_to_device(row, device=self.block_table.device)
        return dataclasses.replace(
            self,
            rows=(position, np.ones_like(row), row_req[row]),
            block_table=self.block_table.index_select(0, row_device),
        )


class PlanPrefillMixin(_BuilderBase):
    """Over a stock MLA metadata builder: two rows a request, and prefills by plan."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._has_plan = isinstance(self._prefill_backend, AttendingPrefillBackend)
        self._pcp_rank: int = get_pcp_group().rank_in_group
        parallel_config = vllm_config.parallel_config
        self.shards = kv_shards(parallel_config.cp_kv_cache_interleave_size)
        self.gathered: torch.Tensor | None = None
        if self.shards.world_size > 1:
            self._share(parallel_config.prefill_context_parallel_size)

    def _share(self, pcp_world_size: int) -> None:
        """Prepare for a cache that ranks share.

        Raises:
            NotImplementedError: vLLM chose a prefill backend that cannot run a plan.
        """
        if not self._has_plan:
            raise NotImplementedError(
                "Prefill context parallelism does not support decode context parallelism with the "
                f"MLA prefill backend that vLLM chose (got {self._prefill_backend.get_name()}). "
                "Set --decode-context-parallel-size 1, or --prefill-context-parallel-size 1."
            )
        self.dcp_world_size = self.shards.world_size // pcp_world_size
        # Decodes of several tokens would need masks that know which tokens a rank keeps.
        self.reorder_batch_threshold = 1
        self.gathered = self.chunked_prefill_workspace
        shape = (self.chunked_prefill_workspace_size, self.gathered.shape[1])
        self.chunked_prefill_workspace = self.gathered.new_empty(shape)

    @staticmethod
    def determine_chunked_prefill_workspace_size(vllm_config: VllmConfig) -> int:
        """Return the rows of the workspace, a multiple of a page of each rank that shares."""
        size = MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config)
        num_shards = vllm_config.parallel_config.decode_context_parallel_size
        if num_shards == 1:
            return size
        block_size = vllm_config.cache_config.block_size
        assert block_size is not None
        return round_up(size, num_shards * block_size)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Build as usual; then plan the rows that the stock builder counts as prefills."""
        common = common_attn_metadata
        if self.shards.world_size == 1 and common.max_query_len == 1:
            # The cache whole and rows of one token: nothing to plan.
            return super().build(common_prefix_len, common, fast_build)
        row_len = np.diff(common.query_start_loc_cpu.numpy())
        seq_lens = common.seq_lens_cpu_upper_bound
        common = self._stock_view(common)
        metadata = super().build(common_prefix_len, common, fast_build)
        if metadata.decode is not None:
            # Which tokens a rank keeps matters to masks only, and these rows have one token each.
            metadata.decode.dcp_tot_seq_lens = None
        if metadata.prefill is None:
            return metadata
        assert seq_lens is not None
        seq_lens_np = seq_lens.numpy()[: row_len.shape[0]]
        num_decodes = metadata.num_decodes
        if self._has_plan:
            metadata.prefill = self._plan(metadata.prefill, seq_lens_np, row_len, num_decodes)
        else:
            row_start, rows = seq_lens_np - row_len, slice(num_decodes, None)
            metadata.prefill = tell_unordered(metadata.prefill, row_start[rows], row_len[rows])
        return metadata

    def _stock_view(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return what the stock builder is to see of a step."""
        if self.shards.world_size > 1:
            common = shard_view(common, self.shards, num_head_shards=self.dcp_world_size)
            step = get_step_state()
            if step.is_partitioned:
                num_decodes = 0 if step.plan is None else step.plan.num_decodes
                common = end_decodes_at(common, num_decodes)
        if self._has_plan and common.seq_lens_cpu_upper_bound is not None:
            # Without context the stock builder plans none.
            query_lens = common.query_start_loc_cpu.diff()
            common = dataclasses.replace(common, seq_lens_cpu_upper_bound=query_lens)
        return common

    def _plan(
        self,
        prefill: MLACommonPrefillMetadata,
        seq_lens: Int32Array,
        row_len: Int32Array,
        num_decodes: int,
    ) -> PCPPrefillMetadata:
        """Say how to plan the rows behind the decodes."""
        partition = get_step_state().plan
        if partition is None:
            row_req, req_end = np.arange(row_len.shape[0], dtype=np.int32), seq_lens
        else:
            row_req, req_end = partition.row_req[self._pcp_rank], partition.req_end
        rows = slice(num_decodes, None)
        make_plan = functools.partial(
            plan_prefill,
            page_size=self.page_size,
            max_tokens=self.chunked_prefill_workspace.shape[0],
            max_repeated_tokens=MAX_REPEATED_TOKENS,
            shards=self.shards,
            # What some rank attends to, each has to take part in gathering.
            req_end=req_end if self.shards.world_size > 1 else None,
        )
        return PCPPrefillMetadata(
            **vars(prefill),
            rows=(seq_lens[rows] - row_len[rows], row_len[rows], row_req[rows]),
            make_plan=make_plan,
            workspace=self.chunked_prefill_workspace,
            shards=self.shards,
            gathered=self.gathered,
        )


def tell_unordered(
    prefill: MLACommonPrefillMetadata, row_start: Int32Array, row_len: Int32Array
) -> MLACommonPrefillMetadata:
    """Return metadata with which rows without context may stand ahead of rows with it.

    The stock path merges context into the first tokens, as many as rows with context have.

    Args:
        prefill: The stock builder's.
        row_start: ``[R]`` int32, tokens of context of each row.
        row_len: ``[R]`` int32.
    """
    has_context = row_start > 0
    if prefill.chunked_context is None or not (has_context[1:] & ~has_context[:-1]).any():
        return prefill
    prefill.chunked_context.prefill_tokens_with_context = None
    (has_no_context,) = copy_to_device(
        np.repeat(~has_context, row_len).astype(np.int32), device=prefill.block_table.device
    )
    return UnorderedPrefillMetadata(**vars(prefill), has_no_context=has_no_context.bool())


class GatherLatentMixin(_ImplBase):
    """Over a stock implementation, dense or sparse: gather before write."""

    supports_pcp = True

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write the new latents and rotary keys of all ranks to this rank's cache.

        Args:
            kv_c_normed: ``[L, kv_lora_rank]``, this rank's rows.
            k_pe: ``[L, 1, qk_rope_head_dim]``.
            kv_cache: ``[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]``; the layout
                "fp8_ds_mla" has its scales in the row.
            slot_mapping: ``[P * L]`` int64 in a partitioned step, ``[L]`` in others; -1 is not
                written.
            kv_cache_dtype: The cache's dtype, as configured.
            k_scale: Scale of a quantised cache.

        Collectives: one gather on the PCP group in a partitioned step, or one meeting.
        """
        num_tokens, peers = kv_c_normed.shape[0], get_peer_caches()
        if kv_cache.numel() == 0 or slot_mapping.shape[0] != self.pcp_world_size * num_tokens:
            super().do_kv_cache_update(
                kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale
            )
            return
        if peers is not None:
            own_slots = peers.own_slots(slot_mapping)
            super().do_kv_cache_update(
                kv_c_normed, k_pe, kv_cache, own_slots, kv_cache_dtype, k_scale
            )
            peers.copy(kv_cache, own_slots)
            return
        gather = get_kv_gather()
        own_rows = gather.begin(num_tokens, kv_cache.shape[2] * kv_cache.element_size())
        # To the writer, a cache of one block.
        ops.concat_and_cache_mla(
            kv_c_normed,
            k_pe.squeeze(1),
            own_rows.view(kv_cache.dtype).unsqueeze(0),
            gather.identity[:num_tokens],
            kv_cache_dtype,
            k_scale,
        )
        # Under "auto" it moves elements as they are, wherever a row is cut in two; bytes in pairs.
        # Both parts of a row start at a multiple of 16 bytes, as a latent and a rotary key do.
        is_quantized = is_quantized_kv_cache(kv_cache_dtype)
        dtype = torch.bfloat16 if is_quantized else kv_cache.dtype
        rows, kv_cache = gather.finish().view(dtype), kv_cache.view(dtype)
        split = rows.shape[1] // 16 * 8
        ops.concat_and_cache_mla(
            rows[:, :split],
            rows[:, split:],
            kv_cache,
            slot_mapping,
            "auto" if is_quantized else kv_cache_dtype,
            k_scale,
        )


class PlannedPrefillMixin(GatherLatentMixin, _DenseImplBase):
    """Over a stock implementation of dense MLA: prefill attention by plan, too.

    Attributes:
        attends_sampled_rows: Whether nobody reads any other rows of a step that says which ones are
            sampled from. Not with D > 1.
    """

    attends_sampled_rows = False

    def warm_up(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compile what prefills of a model of this type need."""
        self._keys_and_values(torch.zeros(1, self.head_size, dtype=dtype, device=device))

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend for the prefill rows, whose keys are all in the cache.

        Args:
            q: ``[T, num_heads, qk_head_dim]``.
            kv_c_normed: ``[T, kv_lora_rank]``, of the stock path only.
            k_pe: ``[T, 1, qk_rope_head_dim]``, of the stock path only.
            kv_c_and_k_pe_cache: ``[num_blocks, block_size, head_size]``.
            attn_metadata: The step's.
            k_scale: Scale of a quantised cache.
            output: ``[T, num_heads * v_head_dim]``, written; rows that nobody reads
                (``attends_sampled_rows``) stay as they are.
            output_scale: Of the stock path only.

        Collectives: with D > 1 an all_gather on the DCP group for each batch of the plan.
        """
        prefill = attn_metadata.prefill
        if not isinstance(prefill, PCPPrefillMetadata):
            super().forward_mha(
                q,
                kv_c_normed,
                k_pe,
                kv_c_and_k_pe_cache,
                attn_metadata,
                k_scale,
                output,
                output_scale,
            )
            return
        sampled = get_step_state().sampled if self.attends_sampled_rows else None
        if sampled is None:
            self._attend_rows(prefill, q, kv_c_and_k_pe_cache, k_scale, output)
            return
        tokens = np.unique(sampled.tokens) - attn_metadata.num_decode_tokens
        tokens = tokens[tokens >= 0]
        if tokens.shape[0] > 0:
            (index,) = copy_to_device(tokens, device=q.device)
            attended = output.new_empty(tokens.shape[0], output.shape[1])
            self._attend_rows(
                prefill.of_tokens(tokens),
                q.index_select(0, index),
                kv_c_and_k_pe_cache,
                k_scale,
                attended,
            )
            output.index_copy_(0, index.long(), attended)
        sampled.is_partial = True

    def _attend_rows(
        self,
        prefill: PCPPrefillMetadata,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        k_scale: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attend for the rows of ``prefill``, as ``forward_mha`` does for all."""
        out = output.view(-1, self.num_heads, self.v_head_dim)
        if prefill.plan.has_partial_results:
            self._attend_and_merge(prefill, q, kv_cache, k_scale, out)
            return
        for batch in prefill.batches:
            latents = self._read(batch, prefill, kv_cache, k_scale)
            if not batch.calls:
                continue
            k, v = self._keys_and_values(latents)
            for call in batch.calls:
                queries, keys = call.call.queries, call.call.keys
                self._attend(prefill, call, q[queries], k[keys], v[keys], out=out[queries])

    def _compute_prefill_context(
        self,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the context on the stock path, whatever kernels return for rows without."""
        out, lse = super()._compute_prefill_context(q, kv_c_and_k_pe_cache, attn_metadata, k_scale)
        prefill = attn_metadata.prefill
        if isinstance(prefill, UnorderedPrefillMetadata):
            assert prefill.has_no_context is not None
            out.masked_fill_(prefill.has_no_context[:, None, None], 0.0)
            lse.masked_fill_(prefill.has_no_context, NO_KEYS)
        return out, lse

    def _attend_and_merge(
        self,
        prefill: PCPPrefillMetadata,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        k_scale: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend to one batch after the other; merge each into what there is."""
        shape = (self.num_heads, q.shape[0])
        lse = torch.full(shape, NO_KEYS, dtype=torch.float32, device=q.device)
        out.zero_()
        batch_out, merged_lse = torch.empty_like(out), torch.empty_like(lse)
        for batch in prefill.batches:
            latents = self._read(batch, prefill, kv_cache, k_scale)
            if not batch.calls:
                continue
            k, v = self._keys_and_values(latents)
            batch_out.zero_()
            batch_lse = torch.full_like(lse, NO_KEYS)
            for call in batch.calls:
                queries, keys = call.call.queries, call.call.keys
                batch_out[queries], batch_lse[:, queries] = self._attend(
                    prefill, call, q[queries], k[keys], v[keys], return_softmax_lse=True
                )
            merge_attn_states.merge_attn_states(
                output=out,
                output_lse=merged_lse,
                prefix_output=out,
                prefix_lse=lse,
                suffix_output=batch_out,
                suffix_lse=batch_lse,
            )
            lse, merged_lse = merged_lse, lse

    def _read(
        self,
        batch: DeviceBatch,
        prefill: PCPPrefillMetadata,
        kv_cache: torch.Tensor,
        k_scale: torch.Tensor,
    ) -> torch.Tensor:
        """Return ``[num_tokens, head_size]``, the latents of a batch in order, a view.

        Collectives: with D > 1 one all_gather on the DCP group.
        """
        assert prefill.workspace is not None
        latents = prefill.workspace[: batch.num_tokens]
        own_rows, gathered = latents, None
        if batch.gathered_rows is not None:
            assert prefill.gathered is not None
            gathered = prefill.gathered[: prefill.shards.world_size * batch.num_read]
            own_rows = prefill.shards.own_rows(gathered)
        ops.gather_and_maybe_dequant_cache(
            src_cache=kv_cache,
            dst=own_rows,
            block_table=batch.block_table,
            cu_seq_lens=batch.cu_seqlens,
            token_to_seq=batch.token_to_piece,
            num_tokens=batch.num_read,
            kv_cache_dtype=self.kv_cache_dtype,
            scale=k_scale,
            seq_starts=batch.start,
        )
        if gathered is not None and batch.gathered_rows is not None:
            gather_shards(gathered, own_rows)
            torch.index_select(gathered, 0, batch.gathered_rows, out=latents)
        return latents

    def _keys_and_values(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K ``[n, num_heads, qk_head_dim]`` and V ``[n, num_heads, v_head_dim]``."""
        kv = self.kv_b_proj(latents[:, : self.kv_lora_rank])[0]
        k_nope, v = kv.view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim).split(
            [self.qk_nope_head_dim, self.v_head_dim], dim=-1
        )
        k_pe = latents[:, self.kv_lora_rank :]
        if k_nope.is_cuda and not self._use_flashinfer_concat_mla_k:
            # The stock way takes two passes.
            return concat_keys(k_nope, k_pe), v
        return self._concat_k_nope_k_pe(k_nope, k_pe.unsqueeze(1)), v

    def _attend(
        self,
        prefill: PCPPrefillMetadata,
        call: DeviceCall,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        return_softmax_lse: bool = False,
        out: torch.Tensor | None = None,
    ) -> Any:
        backend: Any = prefill.prefill_backend
        return backend.attend(
            q,
            k,
            v,
            cu_seqlens_q=call.cu_seqlens_q,
            cu_seqlens_k=call.cu_seqlens_k,
            max_seqlen_q=call.call.max_seqlen_q,
            max_seqlen_k=call.call.max_seqlen_k,
            causal=call.call.is_causal,
            return_softmax_lse=return_softmax_lse,
            out=out,
        )
