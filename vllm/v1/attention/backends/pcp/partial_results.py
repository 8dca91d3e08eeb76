# SPDX-License-Identifier: Apache-2.0
"""Attention to keys that ranks share: each rank's result, weighed by its share of the softmax.

Weighed results only have to be added. Any number of ranks will do; vLLM's own kernel for this wants
a power of two.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from vllm.triton_utils import tl, triton


def weigh(
    out: torch.Tensor, lse: torch.Tensor, lses: torch.Tensor, *, is_base_e: bool
) -> torch.Tensor:
    """Return ``out`` times its share of the softmax over all ranks' keys.

    A rank without keys for a token says so by an lse that is not finite; its part becomes 0,
    whatever is in it.

    Args:
        out: ``[num_tokens, num_heads, head_size]``, contiguous, overwritten.
        lse: ``[num_tokens, num_heads]`` float32, contiguous, this rank's log-sum-exp.
        lses: ``[num_ranks, num_tokens, num_heads]`` float32, contiguous, everybody's.
        is_base_e: Whether the logarithms are natural; otherwise they are of base 2.
    """
    scale = math.log2(math.e) if is_base_e else 1.0
    if not out.is_cuda:
        return _weigh_torch(out, lse, lses, scale)
    num_ranks, width = lses.shape[0], out.shape[2]
    kernel: Any = _weigh_kernel
    kernel[(lse.numel(),)](
        out,
        lse,
        lses,
        lse.numel(),
        scale,
        num_ranks,
        width,
        triton.next_power_of_2(num_ranks),
        triton.next_power_of_2(width),
    )
    return out


def _weigh_torch(
    out: torch.Tensor, lse: torch.Tensor, lses: torch.Tensor, scale: float
) -> torch.Tensor:
    lses = torch.where(lses.isfinite(), lses, -torch.inf)
    top = lses.amax(dim=0).nan_to_num(neginf=0.0)
    total = ((lses - top) * scale).exp2().sum(dim=0)
    share = torch.where(lse.isfinite(), ((lse - top) * scale).exp2() / total, 0.0)[..., None]
    return out.mul_(share).masked_fill_(share == 0, 0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _weigh_kernel(
    out_ptr: tl.tensor,  # [num_rows, WIDTH]
    lse_ptr: tl.tensor,  # [num_rows]
    lses_ptr: tl.tensor,  # [NUM_RANKS, num_rows]
    num_rows: tl.tensor,
    scale: tl.tensor,
    NUM_RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    nothing = -float("inf")
    rank = tl.arange(0, BLOCK_RANKS)
    lses = tl.load(lses_ptr + rank * num_rows + row, mask=rank < NUM_RANKS, other=nothing)
    # False for NaN as well.
    lses = tl.where(tl.abs(lses) < float("inf"), lses, nothing)
    top = tl.max(lses, axis=0)
    top = tl.where(top > nothing, top, 0.0)
    total = tl.sum(tl.exp2((lses - top) * scale), axis=0)
    lse = tl.load(lse_ptr + row)
    has_keys = tl.abs(lse) < float("inf")
    share = tl.where(has_keys, tl.exp2((lse - top) * scale) / total, 0.0)
    column = tl.arange(0, BLOCK_WIDTH)
    out = tl.load(out_ptr + row * WIDTH + column, mask=column < WIDTH)
    out = tl.where(share > 0, out * share, 0.0)
    tl.store(out_ptr + row * WIDTH + column, out, mask=column < WIDTH)
