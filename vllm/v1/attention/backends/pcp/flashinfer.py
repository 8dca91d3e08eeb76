# SPDX-License-Identifier: Apache-2.0
"""FLASHINFER for prefill context parallelism."""

from __future__ import annotations

from vllm.v1.attention.backends.flashinfer import (
    FlashInferBackend,
    FlashInferImpl,
    FlashInferMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.kv_gather import RowsPerRequestMixin
from vllm.v1.attention.backends.pcp.reshape_and_cache import ReshapeAndCacheMixin


class PCPFlashInferImpl(ReshapeAndCacheMixin, FlashInferImpl):
    """Gathers K and V in the cache's dtype."""


class PCPFlashInferMetadataBuilder(RowsPerRequestMixin, FlashInferMetadataBuilder):
    """Buffers for two rows a request."""


class PCPFlashInferBackend(FlashInferBackend):
    """The stock backend with our implementation and builder; keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[FlashInferImpl]:
        """Return the implementation class."""
        return PCPFlashInferImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferMetadataBuilder]:
        """Return the metadata builder class."""
        return PCPFlashInferMetadataBuilder
