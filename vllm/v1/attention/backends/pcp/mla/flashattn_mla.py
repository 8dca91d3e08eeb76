# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN_MLA for prefill context parallelism."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashattn_mla import (
    FlashAttnMLABackend,
    FlashAttnMLAImpl,
    FlashAttnMLAMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.mla.latent import PlannedPrefillMixin, PlanPrefillMixin


class PCPFlashAttnMLAImpl(PlannedPrefillMixin, FlashAttnMLAImpl):
    """Gathers latents; prefills by plan."""


class PCPFlashAttnMLAMetadataBuilder(PlanPrefillMixin, FlashAttnMLAMetadataBuilder):
    """Buffers for two rows a request; plans prefills."""


class PCPFlashAttnMLABackend(FlashAttnMLABackend):
    """The stock backend with our implementation and builder; keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttnMLAImpl]:
        """Return the implementation class."""
        return PCPFlashAttnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttnMLAMetadataBuilder]:
        """Return the metadata builder class."""
        return PCPFlashAttnMLAMetadataBuilder
