# SPDX-License-Identifier: Apache-2.0
"""Kernels that write to the memory of other ranks, and that wait for them.

Ranks are told apart by a table of addresses, one for each, on the device. Memory of other ranks is
reached over NVLink; the order of its writes is that of the memory model of PTX: what a kernel wrote
is seen by whoever acquires, at system scope, what a later kernel of the same stream released.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm.triton_utils import tl, triton

# Of a program: 16 KiB.
WORDS_PER_PROGRAM = 4096
MAX_WORDS = 1024


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def _copy_slots_kernel(
    slots_ptr: tl.tensor,  # [num_tokens] int64; -1 is left alone
    bases_ptr: tl.tensor,  # [NUM_RANKS] int64
    num_tokens: tl.tensor,
    rank: tl.tensor,
    num_heads: tl.tensor,
    block_stride: tl.tensor,
    half_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    part = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    is_written = (slot >= 0)[:, None]
    start = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    start += part // num_heads * half_stride + part % num_heads * head_stride
    own = tl.load(bases_ptr + rank).to(tl.pointer_type(tl.int32))
    own = tl.multiple_of(own, 16)
    for first in tl.static_range(0, NUM_WORDS, WORDS):
        word = (first + tl.arange(0, WORDS))[None, :]
        mask = is_written & (word < NUM_WORDS)
        offsets = start[:, None] + word
        rows = tl.load(own + offsets, mask=mask)
        # Each rank begins with the next one, so that no link is everybody's at once.
        for step in tl.static_range(1, NUM_RANKS):
            peer = tl.load(bases_ptr + (rank + step) % NUM_RANKS).to(tl.pointer_type(tl.int32))
            peer = tl.multiple_of(peer, 16)
            tl.store(peer + offsets, rows, mask=mask)


def slot_parts(cache: torch.Tensor) -> torch.Tensor:
    """Return ``[num_blocks, num_halves, block_size, num_heads, head_bytes]`` uint8, a view.

    Heads that lie side by side are one.

    Args:
        cache: ``[num_blocks, 2, block_size, num_kv_heads, head_size]`` of any type; without the
            second axis; or of latents, ``[num_blocks, block_size, row]``. The last axis is
            contiguous, other strides are multiples of 4 bytes.
    """
    parts = cache.view(torch.uint8)
    parts = parts.unsqueeze(2) if parts.dim() == 3 else parts
    parts = parts.unsqueeze(1) if parts.dim() == 4 else parts
    return parts.flatten(3).unsqueeze(3) if parts.stride(3) == parts.shape[4] else parts


def copy_slots(parts: torch.Tensor, slots: torch.Tensor, bases: torch.Tensor, rank: int) -> None:
    """Copy what this rank's cache has at some slots to the same slots of the other ranks' caches.

    Args:
        parts: This rank's cache, from ``slot_parts``.
        slots: ``[n]`` int64, block times ``block_size`` and token; -1 is left alone.
        bases: ``[P]`` int64, the address of the first byte of each rank's cache, multiples of 16.
        rank: This rank, of P.
    """
    num_halves, block_size, num_heads, head_bytes = parts.shape[1:]
    words = min(MAX_WORDS, triton.next_power_of_2(head_bytes // 4))
    tokens = WORDS_PER_PROGRAM // words
    grid = (triton.cdiv(slots.shape[0], tokens), num_halves * num_heads)
    launch: Any = _copy_slots_kernel[grid]
    launch(
        slots,
        bases,
        slots.shape[0],
        rank,
        num_heads,
        *(stride // 4 for stride in parts.stride()[:4]),
        BLOCK_SIZE=block_size,
        NUM_WORDS=head_bytes // 4,
        NUM_RANKS=bases.shape[0],
        TOKENS=tokens,
        WORDS=words,
        num_warps=8,
    )


@triton.jit
def _meet_kernel(
    pads_ptr: tl.tensor,  # [NUM_RANKS] int64: of each rank, [NUM_RANKS + 1] int32
    rank: tl.tensor,
    NUM_RANKS: tl.constexpr,
) -> None:
    own = tl.load(pads_ptr + rank).to(tl.pointer_type(tl.int32))
    count = tl.load(own + NUM_RANKS) + 1
    tl.store(own + NUM_RANKS, count)
    for peer in tl.static_range(NUM_RANKS):
        pad = tl.load(pads_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(pad + rank, count, sem="release", scope="sys")
    for peer in tl.static_range(NUM_RANKS):
        # A difference: counts wrap around after some days.
        while tl.atomic_add(own + peer, 0, sem="acquire", scope="sys") - count < 0:
            pass


def meet(pads: torch.Tensor, rank: int) -> None:
    """Wait on the device for all ranks; what they wrote before is there, for later kernels.

    Args:
        pads: ``[P]`` int64, the address of each rank's ``[P + 1]`` int32, zeros at first.
        rank: This rank, of P.

    Collectives: a meeting of all ranks of the table.
    """
    launch: Any = _meet_kernel[(1,)]
    launch(pads, rank, NUM_RANKS=pads.shape[0], num_warps=1)
