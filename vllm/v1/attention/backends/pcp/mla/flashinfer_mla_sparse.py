# SPDX-License-Identifier: Apache-2.0
"""FLASHINFER_MLA_SPARSE for prefill context parallelism."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import (
    FlashInferMLASparseImpl,
    FlashInferMLASparseMetadataBuilder,
    FlashInferMLASparseTRTLLMBackend,
)
from vllm.v1.attention.backends.pcp.kv_gather import RowsPerRequestMixin
from vllm.v1.attention.backends.pcp.mla.latent import GatherLatentMixin


class PCPFlashInferMLASparseImpl(GatherLatentMixin, FlashInferMLASparseImpl):
    """Gathers latents.

    Raises:
        NotImplementedError: Ranks share the KV cache, D > 1.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if self.dcp_world_size > 1:
            raise NotImplementedError(
                "Prefill context parallelism does not support decode context parallelism with the "
                "attention backend that vLLM chose (got FLASHINFER_MLA_SPARSE). Set "
                "--attention-backend FLASHMLA_SPARSE, or --decode-context-parallel-size 1."
            )
        super().__init__(*args, **kwargs)


class PCPFlashInferMLASparseMetadataBuilder(
    RowsPerRequestMixin, FlashInferMLASparseMetadataBuilder
):
    """Buffers for two rows a request."""


class PCPFlashInferMLASparseBackend(FlashInferMLASparseTRTLLMBackend):
    """The stock backend with our implementation and builder; keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[FlashInferMLASparseImpl]:
        """Return the implementation class."""
        return PCPFlashInferMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferMLASparseMetadataBuilder]:
        """Return the metadata builder class."""
        return PCPFlashInferMLASparseMetadataBuilder
