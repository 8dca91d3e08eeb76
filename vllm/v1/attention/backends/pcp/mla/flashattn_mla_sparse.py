# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN_MLA_SPARSE for prefill context parallelism."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashattn_mla_sparse import (
    FlashAttnMLASparseBackend,
    FlashAttnMLASparseImpl,
    FlashAttnMLASparseMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.kv_gather import RowsPerRequestMixin
from vllm.v1.attention.backends.pcp.mla.latent import GatherLatentMixin


class PCPFlashAttnMLASparseImpl(GatherLatentMixin, FlashAttnMLASparseImpl):
    """Gathers latents."""


class PCPFlashAttnMLASparseMetadataBuilder(RowsPerRequestMixin, FlashAttnMLASparseMetadataBuilder):
    """Buffers for two rows a request."""


class PCPFlashAttnMLASparseBackend(FlashAttnMLASparseBackend):
    """The stock backend with our implementation and builder; keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttnMLASparseImpl]:
        """Return the implementation class."""
        return PCPFlashAttnMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttnMLASparseMetadataBuilder]:
        """Return the metadata builder class."""
        return PCPFlashAttnMLASparseMetadataBuilder
