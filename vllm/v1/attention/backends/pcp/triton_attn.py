# SPDX-License-Identifier: Apache-2.0
"""TRITON_ATTN for prefill context parallelism."""

from __future__ import annotations

import torch

from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.attention.backends.pcp.kv_gather import (
    GatherQuantizedKVMixin,
    RowsPerRequestMixin,
    kv_views,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash


class PCPTritonAttentionImpl(GatherQuantizedKVMixin, TritonAttentionImpl):
    """Gathers K and V in the cache's dtype."""

    def _write(
        self,
        layer: AttentionLayer,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        triton_reshape_and_cache_flash(
            keys,
            values,
            key_cache,
            value_cache,
            slot_mapping,
            self.kv_cache_dtype,
            layer._k_scale,
            layer._v_scale,
        )

    def _write_quantized(
        self,
        layer: AttentionLayer,
        rows: torch.Tensor,
        num_kv_heads: int,
        head_size: int,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        # This writer takes keys and values that are FP8 already as they are.
        keys, values = kv_views(rows.view(self.fp8_dtype), num_kv_heads, head_size, head_size)
        self._write(layer, keys, values, kv_cache[:, 0], kv_cache[:, 1], slot_mapping)


class PCPTritonAttentionMetadataBuilder(RowsPerRequestMixin, TritonAttentionMetadataBuilder):
    """Buffers for two rows a request."""


class PCPTritonAttentionBackend(TritonAttentionBackend):
    """The stock backend with our implementation and builder; keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """Return the implementation class."""
        return PCPTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        """Return the metadata builder class."""
        return PCPTritonAttentionMetadataBuilder
