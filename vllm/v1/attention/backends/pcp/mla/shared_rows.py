# SPDX-License-Identifier: Apache-2.0
"""What the builders of sparse MLA have in common where ranks share the KV cache.

Stock builders see the decodes alone, with the lengths of what this rank keeps. All other rows go by
a plan of chunks (``request_chunks``), the same for both caches.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.distributed.parallel_state import get_pcp_group
from vllm.distributed.pcp.kv_shards import KVShards
from vllm.distributed.pcp.step import get_step_state
from vllm.utils.math_utils import round_up
from vllm.v1.attention.backends.pcp.mla.device_plan import gathered_rows
from vllm.v1.attention.backends.pcp.mla.request_chunks import plan_chunks
from vllm.v1.worker.gpu.pcp.copies import copy_to_device

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

# Kernels that read gathered rows take them for a cache of blocks of this size.
GATHERED_BLOCK_SIZE = 64
# Gathered at a time at least, if there are as many: short requests share a gather.
MIN_GATHERED_ROWS = 64 * 1024


@dataclass
class DeviceChunk:
    """A ``RequestChunk`` as kernels take it.

    Attributes:
        num_tokens: Tokens of the requests.
        num_read: Tokens that each rank reads, padding included.
        block_table: ``[n, max_num_blocks]`` int32.
        cu_kept: ``[n + 1]`` int32, of what is read.
        gathered_rows: ``[num_tokens]`` int32, where each token stands among the rows of all ranks.
        runs: This rank's tokens, counted from the first prefill token.
    """

    num_tokens: int
    num_read: int
    block_table: torch.Tensor
    cu_kept: torch.Tensor
    gathered_rows: torch.Tensor
    runs: tuple[slice, ...]


@dataclass
class SharedPrefill:
    """The prefill rows of a step.

    Attributes:
        chunks: In order.
        first_key: ``[T]`` int32, see ``ChunkPlan``.
        stop_key: ``[T]`` int32, see ``ChunkPlan``.
    """

    chunks: list[DeviceChunk]
    first_key: torch.Tensor
    stop_key: torch.Tensor


def max_gathered_rows(vllm_config: VllmConfig, shards: KVShards) -> int:
    """Return the rows that a gather may have: those of the longest request, or more.

    A multiple of a block of each rank.
    """
    model_config = vllm_config.model_config
    longest = int(shards.num_gathered(np.array([model_config.max_model_len]))[0])
    all_requests = longest * vllm_config.scheduler_config.max_num_seqs
    num_rows = max(longest, min(MIN_GATHERED_ROWS, all_requests))
    return round_up(num_rows, GATHERED_BLOCK_SIZE * shards.world_size)


def whole_cache_view(vllm_config: VllmConfig) -> VllmConfig:
    """Return a shallow copy of the configuration in which D is 1."""
    view = copy.copy(vllm_config)
    view.parallel_config = copy.copy(vllm_config.parallel_config)
    view.parallel_config.decode_context_parallel_size = 1
    return view


def count_decodes(common: CommonAttentionMetadata) -> int:
    """Return how many rows, the first ones, are decodes of one token: the same on every rank.

    In a partitioned step chunks of a single token, which other ranks do not have, are not.
    """
    row_len = np.diff(common.query_start_loc_cpu.numpy())
    step = get_step_state()
    if step.is_partitioned:
        row_len = row_len[: 0 if step.plan is None else step.plan.num_decodes]
    is_longer = row_len > 1
    return int(is_longer.argmax()) if is_longer.any() else row_len.shape[0]


def decode_view(
    common: CommonAttentionMetadata, num_decodes: int, shards: KVShards
) -> CommonAttentionMetadata:
    """Return what a stock builder sees of a step: its decodes, and what this rank keeps of them.

    Args:
        common: The step's; ``dcp_local_seq_lens`` is set.
        num_decodes: Rows that are decodes, ahead of all others.
        shards: How ranks share the KV cache.
    """
    assert common.dcp_local_seq_lens is not None
    return dataclasses.replace(
        common,
        query_start_loc=common.query_start_loc[: num_decodes + 1],
        query_start_loc_cpu=common.query_start_loc_cpu[: num_decodes + 1],
        seq_lens=common.dcp_local_seq_lens[:num_decodes],
        dcp_local_seq_lens=None,
        num_reqs=num_decodes,
        num_actual_tokens=num_decodes,
        max_query_len=1,
        max_seq_len=int(shards.num_kept(np.array([common.max_seq_len]), rank=0)[0]),
        block_table_tensor=common.block_table_tensor[:num_decodes],
    )


def parts_of(runs: Iterable[slice], max_len: int | None) -> Iterator[slice]:
    """Yield runs, cut into parts of so many rows at most, if that is bounded."""
    for run in runs:
        step = max_len or max(1, run.stop - run.start)
        for start in range(run.start, run.stop, step):
            yield slice(start, min(start + step, run.stop))


def plan_rows(
    common: CommonAttentionMetadata, num_decodes: int, shards: KVShards, max_rows: int
) -> SharedPrefill | None:
    """Plan the rows behind the decodes, and copy the plan in one transfer; None if there are none.

    Args:
        common: The step's.
        num_decodes: Rows that are decodes, ahead of all others.
        shards: How ranks share the KV cache.
        max_rows: Rows that a gather may have.
    """
    row_len = np.diff(common.query_start_loc_cpu.numpy())
    if num_decodes == row_len.shape[0]:
        return None
    assert common.seq_lens_cpu_upper_bound is not None
    seq_lens = common.seq_lens_cpu_upper_bound.numpy()[: row_len.shape[0]]
    partition = get_step_state().plan
    if partition is None:
        row_req, req_end = np.arange(row_len.shape[0], dtype=np.int32), seq_lens
    else:
        row_req, req_end = partition.row_req[get_pcp_group().rank_in_group], partition.req_end
    rows = slice(num_decodes, None)
    plan = plan_chunks(
        seq_lens[rows] - row_len[rows],
        row_len[rows],
        row_req[rows],
        req_end,
        shards=shards,
        max_rows=max_rows,
    )
    arrays = [np.array(shards.gather_order, dtype=np.int32), plan.first_key, plan.stop_key]
    for chunk in plan.chunks:
        arrays += [chunk.row + np.int32(num_decodes), chunk.cu_seqlens, chunk.cu_kept]
    block_table = common.block_table_tensor
    gather_order, first_key, stop_key, *of_chunks = copy_to_device(
        *arrays, device=block_table.device
    )
    chunks = []
    for index, chunk in enumerate(plan.chunks):
        row, cu_seqlens, cu_kept = of_chunks[3 * index : 3 * index + 3]
        num_tokens = int(chunk.cu_seqlens[-1])
        chunks.append(
            DeviceChunk(
                num_tokens=num_tokens,
                num_read=int(chunk.cu_kept[-1]),
                block_table=block_table.index_select(0, row),
                cu_kept=cu_kept,
                gathered_rows=gathered_rows(
                    cu_seqlens, cu_kept, num_tokens, shards.interleave, gather_order
                ),
                runs=chunk.runs,
            )
        )
    return SharedPrefill(chunks, first_key, stop_key)
