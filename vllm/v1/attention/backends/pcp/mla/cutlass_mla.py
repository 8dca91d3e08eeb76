# SPDX-License-Identifier: Apache-2.0
"""CUTLASS_MLA for prefill context parallelism."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.cutlass_mla import (
    CutlassMLABackend,
    CutlassMLAImpl,
    CutlassMLAMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.mla.latent import PlannedPrefillMixin, PlanPrefillMixin


class PCPCutlassMLAImpl(PlannedPrefillMixin, CutlassMLAImpl):
    """Gathers latents; prefills by plan."""


class PCPCutlassMLAMetadataBuilder(PlanPrefillMixin, CutlassMLAMetadataBuilder):
    """Buffers for two rows a request; plans prefills."""


class PCPCutlassMLABackend(CutlassMLABackend):
    """The stock backend with our implementation and builder; keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[CutlassMLAImpl]:
        """Return the implementation class."""
        return PCPCutlassMLAImpl

    @staticmethod
    def get_builder_cls() -> type[CutlassMLAMetadataBuilder]:
        """Return the metadata builder class."""
        return PCPCutlassMLAMetadataBuilder
