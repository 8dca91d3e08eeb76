# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN (FlashAttention 2, 3 and 4) for prefill context parallelism."""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.kv_gather import RowsPerRequestMixin
from vllm.v1.attention.backends.pcp.reshape_and_cache import ReshapeAndCacheMixin


class PCPFlashAttentionImpl(ReshapeAndCacheMixin, FlashAttentionImpl):
    """Gathers K and V in the cache's dtype."""


class PCPFlashAttentionMetadataBuilder(RowsPerRequestMixin, FlashAttentionMetadataBuilder):
    """Buffers for two rows a request."""


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
