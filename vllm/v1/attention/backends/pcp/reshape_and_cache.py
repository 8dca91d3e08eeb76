# SPDX-License-Identifier: Apache-2.0
"""Packing and writing with the CUDA op that FLASH_ATTN and FLASHINFER write their cache with."""

from __future__ import annotations

import torch

from vllm import _custom_ops as ops
from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.attention.backends.pcp.kv_gather import GatherQuantizedKVMixin, kv_views


class ReshapeAndCacheMixin(GatherQuantizedKVMixin):
    """For caches ``[num_blocks, 2, ...]`` that ``reshape_and_cache_flash`` writes."""

    def _write(
        self,
        layer: AttentionLayer,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        ops.reshape_and_cache_flash(
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
        # The op takes no quantised input. Under "auto" it moves elements as they are, so that bytes
        # travel unchanged in pairs, called bfloat16.
        pairs = rows.view(torch.bfloat16)
        keys, values = kv_views(pairs, num_kv_heads, head_size // 2, head_size // 2)
        cache = kv_cache.view(torch.bfloat16)
        ops.reshape_and_cache_flash(
            keys,
            values,
            cache[:, 0],
            cache[:, 1],
            slot_mapping,
            "auto",
            layer._k_scale,
            layer._v_scale,
        )
