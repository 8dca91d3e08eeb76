# SPDX-License-Identifier: Apache-2.0
"""A plan of prefills on the device, as kernels take it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm.distributed.pcp.kv_shards import KVShards
from vllm.v1.attention.backends.pcp.mla.prefill_plan import AttendCall, KeyBatch, PrefillPlan
from vllm.v1.worker.gpu.pcp.copies import copy_to_device


@dataclass
class DeviceCall:
    """An ``AttendCall`` with its arrays on the device."""

    call: AttendCall
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor


@dataclass
class DeviceBatch:
    """A ``KeyBatch`` as the kernel that reads the cache takes it.

    Attributes:
        num_tokens: Tokens to up-project.
        num_read: Tokens to read.
        block_table: ``[num_pieces, max_num_blocks]`` int32.
        cu_seqlens: ``[num_pieces + 1]`` int32, of the tokens to read.
        token_to_piece: ``[num_read]`` int32.
        start: ``[num_pieces]`` int32.
        calls: What attends to them.
        gathered_rows: ``[num_tokens]`` int32, where each token stands among the rows of all ranks;
            None where ranks do not share and tokens are in order.
    """

    num_tokens: int
    num_read: int
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    token_to_piece: torch.Tensor
    start: torch.Tensor
    calls: list[DeviceCall]
    gathered_rows: torch.Tensor | None


def plan_to_device(
    plan: PrefillPlan, block_table: torch.Tensor, shards: KVShards
) -> list[DeviceBatch]:
    """Copy a plan in one transfer.

    Args:
        plan: The plan.
        block_table: ``[num_rows, max_num_blocks]`` int32, of the prefill rows.
        shards: How ranks share the KV cache.
    """
    arrays = [np.array(shards.gather_order, dtype=np.int32)]
    arrays += [
        array
        for batch in plan.batches
        for array in (
            batch.row,
            batch.start,
            batch.cu_seqlens,
            batch.cu_kept,
            *(cu for call in batch.calls for cu in (call.cu_seqlens_q, call.cu_seqlens_k)),
        )
    ]
    on_device = iter(copy_to_device(*arrays, device=block_table.device))
    gather_order = next(on_device)

    def device_batch(batch: KeyBatch) -> DeviceBatch:
        row, start, cu_seqlens, cu_kept = (next(on_device) for _ in range(4))
        num_read = int(batch.cu_kept[-1])
        return DeviceBatch(
            num_tokens=batch.num_tokens,
            num_read=num_read,
            block_table=block_table.index_select(0, row),
            cu_seqlens=cu_kept,
            token_to_piece=_token_to_piece(cu_kept, num_read),
            start=start,
            calls=[DeviceCall(call, next(on_device), next(on_device)) for call in batch.calls],
            gathered_rows=None
            if shards.world_size == 1
            else gathered_rows(
                cu_seqlens, cu_kept, batch.num_tokens, shards.interleave, gather_order
            ),
        )

    return [device_batch(batch) for batch in plan.batches]


def _token_to_piece(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return ``[num_tokens]`` int32, the piece of each token."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    return torch.bucketize(tokens, cu_seqlens[1:], out_int32=True, right=True)


def slots_to_read(
    block_table: torch.Tensor, cu_kept: torch.Tensor, num_read: int, block_size: int
) -> torch.Tensor:
    """Return ``[num_read]`` int32, the slot in this rank's cache of each token that it reads.

    A rank may keep fewer tokens of a piece than it reads. Those behind them have slots too, of the
    piece's last block, in which rank 0 keeps some.

    Args:
        block_table: ``[num_pieces, max_num_blocks]`` int32, contiguous; pieces begin with the first
            block.
        cu_kept: ``[num_pieces + 1]`` int32, of the tokens to read.
        num_read: Tokens to read.
        block_size: Tokens of a block that a rank keeps.
    """
    piece = _token_to_piece(cu_kept, num_read)
    token = torch.arange(num_read, dtype=torch.int32, device=piece.device)
    token -= cu_kept.index_select(0, piece)
    entry = piece * block_table.shape[1] + token // block_size
    return block_table.view(-1).index_select(0, entry) * block_size + token % block_size


def gathered_rows(
    cu_seqlens: torch.Tensor,
    cu_kept: torch.Tensor,
    num_tokens: int,
    interleave: int,
    gather_order: torch.Tensor,
) -> torch.Tensor:
    """Return ``[num_tokens]`` int32, where each token of a batch stands in what is gathered.

    Pieces start where rank 0 begins a run.

    Args:
        cu_seqlens: ``[num_pieces + 1]`` int32, of the tokens.
        cu_kept: ``[num_pieces + 1]`` int32, of what each rank reads.
        num_tokens: Tokens of the batch.
        interleave: Tokens of a run.
        gather_order: ``[D]`` int32, where each DCP rank's rows stand in what is gathered.
    """
    num_shards = gather_order.shape[0]
    piece = _token_to_piece(cu_seqlens, num_tokens)
    token = torch.arange(num_tokens, dtype=torch.int32, device=piece.device)
    token -= cu_seqlens.index_select(0, piece)
    run = token // interleave
    rows = gather_order.index_select(0, run % num_shards) * cu_kept[-1]
    rows += cu_kept.index_select(0, piece)
    rows += run // num_shards * interleave + token % interleave
    return rows
