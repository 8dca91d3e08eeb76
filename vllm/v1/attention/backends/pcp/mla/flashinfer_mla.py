# SPDX-License-Identifier: Apache-2.0
"""FLASHINFER_MLA for prefill context parallelism."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashinfer_mla import (
    FlashInferMLABackend,
    FlashInferMLAImpl,
    FlashInferMLAMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.mla.latent import PlannedPrefillMixin, PlanPrefillMixin


class PCPFlashInferMLAImpl(PlannedPrefillMixin, FlashInferMLAImpl):
    """Gathers latents; prefills by plan."""


class PCPFlashInferMLAMetadataBuilder(PlanPrefillMixin, FlashInferMLAMetadataBuilder):
    """Buffers for two rows a request; plans prefills."""


class PCPFlashInferMLABackend(FlashInferMLABackend):
    """The stock backend with our implementation and builder; keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[FlashInferMLAImpl]:
        """Return the implementation class."""
        return PCPFlashInferMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferMLAMetadataBuilder]:
        """Return the metadata builder class."""
        return PCPFlashInferMLAMetadataBuilder
