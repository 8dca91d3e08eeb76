# SPDX-License-Identifier: Apache-2.0
"""Decodes over a KV cache that ranks share: each attends to what it keeps, then all add up.

The rows are the same on all ranks. With D = P the ranks of a group have the same heads, and nothing
has to be exchanged but partial results; with D = TP x P queries of all TP ranks come first.

vLLM's own layer would gather the heads of all D ranks, P copies of each. So the layer is told that
no ranks share, and the metadata builder that as many do as have heads of their own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.pcp.kv_shards import KVShards
from vllm.distributed.pcp.shard_collectives import gather_heads, gather_lse, sum_over_shards
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
from vllm.v1.attention.backends.pcp.partial_results import weigh

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    _ImplBase = MLACommonImpl[Any]
else:
    _ImplBase = object


class SharedDecodeMixin(_ImplBase):
    """Over a stock MLA implementation: decodes with D > 1.

    Attributes:
        num_shards: D.
        num_head_shards: Ranks of them that have heads of their own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Asked for ahead of everything else; the stock implementation overwrites it.
        self.num_shards = self.dcp_world_size
        self.num_head_shards = max(1, self.num_shards // self.pcp_world_size)
        super().__init__(*args, **kwargs)
        self.dcp_world_size, self.dcp_rank = 1, 0

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend for the decode rows, which are the same on all ranks.

        Args:
            q: ``[T, num_heads, head_size]``, or its latent and its rotary part.
            kv_c_and_k_pe_cache: ``[num_blocks, block_size, head_size]``.
            attn_metadata: The step's.
            layer: The attention layer, for its cache scales.

        Returns:
            ``[T, num_heads, kv_lora_rank]``; with D > 1 merged, and the same bits on all ranks that
            have these heads.

        Collectives: with D > 1 an all_gather and an all_reduce on the DCP group, with D = TP x P an
        all_gather on the TP group ahead of them.
        """
        stock: Any = super()
        if self.num_shards == 1:
            result: tuple[torch.Tensor, torch.Tensor | None]
            result = stock.forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
            return result
        if self.num_head_shards > 1:
            q = gather_heads(torch.cat(q, dim=-1) if isinstance(q, tuple) else q)
        out, lse = stock.forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        out, lse = out.contiguous(), lse.reshape(out.shape[:2]).float().contiguous()
        weigh(out, lse, gather_lse(lse), is_base_e=self.lse_base_on_e)
        out = sum_over_shards(out)
        if self.num_head_shards > 1:
            first = get_tensor_model_parallel_rank() * self.num_heads
            out = out[:, first : first + self.num_heads]
        return out, None


def shard_view(
    common: CommonAttentionMetadata, shards: KVShards, *, num_head_shards: int
) -> CommonAttentionMetadata:
    """Return what the stock builder takes a rank's decode metadata from.

    Args:
        common: The step's; ``dcp_local_seq_lens`` is set.
        shards: How ranks share the KV cache.
        num_head_shards: What the builder takes for D.
    """
    assert common.dcp_local_seq_lens is not None
    max_kept = int(shards.num_kept(np.array([common.max_seq_len]), rank=0)[0])
    return dataclasses.replace(
        common,
        seq_lens=common.dcp_local_seq_lens,
        # The builder divides by what it takes for D.
        max_seq_len=max_kept * num_head_shards,
    )


def end_decodes_at(common: CommonAttentionMetadata, num_decodes: int) -> CommonAttentionMetadata:
    """Return a view in which the row behind the decodes is too long for one.

    A stock builder takes short prefills for decodes, chunks of a single token among them, which
    other ranks do not have.

    Args:
        common: Of a step with at least one row behind the decodes.
        num_decodes: Rows that are decodes, ahead of all others.
    """
    query_start_loc = common.query_start_loc_cpu.clone()
    query_start_loc[num_decodes + 1 :] += 1
    return dataclasses.replace(
        common,
        query_start_loc_cpu=query_start_loc,
        max_query_len=max(common.max_query_len, 2),
    )
