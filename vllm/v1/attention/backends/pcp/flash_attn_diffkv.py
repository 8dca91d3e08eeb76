# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN_DIFFKV (value heads of another size) for prefill context parallelism."""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.flash_attn_diffkv import (
    FlashAttentionDiffKVBackend,
    FlashAttentionDiffKVImpl,
)
from vllm.v1.attention.backends.pcp.flash_attn_metadata import PCPFlashAttentionMetadataBuilder
from vllm.v1.attention.backends.pcp.kv_gather import GatherKVMixin


class PCPFlashAttentionDiffKVImpl(GatherKVMixin, FlashAttentionDiffKVImpl):
    """Gathers K and V in the model's dtype: the writer of this cache takes no quantised input."""


class PCPFlashAttentionDiffKVBackend(FlashAttentionDiffKVBackend):
    """The stock backend with our implementation and builder; keeps its name."""

    @classmethod
    def set_head_size_v(cls, head_size_v: int) -> None:
        """Set the size of the value heads where the stock class reads it, on itself."""
        FlashAttentionDiffKVBackend.set_head_size_v(head_size_v)

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """Return the implementation class."""
        return PCPFlashAttentionDiffKVImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """Return the metadata builder class."""
        return PCPFlashAttentionMetadataBuilder
