# SPDX-License-Identifier: Apache-2.0
"""Metadata of the indexer of sparse MLA, where ranks share its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.pcp.shard_collectives import kv_shards
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV32IndexerBackend,
    DeepseekV32IndexerMetadata,
    DeepseekV32IndexerMetadataBuilder,
)
from vllm.v1.attention.backends.pcp.mla.shared_rows import (
    SharedPrefill,
    count_decodes,
    decode_view,
    max_gathered_rows,
    plan_rows,
    whole_cache_view,
)

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass
class SharedIndexerMetadata(DeepseekV32IndexerMetadata):
    """The stock metadata of the decodes, with the lengths of what this rank keeps.

    Attributes:
        shared_prefill: The other rows, if there are any.
    """

    shared_prefill: SharedPrefill | None = None


class SharedIndexerMetadataBuilder(DeepseekV32IndexerMetadataBuilder):
    """Over the stock builder, which is told that each rank has a cache of its own."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        view = whole_cache_view(vllm_config)
        init: Any = super().__init__
        init(kv_cache_spec, layer_names, view, device)
        self.shards = kv_shards(vllm_config.parallel_config.cp_kv_cache_interleave_size)
        self.max_rows = max_gathered_rows(vllm_config, self.shards)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SharedIndexerMetadata:
        """Build for decodes as usual, and plan the other rows."""
        common = common_attn_metadata
        num_decodes = count_decodes(common)
        decodes = decode_view(common, num_decodes, self.shards)
        metadata: Any = super().build(common_prefix_len, decodes, fast_build)
        prefill = plan_rows(common, num_decodes, self.shards, self.max_rows)
        return SharedIndexerMetadata(**vars(metadata), shared_prefill=prefill)


class SharedIndexerBackend(DeepseekV32IndexerBackend):
    """The stock backend with our builder."""

    @staticmethod
    def get_builder_cls() -> type[DeepseekV32IndexerMetadataBuilder]:
        """Return the metadata builder class."""
        return SharedIndexerMetadataBuilder


class SharedIndexerCacheMixin:
    """Over the module that holds an indexer's cache, once it is built: see ``share_cache``."""

    def get_attn_backend(self) -> type[DeepseekV32IndexerBackend]:
        """Return what builds metadata for the cache."""
        return SharedIndexerBackend


def share_cache(cache: Any) -> None:
    """Have metadata for an indexer's cache built by us; vLLM has no registry of such backends."""
    stock = type(cache)
    cache.__class__ = type(f"Shared{stock.__name__}", (SharedIndexerCacheMixin, stock), {})
