# SPDX-License-Identifier: Apache-2.0
"""Puts the rotary key that heads share behind each head's own part."""

from __future__ import annotations

from typing import Any

import torch

from vllm.triton_utils import tl, triton


@triton.jit
def _concat_keys_kernel(
    keys_ptr: tl.tensor,  # [n, num_heads, NOPE + ROPE], contiguous
    nope_ptr: tl.tensor,  # [n, num_heads, NOPE]
    rope_ptr: tl.tensor,  # [n, ROPE]
    nope_stride_token: tl.tensor,
    nope_stride_head: tl.tensor,
    rope_stride_token: tl.tensor,
    num_heads: tl.tensor,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    is_head = head < num_heads
    nope = tl.arange(0, NOPE_BLOCK)[None, :]
    rope = tl.arange(0, ROPE_BLOCK)
    keys_ptrs = keys_ptr + (token * num_heads + head) * (NOPE + ROPE)
    nope_ptrs = nope_ptr + token * nope_stride_token + head * nope_stride_head + nope
    is_nope = is_head & (nope < NOPE)
    tl.store(keys_ptrs + nope, tl.load(nope_ptrs, mask=is_nope), mask=is_nope)
    own = tl.load(rope_ptr + token * rope_stride_token + rope, mask=rope < ROPE)
    shared = tl.broadcast_to(own[None, :], HEAD_BLOCK, ROPE_BLOCK)
    tl.store(keys_ptrs + NOPE + rope[None, :], shared, mask=is_head & (rope[None, :] < ROPE))


def concat_keys(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Return ``[n, num_heads, nope_size + rope_size]``, contiguous, in one pass.

    Args:
        nope: ``[n, num_heads, nope_size]``, last axis contiguous.
        rope: ``[n, rope_size]`` of the same dtype, last axis contiguous.
    """
    num_tokens, num_heads, nope_size = nope.shape
    rope_size = rope.shape[1]
    assert rope.shape[0] == num_tokens, f"{rope.shape} and {nope.shape}"
    assert rope.dtype == nope.dtype, f"{rope.dtype} and {nope.dtype}"
    assert nope.stride(2) == rope.stride(1) == 1
    keys = nope.new_empty(num_tokens, num_heads, nope_size + rope_size)
    head_block = min(16, triton.next_power_of_2(num_heads))
    launch: Any = _concat_keys_kernel[(num_tokens, triton.cdiv(num_heads, head_block))]
    launch(
        keys,
        nope,
        rope,
        nope.stride(0),
        nope.stride(1),
        rope.stride(0),
        num_heads,
        NOPE=nope_size,
        ROPE=rope_size,
        NOPE_BLOCK=triton.next_power_of_2(nope_size),
        ROPE_BLOCK=triton.next_power_of_2(rope_size),
        HEAD_BLOCK=head_block,
    )
    return keys
