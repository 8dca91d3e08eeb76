# SPDX-License-Identifier: Apache-2.0
"""Scores and selects over an indexer's cache that ranks share, with the kernels of vLLM's operator.

For prefill rows the keys of whole requests are gathered and put in order; a rank then scores and
selects for its own rows as over a cache of its own. Decodes are the same on all ranks: each scores
what it keeps, and the best of the candidates of all ranks are selected.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import vllm.envs as envs
from vllm import _custom_ops as ops
from vllm.distributed.pcp.kv_shards import KVShards
from vllm.distributed.pcp.shard_collectives import gather_shards
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import fp8_fp4_mqa_logits, fp8_fp4_paged_mqa_logits
from vllm.v1.attention.backends.pcp.mla.indexer import SharedIndexerMetadata
from vllm.v1.attention.backends.pcp.mla.merged_selection import (
    best_candidates,
    gather_candidates,
    pack_candidates,
)
from vllm.v1.attention.backends.pcp.mla.shared_rows import DeviceChunk, parts_of
from vllm.v1.worker.workspace import current_workspace_manager

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class SharedSelection:
    """How an indexer selects from a cache that ranks share.

    Attributes:
        shards: How they do.
        max_rows: Rows that a gather of keys may have.
        head_dim: Of a key.
        topk_tokens: Tokens that a row selects.
        max_model_len: Tokens of the longest request.
    """

    shards: KVShards
    max_rows: int
    head_dim: int
    topk_tokens: int
    max_model_len: int

    def reserve(self) -> None:
        """Have vLLM's workspace grow to what is needed."""
        self._workspace()

    def _workspace(self) -> list[torch.Tensor]:
        """Return values and scales as they are gathered, then in order: ``[max_rows, ...]`` bytes.

        They are views of vLLM's workspace, valid until somebody else asks for it.
        """
        shapes = [(self.max_rows, self.head_dim), (self.max_rows, SCALE_BYTES)] * 2
        views: list[torch.Tensor] = current_workspace_manager().get_simultaneous(
            *((shape, torch.uint8) for shape in shapes)
        )
        return views

    def select(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: SharedIndexerMetadata,
        selected: torch.Tensor,
    ) -> None:
        """Select for all rows of a step.

        Args:
            q: ``[L, num_index_heads, head_dim]`` float8.
            weights: ``[L, num_index_heads]`` float32.
            kv_cache: ``[num_blocks, block_size, head_dim + 4]`` uint8, the step's keys written.
            metadata: The step's.
            selected: ``[L, topk_tokens]`` int32, written: positions in the row's request, then -1.

        Collectives: an all_gather on the DCP group if there are decodes, and two for each chunk of
        prefill rows.
        """
        selected.fill_(-1)
        num_decodes = metadata.num_decode_tokens
        if num_decodes > 0:
            decodes = slice(0, num_decodes)
            selected[decodes] = self._decode(q[decodes], weights[decodes], kv_cache, metadata)
        prefill = metadata.shared_prefill
        if prefill is None:
            return
        for chunk in prefill.chunks:
            keys = self._gather_keys(kv_cache, chunk)
            for run in chunk.runs:
                for part in bounded(run, chunk.num_tokens):
                    tokens = slice(num_decodes + part.start, num_decodes + part.stop)
                    logits = fp8_fp4_mqa_logits(
                        (q[tokens], None),
                        keys,
                        weights[tokens],
                        prefill.first_key[part],
                        prefill.stop_key[part],
                        clean_logits=False,
                    )
                    ops.top_k_per_row_prefill(
                        logits,
                        prefill.first_key[part],
                        prefill.stop_key[part],
                        selected[tokens],
                        logits.shape[0],
                        logits.stride(0),
                        logits.stride(1),
                        self.topk_tokens,
                    )

    def _gather_keys(
        self, kv_cache: torch.Tensor, chunk: DeviceChunk
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys of a chunk in order, ``[num_tokens, head_dim]`` float8, and their scales.

        Collectives: two all_gathers on the DCP group.
        """
        gathered_values, gathered_scales, values, scales = self._workspace()
        num_rows = self.shards.world_size * chunk.num_read
        gathered_values, gathered_scales = gathered_values[:num_rows], gathered_scales[:num_rows]
        own_values = self.shards.own_rows(gathered_values)
        own_scales = self.shards.own_rows(gathered_scales)
        fp8 = current_platform.fp8_dtype()
        ops.cp_gather_indexer_k_quant_cache(
            kv_cache, own_values.view(fp8), own_scales, chunk.block_table, chunk.cu_kept
        )
        gather_shards(gathered_values, own_values)
        gather_shards(gathered_scales, own_scales)
        values, scales = values[: chunk.num_tokens], scales[: chunk.num_tokens]
        # Byte by byte it would take several times as long.
        for gathered, ordered, dtype in (
            (gathered_values, values, torch.int64),
            (gathered_scales, scales, torch.int32),
        ):
            torch.index_select(
                gathered.view(dtype), 0, chunk.gathered_rows, out=ordered.view(dtype)
            )
        return values.view(fp8), scales.view(torch.float32).squeeze(-1)

    def _decode(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: SharedIndexerMetadata,
    ) -> torch.Tensor:
        """Return ``[n, topk_tokens]`` int32 for the decodes.

        Collectives: one all_gather on the DCP group.
        """
        decode = metadata.decode
        assert decode is not None
        num_keys = self.shards.num_kept(np.array([self.max_model_len]), rank=0)
        logits = fp8_fp4_paged_mqa_logits(
            (q.unsqueeze(1), None),
            kv_cache.unsqueeze(-2),
            weights,
            decode.seq_lens,
            decode.block_table,
            decode.schedule_metadata,
            max_model_len=int(num_keys[0]),
            clean_logits=False,
        )
        selected = torch.empty(q.shape[0], self.topk_tokens, dtype=torch.int32, device=q.device)
        ops.top_k_per_row_decode(
            logits,
            1,
            decode.seq_lens,
            selected,
            logits.shape[0],
            logits.stride(0),
            logits.stride(1),
            self.topk_tokens,
        )
        candidates = pack_candidates(logits, selected, self.shards)
        return best_candidates(gather_candidates(candidates, self.shards))


def bounded(run: slice, num_keys: int) -> list[slice]:
    """Return parts of a run of queries, whose scores of so many keys have room in memory."""
    num_scores = envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB * (1 << 20) // torch.float32.itemsize
    return list(parts_of([run], max(1, num_scores // num_keys)))
