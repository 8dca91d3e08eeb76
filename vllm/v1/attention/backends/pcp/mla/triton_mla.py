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

    def _reserve_attn_logits_workspace(self) -> None:
        """Reserve for as many heads as decodes attend with: of all TP ranks, where these share."""
        num_shards = self.dcp_world_size
        pcp_world_size = self.vllm_config.parallel_config.prefill_context_parallel_size
        self.dcp_world_size = max(1, num_shards // pcp_world_size)
        super()._reserve_attn_logits_workspace()
        self.dcp_world_size = num_shards


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
