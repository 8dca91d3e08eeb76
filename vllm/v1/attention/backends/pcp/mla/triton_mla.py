# SPDX-License-Identifier: Apache-2.0
"""TRITON_MLA for prefill context parallelism.

The stock implementation hands over its log-sum-exp in the model's dtype. In 16 bits that is a share
of the softmax that is wrong by percents, so that with D > 1 the kernel is launched from here.
"""

from __future__ import annotations

from typing import Any

import torch

import vllm.envs as envs
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.attention.backends.mla.triton_mla import (
    TritonMLABackend,
    TritonMLAImpl,
    TritonMLAMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.mla.latent import PlannedPrefillMixin, PlanPrefillMixin
from vllm.v1.worker.workspace import (
    current_workspace_manager,
    is_workspace_manager_initialized,
)


class ExactLseTritonMLAImpl(TritonMLAImpl):
    """The stock implementation, with the log-sum-exp as the kernel computes it."""

    num_shards: int

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend for the decode rows to what this rank keeps.

        Args:
            q: ``[T, num_heads, head_size]``, or its latent and its rotary part.
            kv_c_and_k_pe_cache: ``[num_blocks, block_size, head_size]``.
            attn_metadata: The step's.
            layer: The attention layer, for its cache scale.

        Returns:
            ``[T, num_heads, kv_lora_rank]``, and the log-sum-exp ``[T, num_heads]``, in float32
            with D > 1; minus infinity or NaN for rows without keys.
        """
        if self.num_shards == 1:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        # Asked for the kernel each time: what has no GPU replaces it there.
        stock: Any = triton_mla
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        num_splits = 1
        if not envs.VLLM_BATCH_INVARIANT:
            num_splits = stock._compute_num_kv_splits(attn_metadata.max_seq_len, self._sm_count)
        # Of each split its result and its log-sum-exp.
        partials_shape = (*query.shape[:2], num_splits, self.kv_lora_rank + 1)
        if is_workspace_manager_initialized():
            # What the builder has reserved.
            (partials,) = current_workspace_manager().get_simultaneous(
                (partials_shape, torch.float32)
            )
        else:  # CPU workers have no such memory
            partials = query.new_empty(partials_shape, dtype=torch.float32)
        out = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        cache = kv_c_and_k_pe_cache.unsqueeze(2)
        decode = attn_metadata.decode
        # One scale: values are the head of the keys.
        stock.decode_attention_fwd(
            query,
            cache,
            cache[..., : self.kv_lora_rank],
            out,
            lse,
            decode.block_table,
            decode.seq_lens,
            partials,
            num_splits,
            self.scale,
            cache.shape[1],
            k_scale=layer._k_scale,
            v_scale=layer._k_scale,
            is_mla=True,
        )
        return out, lse


class PCPTritonMLAImpl(PlannedPrefillMixin, ExactLseTritonMLAImpl):
    """Gathers latents; prefills by plan."""


class PCPTritonMLAMetadataBuilder(PlanPrefillMixin, TritonMLAMetadataBuilder):
    """Buffers for two rows a request; plans prefills."""

    def _reserve_attn_logits_workspace(self) -> None:
        """Reserve for as many heads as decodes attend with: of all TP ranks, where these share."""
        num_shards = self.dcp_world_size
        pcp_world_size = self.vllm_config.parallel_config.prefill_context_parallel_size
        self.dcp_world_size = max(1, num_shards // pcp_world_size)
        super()._reserve_attn_logits_workspace()
        self.dcp_world_size = num_shards


class PCPTritonMLABackend(TritonMLABackend):
    """The stock backend with our implementation and builder; keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[TritonMLAImpl]:
        """Return the implementation class."""
        return PCPTritonMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMLAMetadataBuilder]:
        """Return the metadata builder class."""
        return PCPTritonMLAMetadataBuilder
