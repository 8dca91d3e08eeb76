# SPDX-License-Identifier: Apache-2.0
"""FLASHMLA for prefill context parallelism."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashmla import (
    FlashMLABackend,
    FlashMLAImpl,
    FlashMLAMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.mla.latent import PlannedPrefillMixin, PlanPrefillMixin


class PCPFlashMLAImpl(PlannedPrefillMixin, FlashMLAImpl):
    """Gathers latents; prefills by plan."""


class PCPFlashMLAMetadataBuilder(PlanPrefillMixin, FlashMLAMetadataBuilder):
    """Buffers for two rows a request; plans prefills."""


class PCPFlashMLABackend(FlashMLABackend):
    """The stock backend with our implementation and builder; keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[FlashMLAImpl]:
        """Return the implementation class."""
        return PCPFlashMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashMLAMetadataBuilder]:
        """Return the metadata builder class."""
        return PCPFlashMLAMetadataBuilder
