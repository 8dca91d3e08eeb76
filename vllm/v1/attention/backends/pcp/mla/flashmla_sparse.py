# SPDX-License-Identifier: Apache-2.0
"""FLASHMLA_SPARSE for prefill context parallelism.

With D > 1 both kernels are called from here, for their log-sum-exp: natural, and plus infinity for
queries without tokens. That for quantised rows does all of them then. vLLM's other way with many
heads, for prefills, makes rows of 16 bits of them first.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm import _custom_ops as ops
from vllm.utils.math_utils import round_up
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import flashmla_sparse
from vllm.v1.attention.backends.mla.flashmla_sparse import (
    FlashMLASparseBackend,
    FlashMLASparseImpl,
    FlashMLASparseMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.mla.shared_sparse import (
    KeptTokensMixin,
    Query,
    SharedSparseBuilderMixin,
    SharedSparseMixin,
)

# The kernel for quantised rows, made for decodes, allocates sums of all queries, in fp32 and at
# least twice: of 128 heads here 2 GiB. Where they have 2^31 elements, it loses count.
MAX_QUANTISED_QUERIES = 4096


class KeptTokensFlashMLASparseImpl(KeptTokensMixin, FlashMLASparseImpl):
    """The stock implementation, with a log-sum-exp where ranks share the cache."""

    def beside_gathered(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and type of the concatenated queries."""
        return [(tuple(self.q_concat_buffer.shape), self.q_concat_buffer.dtype)]

    def take_workspace(self, beside: list[torch.Tensor]) -> None:
        """Take the concatenated queries; rows of 16 bits are never made of quantised ones."""
        (self.q_concat_buffer,) = beside
        if self.kv_cache_dtype == "fp8_ds_mla":
            del self.prefill_bf16_workspace

    def attend(
        self,
        q: Query,
        cache: torch.Tensor,
        slots: torch.Tensor,
        num_slots: torch.Tensor,
        schedule: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to some slots each, see ``KeptTokensMixin``."""
        if isinstance(q, tuple):
            latent, rotary = q
            q = self.q_concat_buffer[: latent.shape[0]]
            ops.concat_mla_q(latent, rotary, q)
        num_heads = q.shape[1]
        # Asked for kernels each time: what has no GPU replaces them there.
        kernels: Any = flashmla_sparse
        if schedule is None:
            out, _, lse = kernels.flash_mla_sparse_fwd(
                padded_heads(q, round_up(num_heads, self.prefill_padding)),
                cache.view(-1, 1, cache.shape[-1]),
                slots.unsqueeze(1),
                self.softmax_scale,
                d_v=self.kv_lora_rank,
                topk_length=num_slots,
            )
            return out[:, :num_heads], lse[:, :num_heads]
        # All queries as one sequence; what is behind the slots is -1.
        out, lse = kernels.flash_mla_with_kvcache(
            q=padded_heads(q, self._compute_fp8_decode_padded_heads(num_heads)).unsqueeze(0),
            k_cache=cache.view(torch.uint8).unsqueeze(-2),
            block_table=schedule.dummy_block_table,
            cache_seqlens=schedule.cache_lens,
            head_dim_v=self.kv_lora_rank,
            tile_scheduler_metadata=schedule.scheduler_metadata,
            softmax_scale=self.softmax_scale,
            is_fp8_kvcache=True,
            indices=slots.unsqueeze(0),
        )
        return out[0, :, :num_heads], lse[0, :num_heads].T


def padded_heads(q: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return ``[n, num_heads, head_size]``, behind the heads of ``q`` zeros."""
    if q.shape[1] == num_heads:
        return q
    padded = q.new_zeros(q.shape[0], num_heads, q.shape[2])
    padded[:, : q.shape[1]] = q
    return padded


class PCPFlashMLASparseImpl(SharedSparseMixin, KeptTokensFlashMLASparseImpl):
    """Gathers latents; shares caches."""


class PCPFlashMLASparseMetadataBuilder(SharedSparseBuilderMixin, FlashMLASparseMetadataBuilder):
    """Buffers for two rows a request; plans where ranks share the cache."""

    def max_queries(self) -> int | None:
        """Bound what the kernel for quantised rows takes at a time."""
        return MAX_QUANTISED_QUERIES if self.use_fp8_kv_cache else None

    def schedule(self, common: CommonAttentionMetadata) -> Any:
        """Return how the kernel for quantised rows splits queries, None for others."""
        return self._build_fp8_mixed_decode_prefill(common) if self.use_fp8_kv_cache else None


class PCPFlashMLASparseBackend(FlashMLASparseBackend):
    """The stock backend with our implementation and builder; keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[FlashMLASparseImpl]:
        """Return the implementation class."""
        return PCPFlashMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[FlashMLASparseMetadataBuilder]:
        """Return the metadata builder class."""
        return PCPFlashMLASparseMetadataBuilder
