# SPDX-License-Identifier: Apache-2.0
"""TRITON_MLA for prefill context parallelism."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.triton_mla import (
    TritonMLABackend,
    TritonMLAImpl,
    TritonMLAMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.mla.latent import PlannedPrefillMixin, PlanPrefillMixin


class PCPTritonMLAImpl(PlannedPrefillMixin, TritonMLAImpl):
    """Gathers latents; prefills by plan."""


class PCPTritonMLAMetadataBuilder(PlanPrefillMixin, TritonMLAMetadataBuilder):
    """Buffers for two rows a request; plans prefills."""


class PCPTritonMLABackend(TritonMLABackend):
    """The stock backend with our implementation and builder; keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[TritonMLAImpl]:
        """Return the implementation class."""
        return PCPTritonMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMLAMetadataBuilder]:
        """Return the metadata builder class."""
        return PCPTritonMLAMetadataBuilder
