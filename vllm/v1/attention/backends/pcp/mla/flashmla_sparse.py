# SPDX-License-Identifier: Apache-2.0
"""FLASHMLA_SPARSE for prefill context parallelism."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashmla_sparse import (
    FlashMLASparseBackend,
    FlashMLASparseImpl,
    FlashMLASparseMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.kv_gather import RowsPerRequestMixin
from vllm.v1.attention.backends.pcp.mla.latent import GatherLatentMixin


class PCPFlashMLASparseImpl(GatherLatentMixin, FlashMLASparseImpl):
    """Gathers latents."""


class PCPFlashMLASparseMetadataBuilder(RowsPerRequestMixin, FlashMLASparseMetadataBuilder):
    """Buffers for two rows a request."""


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
