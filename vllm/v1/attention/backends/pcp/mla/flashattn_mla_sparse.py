# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN_MLA_SPARSE for prefill context parallelism.

The stock backend refuses D > 1, since its implementation keeps the log-sum-exp to itself; ours
returns it.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
from vllm.v1.attention.backends.mla import flashattn_mla_sparse
from vllm.v1.attention.backends.mla.flashattn_mla_sparse import (
    FlashAttnMLASparseBackend,
    FlashAttnMLASparseImpl,
    FlashAttnMLASparseMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.mla.shared_rows import whole_cache_view
from vllm.v1.attention.backends.pcp.mla.shared_sparse import (
    KeptTokensMixin,
    Query,
    SharedSparseBuilderMixin,
    SharedSparseMixin,
)


class KeptTokensFlashAttnMLASparseImpl(KeptTokensMixin, FlashAttnMLASparseImpl):
    """The stock implementation, with a log-sum-exp where ranks share the cache."""

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
        else:
            latent, rotary = q.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        # Pages of one token.
        pages = cache.view(-1, 1, 1, self.head_size)
        # Asked for the kernel each time: tests replace it there.
        kernels: Any = flashattn_mla_sparse
        out, lse = kernels.flash_attn_varlen_func(
            q=rotary,
            q_v=latent,
            k=pages[..., self.kv_lora_rank :],
            v=pages[..., : self.kv_lora_rank],
            cu_seqlens_q=torch.arange(slots.shape[0] + 1, dtype=torch.int32, device=slots.device),
            max_seqlen_q=1,
            seqused_k=num_slots,
            max_seqlen_k=slots.shape[1],
            block_table=slots,
            softmax_scale=self.scale,
            causal=True,
            return_softmax_lse=True,
            fa_version=3,
        )
        return out, lse.T


class PCPFlashAttnMLASparseImpl(SharedSparseMixin, KeptTokensFlashAttnMLASparseImpl):
    """Gathers latents; shares caches."""


class PCPFlashAttnMLASparseMetadataBuilder(
    SharedSparseBuilderMixin, FlashAttnMLASparseMetadataBuilder
):
    """Buffers for two rows a request; plans where ranks share the cache."""


class PCPFlashAttnMLASparseBackend(FlashAttnMLASparseBackend):
    """The stock backend with our implementation and builder; keeps its name."""

    @classmethod
    def supports_combination(cls, *args: Any, **kwargs: Any) -> str | None:
        """Return what keeps the backend from a model, D > 1 apart."""
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is None:
            return super().supports_combination(*args, **kwargs)
        with set_current_vllm_config(whole_cache_view(vllm_config)):
            return super().supports_combination(*args, **kwargs)

    @staticmethod
    def get_impl_cls() -> type[FlashAttnMLASparseImpl]:
        """Return the implementation class."""
        return PCPFlashAttnMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttnMLASparseMetadataBuilder]:
        """Return the metadata builder class."""
        return PCPFlashAttnMLASparseMetadataBuilder
