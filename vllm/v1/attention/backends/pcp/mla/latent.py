# SPDX-License-Identifier: Apache-2.0
"""What the MLA backends share: latents of all ranks in the cache, prefills that read them there.

``do_kv_cache_update`` gathers the step's new latents before it writes them, as the other backends
do with K and V. In the gathered buffer a token is one row of bytes: its latent and behind it its
rotary key, in the model's dtype, or quantised as the cache is.

Rows that the stock builder counts as decodes take the stock path: queries are projected into the
latent space and attend to the paged cache. For the other rows stock code attends to the new tokens
and to the context apart and merges; every row would read and up-project its context. Here both are
one, from the cache (``prefill_plan``), which also does away with the order of rows that the stock
path asks for. A prefill backend without ``attend`` keeps the stock path, and rows out of order are
told to it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm import _custom_ops as ops
from vllm.distributed.pcp.kv_gather import get_kv_gather
from vllm.distributed.pcp.step import get_step_state
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonImpl,
    MLACommonMetadataBuilder,
    MLACommonPrefillMetadata,
)
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backends.pcp.kv_gather import RowsPerRequestMixin
from vllm.v1.attention.backends.pcp.mla.prefill_backend import AttendingPrefillBackend
from vllm.v1.attention.backends.pcp.mla.prefill_plan import (
    AttendCall,
    Int32Array,
    KeyBatch,
    PrefillPlan,
    min_batch_tokens,
    plan_prefill,
)
from vllm.v1.attention.ops import merge_attn_states
from vllm.v1.worker.gpu.pcp.copies import copy_to_device

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

    _DenseImplBase = MLACommonImpl[Any]

    class _BuilderBase(RowsPerRequestMixin, MLACommonMetadataBuilder[Any]): ...
else:
    _ImplBase = _DenseImplBase = object
    _BuilderBase = RowsPerRequestMixin

# Up-projecting so many tokens takes the GPU about as long as the host takes for a launch.
MAX_REPEATED_TOKENS = 4096

# Log-sum-exp of no keys at all. Finite, so that merging two of them is not NaN.
NO_KEYS = -1e30


@dataclass
class DeviceCall:
    """An ``AttendCall`` with its arrays on the device."""

    call: AttendCall
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor


@dataclass
class DeviceBatch:
    """A ``KeyBatch`` as the kernel that reads the cache takes it.

    Attributes:
        num_tokens: Tokens to read.
        block_table: ``[num_pieces, max_num_blocks]`` int32.
        cu_seqlens: ``[num_pieces + 1]`` int32.
        token_to_piece: ``[num_tokens]`` int32.
        start: ``[num_pieces]`` int32.
        calls: What attends to them.
    """

    num_tokens: int
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    token_to_piece: torch.Tensor
    start: torch.Tensor
    calls: list[DeviceCall]


@dataclass
class UnorderedPrefillMetadata(MLACommonPrefillMetadata):
    """Prefill rows for the stock path, some without context ahead of some with.

    Attributes:
        has_no_context: ``[T]`` bool, tokens whose row has no context.
    """

    has_no_context: torch.Tensor | None = None


@dataclass
class PCPPrefillMetadata(MLACommonPrefillMetadata):
    """Prefill rows of a step, planned.

    Attributes:
        batches: The plan.
        workspace: ``[max_tokens, head_size]``, the latents of a batch.
        has_partial_results: Some row attends in more than one batch.
    """

    batches: list[DeviceBatch] = dataclasses.field(default_factory=list)
    workspace: torch.Tensor | None = None
    has_partial_results: bool = False


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
        # The longest row: a chunk of the only request of a step.
        max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        num_chunks = 2 * vllm_config.parallel_config.prefill_context_parallel_size
        max_row_tokens = -(-max_num_tokens // num_chunks)
        workspace = self.chunked_prefill_workspace
        num_missing = min_batch_tokens(max_row_tokens, self.page_size) - workspace.shape[0]
        if num_missing > 0:
            shape = (workspace.shape[0] + num_missing, workspace.shape[1])
            self.chunked_prefill_workspace = workspace.new_empty(shape)
        self._has_plan = isinstance(self._prefill_backend, AttendingPrefillBackend)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Build as usual; then plan the rows that the stock builder counts as prefills."""
        common = common_attn_metadata
        if common.max_query_len == 1:
            # Decodes only: nothing to plan.
            return super().build(common_prefix_len, common, fast_build)
        seq_lens = common.seq_lens_cpu_upper_bound
        if self._has_plan and seq_lens is not None:
            # Without context the stock builder plans none.
            query_lens = common.query_start_loc_cpu.diff()
            common = dataclasses.replace(common, seq_lens_cpu_upper_bound=query_lens)
        metadata = super().build(common_prefix_len, common, fast_build)
        if metadata.prefill is None:
            return metadata
        assert seq_lens is not None
        row_len = np.diff(common.query_start_loc_cpu.numpy())
        row_start = seq_lens.numpy()[: row_len.shape[0]] - row_len
        rows = slice(metadata.num_decodes, None)
        if self._has_plan:
            metadata.prefill = self._plan(metadata.prefill, row_start[rows], row_len[rows])
        else:
            metadata.prefill = tell_unordered(metadata.prefill, row_start[rows], row_len[rows])
        return metadata

    def _plan(
        self, prefill: MLACommonPrefillMetadata, row_start: Int32Array, row_len: Int32Array
    ) -> PCPPrefillMetadata:
        num_rows = row_len.shape[0]
        row_req = get_step_state().row_req
        plan = plan_prefill(
            row_start,
            row_len,
            np.arange(num_rows, dtype=np.int32) if row_req is None else row_req[-num_rows:],
            page_size=self.page_size,
            max_tokens=self.chunked_prefill_workspace.shape[0],
            max_repeated_tokens=MAX_REPEATED_TOKENS,
        )
        return PCPPrefillMetadata(
            **vars(prefill),
            batches=_to_device(plan, prefill.block_table),
            workspace=self.chunked_prefill_workspace,
            has_partial_results=plan.has_partial_results,
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


def _to_device(plan: PrefillPlan, block_table: torch.Tensor) -> list[DeviceBatch]:
    """Copy a plan in one transfer.

    Args:
        plan: The plan.
        block_table: ``[num_rows, max_num_blocks]`` int32, of the prefill rows.
    """
    arrays = [
        array
        for batch in plan.batches
        for array in (
            batch.row,
            batch.start,
            batch.cu_seqlens,
            *(cu for call in batch.calls for cu in (call.cu_seqlens_q, call.cu_seqlens_k)),
        )
    ]
    on_device = iter(copy_to_device(*arrays, device=block_table.device))

    def device_batch(batch: KeyBatch) -> DeviceBatch:
        row, start, cu_seqlens = next(on_device), next(on_device), next(on_device)
        pieces = torch.arange(row.shape[0], dtype=torch.int32, device=row.device)
        return DeviceBatch(
            num_tokens=batch.num_tokens,
            block_table=block_table.index_select(0, row),
            cu_seqlens=cu_seqlens,
            token_to_piece=pieces.repeat_interleave(
                cu_seqlens.diff(), output_size=batch.num_tokens
            ),
            start=start,
            calls=[DeviceCall(call, next(on_device), next(on_device)) for call in batch.calls],
        )

    return [device_batch(batch) for batch in plan.batches]


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

        Collectives: one gather on the PCP group in a partitioned step.
        """
        num_tokens = kv_c_normed.shape[0]
        if kv_cache.numel() == 0 or slot_mapping.shape[0] != self.pcp_world_size * num_tokens:
            super().do_kv_cache_update(
                kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale
            )
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
        is_quantized = is_quantized_kv_cache(kv_cache_dtype)
        dtype = torch.bfloat16 if is_quantized else kv_cache.dtype
        rows, kv_cache = gather.finish().view(dtype), kv_cache.view(dtype)
        split = rows.shape[1] // 2
        ops.concat_and_cache_mla(
            rows[:, :split],
            rows[:, split:],
            kv_cache,
            slot_mapping,
            "auto" if is_quantized else kv_cache_dtype,
            k_scale,
        )


class PlannedPrefillMixin(GatherLatentMixin, _DenseImplBase):
    """Over a stock implementation of dense MLA: prefill attention by plan, too."""

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
            output: ``[T, num_heads * v_head_dim]``, written.
            output_scale: Of the stock path only.
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
        out = output.view(-1, self.num_heads, self.v_head_dim)
        if prefill.has_partial_results:
            self._attend_and_merge(prefill, q, kv_c_and_k_pe_cache, k_scale, out)
            return
        for batch in prefill.batches:
            k, v = self._keys_and_values(batch, prefill, kv_c_and_k_pe_cache, k_scale)
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
            k, v = self._keys_and_values(batch, prefill, kv_cache, k_scale)
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

    def _keys_and_values(
        self,
        batch: DeviceBatch,
        prefill: PCPPrefillMetadata,
        kv_cache: torch.Tensor,
        k_scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K ``[n, num_heads, qk_head_dim]`` and V ``[n, num_heads, v_head_dim]``."""
        assert prefill.workspace is not None
        latents = prefill.workspace[: batch.num_tokens]
        ops.gather_and_maybe_dequant_cache(
            src_cache=kv_cache,
            dst=latents,
            block_table=batch.block_table,
            cu_seq_lens=batch.cu_seqlens,
            token_to_seq=batch.token_to_piece,
            num_tokens=batch.num_tokens,
            kv_cache_dtype=self.kv_cache_dtype,
            scale=k_scale,
            seq_starts=batch.start,
        )
        kv = self.kv_b_proj(latents[:, : self.kv_lora_rank])[0]
        k_nope, v = kv.view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim).split(
            [self.qk_nope_head_dim, self.v_head_dim], dim=-1
        )
        return self._concat_k_nope_k_pe(k_nope, latents[:, None, self.kv_lora_rank :]), v

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
