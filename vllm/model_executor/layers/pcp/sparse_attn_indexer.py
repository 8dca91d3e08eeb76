# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer of sparse MLA: keys of all ranks in its cache before a rank selects.

The stock operator writes a step's keys, scores them and selects the top-k, all in one. Here the
keys of all ranks are gathered and written first; then the stock operator goes on without its own
write. A rank so selects for its own rows over the whole prefix, earlier chunks of the same step
included. Where ranks share its cache, ``shared_selection`` takes the operator's place.

It is one operator as well, and one that graphs are split at: where the keys go is known only when a
step runs. In a graph it would write a captured step's slots, and select from stale keys.
"""
# Annotations are read when the operator is registered, so they are not strings here.

from typing import Any

import torch

from vllm import _custom_ops as ops
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_pcp_group
from vllm.distributed.pcp.kv_gather import get_kv_gather
from vllm.distributed.pcp.shard_collectives import kv_shards
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.pcp.shared_selection import SharedSelection
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer, sparse_attn_indexer
from vllm.platforms import current_platform
from vllm.utils import torch_utils
from vllm.utils.torch_utils import LayerNameType, direct_register_custom_op
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadata
from vllm.v1.attention.backends.pcp.mla.indexer import SharedIndexerMetadata, share_cache
from vllm.v1.attention.backends.pcp.mla.shared_rows import max_gathered_rows


class PCPSparseAttnIndexer(SparseAttnIndexer):
    """Over the stock layer: gathers keys before they are written.

    Raises:
        NotImplementedError: Keys are written elsewhere, in a fused kernel, or cached in FP4.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.skip_k_cache_insert or self.use_fp4_cache:
            raise NotImplementedError(
                "Prefill context parallelism does not support this indexer (got "
                f"skip_k_cache_insert={self.skip_k_cache_insert}, "
                f"use_fp4_cache={self.use_fp4_cache}). Drop use_fp4_indexer_cache from "
                "--attention-config, or set --prefill-context-parallel-size 1."
            )
        _indexers[self.k_cache.prefix] = self
        self.shared_selection: SharedSelection | None = None
        if self.dcp_world_size > 1:
            self._share()

    def _share(self) -> None:
        """Prepare for a cache that ranks share."""
        vllm_config = get_current_vllm_config()
        shards = kv_shards(self.cp_kv_cache_interleave_size)
        self.shared_selection = SharedSelection(
            shards,
            max_gathered_rows(vllm_config, shards),
            self.head_dim,
            self.topk_tokens,
            self.max_model_len,
        )
        share_cache(self.k_cache)
        # What follows is told that each rank has a cache of its own.
        self.dcp_world_size, self.dcp_rank = 1, 0

    def forward_cuda(
        self,
        hidden_states: torch.Tensor,
        q_quant: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        k: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Write keys and select.

        Args:
            hidden_states: ``[L, hidden_size]``, for its length.
            q_quant: ``[L, num_index_heads, head_dim]``, quantised.
            k: ``[L, head_dim]``, this rank's keys.
            weights: ``[L, num_index_heads]`` float32.

        Returns:
            ``[max_num_tokens, topk_tokens]`` int32, the shared buffer; of its first L rows each
            holds positions in the row's request, then -1.

        Collectives: one gather on the PCP group in a partitioned step; with D > 1 those of
        ``SharedSelection.select``.
        """
        assert isinstance(q_quant, torch.Tensor)
        name = torch_utils._encode_layer_name(self.k_cache.prefix)
        torch.ops.vllm.pcp_sparse_attn_indexer(
            hidden_states, q_quant, k, weights, self.topk_indices_buffer, name
        )
        return self.topk_indices_buffer

    def write_and_select(
        self,
        hidden_states: torch.Tensor,
        q_quant: torch.Tensor,
        k: torch.Tensor,
        weights: torch.Tensor,
        topk_indices_buffer: torch.Tensor,
        layer_name: LayerNameType,
    ) -> None:
        """Do what ``forward_cuda`` says, when the step runs."""
        kv_cache = self.k_cache.kv_cache
        metadata = get_forward_context().attn_metadata
        total_seq_lens = self.max_total_seq_len
        # There is none while memory is profiled.
        if isinstance(metadata, dict):
            own: Any = metadata[self.k_cache.prefix]
            assert isinstance(own, DeepseekV32IndexerMetadata)
            write_keys(k, kv_cache, own.slot_mapping, self.quant_block_size, self.scale_fmt)
            if self.shared_selection is not None:
                assert isinstance(own, SharedIndexerMetadata)
                selected = topk_indices_buffer[: hidden_states.shape[0], : self.topk_tokens]
                self.shared_selection.select(q_quant, weights, kv_cache, own, selected)
                return
        elif self.shared_selection is not None:
            self.shared_selection.reserve()
            # In its place, not beside it.
            total_seq_lens = 0
        sparse_attn_indexer(
            hidden_states=hidden_states,
            k_cache_prefix=layer_name,
            kv_cache=kv_cache,
            q_quant=q_quant,
            q_scale=None,
            k=k,
            weights=weights,
            quant_block_size=self.quant_block_size,
            scale_fmt=self.scale_fmt,
            topk_tokens=self.topk_tokens,
            head_dim=self.head_dim,
            max_model_len=self.max_model_len,
            total_seq_lens=total_seq_lens,
            topk_indices_buffer=topk_indices_buffer,
            skip_k_cache_insert=True,
        )


# By the name of the cache; operators take tensors and names only.
_indexers: dict[str, PCPSparseAttnIndexer] = {}


def write_keys(
    k: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    quant_block_size: int,
    scale_fmt: str,
) -> None:
    """Write the new keys of all ranks to this rank's cache of the indexer.

    Args:
        k: ``[L, head_dim]``, this rank's keys, or more rows than there are slots.
        kv_cache: ``[num_blocks, block_size, head_dim + scales]`` uint8.
        slot_mapping: ``[P * L]`` int64 in a partitioned step, at most ``[L]`` in others; -1 is not
            written.
        quant_block_size: Elements that share a scale.
        scale_fmt: How scales are stored.

    Collectives: one gather on the PCP group in a partitioned step.
    """
    num_tokens, head_dim = k.shape
    if slot_mapping.shape[0] == get_pcp_group().world_size * num_tokens:
        gather = get_kv_gather()
        gather.begin(num_tokens, head_dim * k.element_size()).view(k.dtype).copy_(k)
        k = gather.finish().view(k.dtype)
    else:
        k = k[: slot_mapping.shape[0]]
    ops.indexer_k_quant_and_cache(k, kv_cache, slot_mapping, quant_block_size, scale_fmt)


@eager_break_during_capture
def _pcp_sparse_attn_indexer(
    hidden_states: torch.Tensor,
    q_quant: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    topk_indices_buffer: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    indexer = _indexers[torch_utils._resolve_layer_name(layer_name)]
    indexer.write_and_select(hidden_states, q_quant, k, weights, topk_indices_buffer, layer_name)


def _pcp_sparse_attn_indexer_fake(
    hidden_states: torch.Tensor,
    q_quant: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    topk_indices_buffer: torch.Tensor,
    layer_name: LayerNameType,
) -> None: ...


direct_register_custom_op(
    "pcp_sparse_attn_indexer",
    _pcp_sparse_attn_indexer,
    ["topk_indices_buffer"],
    _pcp_sparse_attn_indexer_fake,
    dispatch_key=current_platform.dispatch_key,
)
