# SPDX-License-Identifier: Apache-2.0
"""CPU_ATTN for prefill context parallelism."""

from __future__ import annotations

import torch

from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.kv_gather import GatherKVMixin, RowsPerRequestMixin


class PCPCPUAttentionImpl(GatherKVMixin, CPUAttentionBackendImpl):
    """Gathers K and V in the model's dtype."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the cache, which ``do_kv_cache_update`` has filled.

        The stock forward writes K and V a second time. With a slot mapping for the rows of all
        ranks that would put this rank's keys into rank 0's slots; without K and V it leaves the
        cache alone.
        """
        return super().forward(
            layer,
            query,
            None,  # type: ignore[arg-type]  # optional in the stock body, not in its signature
            None,  # type: ignore[arg-type]
            kv_cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )


class PCPCPUAttentionMetadataBuilder(RowsPerRequestMixin, CPUAttentionMetadataBuilder):
    """Buffers for two rows a request."""


class PCPCPUAttentionBackend(CPUAttentionBackend):
    """The stock backend with our implementation and builder; keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Return the implementation class."""
        return PCPCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Return the metadata builder class."""
        return PCPCPUAttentionMetadataBuilder
