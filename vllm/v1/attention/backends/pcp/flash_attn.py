# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN (FlashAttention 2, 3 and 4) for prefill context parallelism.

With D = 1 only the cache write differs from the stock backend. With D > 1, decode context
parallelism, D ranks share one copy of the KV cache.

A row's result is merged from what it sees of this step, causally and on its own rank, and what it
sees of the cache, a part on each of the D ranks, all of it (``context_plan``). Which rows go where
is a matter of the step:

* Replicated rows, all of them in a step that is not partitioned, stand on every rank. Each attends
  to what it keeps of the cache, and sends everybody the result. Where D spans TP, query heads are
  gathered over TP first.
* Partitioned rows with cached tokens are gathered; results go back to the rank that a row is from.
* Partitioned rows without have no more to do with D than with D = 1.

Rows of one token that are replicated see nothing that is not in the cache by then: where there are
no others, the first part is left out. Stock vLLM gathers query heads over all D ranks; it expects
heads of TP ranks that share one KV head, and would pair queries with the wrong KV heads where D
spans the PCP axis.

Shapes: D ranks share the cache, T = D / P of them for each rank of the PCP group; H query heads.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from vllm.config import get_current_vllm_config
from vllm.distributed.pcp.kv_gather import get_kv_gather
from vllm.distributed.pcp.shard_collectives import (
    exchange_blocks,
    gather_heads,
    gather_shards,
    kv_shards,
)
from vllm.distributed.pcp.step import get_step_state
from vllm.platforms import current_platform
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides, is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import flash_attn as stock
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.context_plan import max_gathered_tokens, max_step_keys
from vllm.v1.attention.backends.pcp.flash_attn_metadata import (
    CachedRows,
    PCPFlashAttentionMetadataBuilder,
    SharedCacheMetadata,
)
from vllm.v1.attention.backends.pcp.kv_gather import kv_views
from vllm.v1.attention.backends.pcp.merge_partials import merge_partials
from vllm.v1.attention.backends.pcp.reshape_and_cache import ReshapeAndCacheMixin
from vllm.v1.worker.workspace import current_workspace_manager

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.pcp.sampled_rows import SampledRows


class PCPFlashAttentionImpl(ReshapeAndCacheMixin, FlashAttentionImpl):
    """Gathers K and V in the cache's dtype; with D > 1, attends to a cache that ranks share.

    Attributes:
        ran_last: The layer's that ran last in a run of no requests.
        attends_sampled_rows: Whether nobody reads any other rows of a step that says which ones are
            sampled from. Not with D > 1.

    Raises:
        NotImplementedError: with D > 1, for attention that depends on positions, on keys of another
            layer or on anything but keys.
    """

    shares_cache = True
    ran_last: ClassVar[PCPFlashAttentionImpl | None] = None
    attends_sampled_rows = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.dcp_world_size == 1:
            return
        self._refuse_what_depends_on_more_than_keys()
        self._num_query_groups = self.dcp_world_size // self.pcp_world_size
        assert self._num_query_groups == 1 or self.num_kv_heads == 1, f"{self.num_kv_heads=}"
        config = get_current_vllm_config()
        self._shards = kv_shards(config.parallel_config.cp_kv_cache_interleave_size)
        self._max_num_tokens = config.scheduler_config.max_num_batched_tokens
        self._max_num_seqs = config.scheduler_config.max_num_seqs

    def _refuse_what_depends_on_more_than_keys(self) -> None:
        is_refused = {
            "sliding_window": self.sliding_window != (-1, -1),
            "alibi_slopes": self.alibi_slopes is not None,
            "sinks": self.sinks is not None,
            "kv_sharing_target_layer_name": self.kv_sharing_target_layer_name is not None,
            "attn_type": self.attn_type != AttentionType.DECODER,
        }
        refused = ", ".join(name for name, value in is_refused.items() if value)
        if refused:
            raise NotImplementedError(
                "Prefill context parallelism together with decode context parallelism does not "
                f"support this layer of the model (got {refused}). Set "
                "--decode-context-parallel-size 1."
            )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Reserve the memory that any step takes, while it is counted with the model."""
        super().process_weights_after_loading(act_dtype)
        if self.dcp_world_size == 1:
            return
        size, num_tokens, num_seqs = self.pcp_world_size, self._max_num_tokens, self._max_num_seqs
        row_bytes = 2 * self.num_kv_heads * self.head_size * act_dtype.itemsize
        self._step_keys_workspace(max_step_keys(num_tokens, num_seqs, size), row_bytes)
        # The most is needed with as many replicated rows as there can be, with none, or where
        # fewer would leave room for partitioned requests beyond ``num_seqs``.
        max_replicated = min(num_tokens, num_seqs * (2 * size - 1))
        corner = max(0, num_tokens - 2 * size * num_seqs)
        for num_replicated in {0, min(corner, max_replicated), max_replicated}:
            num_left = num_tokens - num_replicated
            self._exchange_workspace(num_replicated, max_gathered_tokens(num_left, num_seqs, size))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, as the stock implementation does.

        Args:
            layer: The attention layer, for its scales.
            query: ``[num_tokens, H, head_size]``, padding included.
            key: ``[num_tokens, num_kv_heads, head_size]``.
            value: The same.
            kv_cache: ``[num_blocks, 2, block_size, num_kv_heads, head_size]``; holds this step's
                keys and values.
            attn_metadata: The builder's, or None in a profiling run.
            output: ``[num_tokens, H, head_size]``, to fill; padding stays as it is, and so do rows
                that nobody reads (``attends_sampled_rows``).
            output_scale: None.
            output_block_scale: None.

        Returns:
            ``output``.

        Collectives: with D > 1, where a row has cached tokens, and where all rows have one token,
        an exchange on the DCP group; ahead of it a gather of the queries of partitioned rows with
        cached tokens on the DCP group, and one of the query heads of replicated rows on the TP
        group if D spans it.
        """
        if attn_metadata is None:
            PCPFlashAttentionImpl.ran_last = self
        elif self.attends_sampled_rows and (sampled := get_step_state().sampled) is not None:
            self._attend_sampled(layer, query, key, value, kv_cache, attn_metadata, output, sampled)
            return output
        if self.dcp_world_size == 1 or attn_metadata is None:
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        assert output_scale is None
        assert output_block_scale is None
        lse = None
        if attn_metadata.step is not None:
            lse = self._attend_step(layer, query, key, value, kv_cache, attn_metadata, output)
        if attn_metadata.replicated is not None or attn_metadata.gathered is not None:
            self._attend_cached(layer, query, kv_cache, attn_metadata, output, lse)
        return output

    def _attend_sampled(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        sampled: SampledRows,
    ) -> None:
        """Fill the sampled rows of ``output``, each as a decode of its own; leave the others."""
        index = sampled.send_idx
        row, num_behind = sampled.rows()
        num_rows = index.shape[0]
        query_start_loc = torch.arange(num_rows + 1, dtype=torch.int32, device=index.device)
        rows = dataclasses.replace(
            metadata,
            num_actual_tokens=num_rows,
            max_query_len=1,
            query_start_loc=query_start_loc,
            seq_lens=metadata.seq_lens.index_select(0, row) - num_behind,
            block_table=metadata.block_table.index_select(0, row),
            use_cascade=False,
            common_prefix_len=0,
            scheduler_metadata=None,
            prefix_scheduler_metadata=None,
        )
        # As bytes: not every device indexes quantised types.
        picked = query.view(torch.uint8).index_select(0, index).view(query.dtype)
        attended = output.new_empty(num_rows, *output.shape[1:])
        # What decodes attend to is in the cache.
        super().forward(layer, picked, key, value, kv_cache, rows, attended)
        output.index_copy_(0, index.long(), attended)
        sampled.is_partial = True

    def _attend_step(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: SharedCacheMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Fill ``output`` with what rows see of this step; return its log-sum-exp, ``[H, n]``."""
        step = metadata.step
        assert step is not None
        num_tokens = metadata.num_actual_tokens
        is_quantized = is_quantized_kv_cache(self.kv_cache_dtype)
        if step.key_idx is not None:
            # This layer's: its cache write has just run, which CUDA graphs leave out as well.
            rows = get_kv_gather().rows.view(torch.int64)
            picked = self._step_keys_workspace(step.key_idx.shape[0], 8 * rows.shape[1])
            torch.index_select(rows, 0, step.key_idx, out=picked)
            key, value = kv_views(
                picked.view(kv_cache.dtype), self.num_kv_heads, self.head_size, self.head_size
            )
        elif is_quantized:
            key, value = self._pack(layer, key[:num_tokens], value[:num_tokens], kv_cache.dtype)
        else:
            key, value = key[:num_tokens], value[:num_tokens]
        if is_quantized:
            key, value = (rows.view(current_platform.fp8_dtype()) for rows in (key, value))
        return self._attend(
            layer,
            query[:num_tokens],
            key,
            value,
            output[:num_tokens],
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            cu_seqlens_k=step.cu_seqlens_k,
            max_seqlen_k=step.max_seqlen_k,
            causal=True,
            num_splits=metadata.max_num_splits,
        )

    def _attend_cached(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: SharedCacheMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Merge what rows see of the cache into ``output``; see ``forward``."""
        replicated, gathered = metadata.replicated, metadata.gathered
        results, by_receiver, received, received_lses, *memory = self._exchange_workspace(
            0 if replicated is None else replicated.num_sent_tokens,
            0 if gathered is None else gathered.num_sent_tokens,
        )
        exchanges, merges = [], []
        if replicated is not None:
            sent, sent_lses = self._attend_replicated(
                layer, query, kv_cache, replicated, results, by_receiver
            )
            exchanges += [(sent, received), (sent_lses, received_lses)]
            merges.append((replicated, received, received_lses))
        if gathered is not None:
            sent, received, sent_lses, received_lses = memory
            # Queries stand where results are received.
            queries = received.view(-1).view(query.dtype)[: received.numel()].view_as(received)
            self._attend_gathered(layer, query, kv_cache, gathered, queries, sent, sent_lses)
            exchanges += [(sent, received), (sent_lses, received_lses)]
            merges.append((gathered, received, received_lses))
        exchange_blocks(*exchanges)
        for rows, partials, partial_lses in merges:
            tokens = slice(rows.first_token, rows.first_token + rows.num_tokens)
            own_lse = None if lse is None else lse[:, tokens]
            merge_partials(output[tokens], own_lse, partials, partial_lses)

    def _attend_replicated(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        rows: CachedRows,
        results: torch.Tensor,
        by_receiver: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return results ``[T, n, H, head_size]`` and log-sum-exps ``[T, H, n]`` to send."""
        num_tokens, num_groups = rows.num_tokens, self._num_query_groups
        query = query[:num_tokens]
        results = results.view(num_tokens, num_groups * self.num_heads, self.head_size)
        if num_groups > 1:
            query = gather_heads(query)
        lse = self._attend_kept(layer, query, kv_cache, results, rows)
        lses = lse.reshape(num_groups, self.num_heads, num_tokens)
        if num_groups == 1:
            return results.unsqueeze(0), lses
        by_receiver.copy_(results.unflatten(1, (num_groups, self.num_heads)).transpose(0, 1))
        return by_receiver, lses

    def _attend_gathered(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        rows: CachedRows,
        queries: torch.Tensor,
        results: torch.Tensor,
        lses: torch.Tensor,
    ) -> None:
        """Fill results ``[D, m, H, head_size]`` and log-sum-exps ``[D, H, m]`` to send."""
        num_tokens = rows.num_sent_tokens
        own_query = query[rows.first_token : rows.first_token + num_tokens]
        self._shards.own_rows(queries.flatten(0, 1)).copy_(own_query)
        # As bytes: NCCL knows no FP8.
        gathered = queries.view(torch.uint8).flatten(0, 1).flatten(1)
        gather_shards(gathered, self._shards.own_rows(gathered))
        lse = self._attend_kept(layer, queries.flatten(0, 1), kv_cache, results.flatten(0, 1), rows)
        lses.copy_(lse.unflatten(1, (self.dcp_world_size, num_tokens)).transpose(0, 1))

    def _attend_kept(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        results: torch.Tensor,
        rows: CachedRows,
    ) -> torch.Tensor:
        """Fill ``results`` with what rows see of what this rank keeps; return its log-sum-exp."""
        # Kernels that load by TMA want the strides of an only head to be multiples of 16 bytes.
        key_cache, value_cache = map(canonicalize_singleton_dim_strides, kv_cache.unbind(1))
        if is_quantized_kv_cache(self.kv_cache_dtype):
            dtype = current_platform.fp8_dtype()
            key_cache, value_cache = key_cache.view(dtype), value_cache.view(dtype)
        return self._attend(
            layer,
            query,
            key_cache,
            value_cache,
            results,
            cu_seqlens_q=rows.cu_seqlens_q,
            max_seqlen_q=rows.max_seqlen_q,
            seqused_k=rows.seqused_k,
            max_seqlen_k=rows.max_seqlen_k,
            block_table=rows.block_table,
            scheduler_metadata=rows.scheduler_metadata,
            causal=False,
            num_splits=rows.num_splits,
        )

    def _attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        **sequences: Any,
    ) -> torch.Tensor:
        """Run FlashAttention into ``output``; return the log-sum-exp, ``[heads, tokens]``."""
        assert self.vllm_flash_attn_version is not None
        scales_shape = (cu_seqlens_q.shape[0] - 1, self.num_kv_heads)
        # What the stock implementation calls, a twin on CPUs.
        _, lse = stock.flash_attn_varlen_func(  # type: ignore[attr-defined]  # imported there
            q=query,
            k=key,
            v=value,
            out=output,
            cu_seqlens_q=cu_seqlens_q,
            softmax_scale=self.scale,
            softcap=self.logits_soft_cap,
            return_softmax_lse=True,
            fa_version=self.vllm_flash_attn_version,
            q_descale=layer._q_scale.expand(scales_shape),
            k_descale=layer._k_scale.expand(scales_shape),
            v_descale=layer._v_scale.expand(scales_shape),
            **sequences,
        )
        assert isinstance(lse, torch.Tensor)
        return lse

    def _step_keys_workspace(self, num_keys: int, row_bytes: int) -> torch.Tensor:
        """Return ``[num_keys, row_bytes / 8]`` int64; lost with the next workspace of this step."""
        (keys,) = current_workspace_manager().get_simultaneous(
            ((num_keys, row_bytes // 8), torch.int64)
        )
        return keys

    def _exchange_workspace(self, num_replicated: int, num_gathered: int) -> list[torch.Tensor]:
        """Return memory for partial results on their way.

        Args:
            num_replicated: Tokens of replicated rows, n.
            num_gathered: Tokens of gathered rows that each rank puts in, m.

        Returns:
            For replicated rows results by token, ``[T, n, H, head_size]`` in size, the same by
            receiver if T > 1, and what is received, ``[D, n, H, head_size]`` and ``[D, H, n]``
            float32. For gathered rows results ``[D, m, H, head_size]``, what is received, the same
            (queries stand there before), and ``[D, H, m]`` float32 sent and received.
        """
        num_ranks, num_groups = self.dcp_world_size, self._num_query_groups

        def results(num_blocks: int, num_tokens: int) -> tuple[tuple[int, ...], torch.dtype]:
            assert self._dcp_dtype is not None
            return (num_blocks, num_tokens, self.num_heads, self.head_size), self._dcp_dtype

        def lses(num_tokens: int) -> tuple[tuple[int, ...], torch.dtype]:
            return (num_ranks, self.num_heads, num_tokens), torch.float32

        return current_workspace_manager().get_simultaneous(
            results(num_groups, num_replicated),
            results(num_groups if num_groups > 1 else 0, num_replicated),
            results(num_ranks, num_replicated),
            lses(num_replicated),
            results(num_ranks, num_gathered),
            results(num_ranks, num_gathered),
            lses(num_gathered),
            lses(num_gathered),
        )


class PCPFlashAttentionBackend(FlashAttentionBackend):
    """The stock backend with our implementation and builder; keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """Return the implementation class."""
        return PCPFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """Return the metadata builder class."""
        return PCPFlashAttentionMetadataBuilder
