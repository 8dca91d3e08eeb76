# SPDX-License-Identifier: Apache-2.0
"""Where the tokens that a row selected stand: in this rank's cache, or among gathered rows.

A row's selection holds positions in its request, then -1. Kernels of sparse attention take slots,
those that count in front, and how many they are. One launch looks up all of them; slots keep the
order of the positions. (Of decodes these are sorted, see ``merged_selection``. Those of prefill
rows come from vLLM's kernel, whose atomics may swap them from run to run, as with D = 1.)
"""

from __future__ import annotations

from typing import Any

import torch

from vllm.distributed.pcp.kv_shards import KVShards
from vllm.triton_utils import tl, triton


def kept_slots(
    positions: torch.Tensor, block_table: torch.Tensor, shards: KVShards, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots of those selected tokens that this rank keeps.

    Args:
        positions: ``[n, k]`` int32, rows of any stride; what a row selected, and -1.
        block_table: ``[n, max_num_blocks]`` int32, rows of any stride, of each row's request.
        shards: How ranks share the KV cache.
        block_size: Tokens of a block that a rank keeps.

    Returns:
        ``[n, k]`` int32, slots and behind them -1; ``[n]`` int32, how many slots.
    """
    if not positions.is_cuda:
        return _kept_slots_torch(positions, block_table, shards, block_size)
    slots = positions.new_empty(positions.shape)
    num_slots = positions.new_empty(positions.shape[0])
    kernel: Any = _kept_slots_kernel
    kernel[(positions.shape[0],)](
        slots,
        num_slots,
        positions,
        block_table,
        positions.stride(0),
        block_table.stride(0),
        shards.rank,
        shards.world_size,
        shards.interleave,
        block_size,
        positions.shape[1],
        triton.next_power_of_2(positions.shape[1]),
    )
    return slots, num_slots


def gathered_slots(
    positions: torch.Tensor, first_key: torch.Tensor, gathered_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where selected tokens stand among gathered rows.

    Args:
        positions: ``[n, k]`` int32, rows of any stride; what a row selected, then -1.
        first_key: ``[n]`` int32, where each row's request begins among the tokens in order.
        gathered_rows: ``[num_tokens]`` int32, where each of these stands among gathered rows.

    Returns:
        As ``kept_slots``.
    """
    if not positions.is_cuda:
        return _gathered_slots_torch(positions, first_key, gathered_rows)
    slots = positions.new_empty(positions.shape)
    num_slots = positions.new_empty(positions.shape[0])
    kernel: Any = _gathered_slots_kernel
    kernel[(positions.shape[0],)](
        slots,
        num_slots,
        positions,
        first_key,
        gathered_rows,
        positions.stride(0),
        positions.shape[1],
        triton.next_power_of_2(positions.shape[1]),
    )
    return slots, num_slots


def _kept_slots_torch(
    positions: torch.Tensor, block_table: torch.Tensor, shards: KVShards, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    run = positions.div(shards.interleave, rounding_mode="floor")
    is_kept = (positions >= 0) & (run % shards.world_size == shards.rank)
    local = run // shards.world_size * shards.interleave + positions % shards.interleave
    local = local.masked_fill(~is_kept, 0)
    block = block_table.gather(1, (local // block_size).long())
    slots = (block * block_size + local % block_size).masked_fill(~is_kept, -1)
    in_front = is_kept.int().argsort(dim=1, descending=True, stable=True)
    return slots.gather(1, in_front), is_kept.sum(dim=1, dtype=torch.int32)


def _gathered_slots_torch(
    positions: torch.Tensor, first_key: torch.Tensor, gathered_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    is_token = positions >= 0
    token = (positions + first_key[:, None]).masked_fill(~is_token, 0)
    slots = gathered_rows[token.long()].masked_fill(~is_token, -1)
    return slots, is_token.sum(dim=1, dtype=torch.int32)


@triton.jit(do_not_specialize=["table_stride"])
def _kept_slots_kernel(
    slots_ptr: tl.tensor,  # [n, NUM_SELECTED]
    num_slots_ptr: tl.tensor,  # [n]
    positions_ptr: tl.tensor,  # [n, NUM_SELECTED]
    table_ptr: tl.tensor,  # [n, max_num_blocks]
    positions_stride: tl.tensor,
    table_stride: tl.tensor,
    RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    is_column = column < NUM_SELECTED
    position = tl.load(positions_ptr + row * positions_stride + column, mask=is_column, other=-1)
    run = position // INTERLEAVE
    is_kept = (position >= 0) & (run % WORLD_SIZE == RANK)
    local = run // WORLD_SIZE * INTERLEAVE + position % INTERLEAVE
    block = tl.load(table_ptr + row * table_stride + local // BLOCK_SIZE, mask=is_kept, other=0)
    slot = block * BLOCK_SIZE + local % BLOCK_SIZE
    kept = is_kept.to(tl.int32)
    num_kept = tl.sum(kept, axis=0)
    slots_ptrs = slots_ptr + row * NUM_SELECTED
    tl.store(slots_ptrs + tl.cumsum(kept, axis=0) - 1, slot, mask=is_kept)
    nothing = tl.full([WIDTH], -1, tl.int32)
    tl.store(slots_ptrs + column, nothing, mask=is_column & (column >= num_kept))
    tl.store(num_slots_ptr + row, num_kept)


@triton.jit(do_not_specialize_on_alignment=["first_key_ptr"])
def _gathered_slots_kernel(
    slots_ptr: tl.tensor,  # [n, NUM_SELECTED]
    num_slots_ptr: tl.tensor,  # [n]
    positions_ptr: tl.tensor,  # [n, NUM_SELECTED]
    first_key_ptr: tl.tensor,  # [n]
    gathered_rows_ptr: tl.tensor,  # [num_tokens]
    positions_stride: tl.tensor,
    NUM_SELECTED: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    is_column = column < NUM_SELECTED
    position = tl.load(positions_ptr + row * positions_stride + column, mask=is_column, other=-1)
    is_token = position >= 0
    token = tl.load(first_key_ptr + row) + position
    slot = tl.load(gathered_rows_ptr + token, mask=is_token, other=-1)
    tl.store(slots_ptr + row * NUM_SELECTED + column, slot, mask=is_column)
    tl.store(num_slots_ptr + row, tl.sum(is_token.to(tl.int32), axis=0))
