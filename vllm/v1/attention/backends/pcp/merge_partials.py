# SPDX-License-Identifier: Apache-2.0
"""Merges attention to parts of the keys into attention to all of them, by the log-sum-exp."""

from __future__ import annotations

from typing import Any

import torch

from vllm.triton_utils import tl, triton


@triton.jit(
    do_not_specialize=["num_partial_tokens", "output_lse_stride_head"],
    do_not_specialize_on_alignment=["output_lse_ptr"],
)
def _merge_partials_kernel(
    output_ptr: tl.tensor,  # [T, H, HEAD_SIZE]
    output_lse_ptr: tl.tensor,  # [H, T] float32, not read without HAS_OWN
    partial_ptr: tl.tensor,  # [NUM_PARTIALS, num_partial_tokens, H, HEAD_SIZE]
    partial_lse_ptr: tl.tensor,  # [NUM_PARTIALS, H, num_partial_tokens] float32
    output_stride_token: tl.tensor,
    output_stride_head: tl.tensor,
    output_lse_stride_head: tl.tensor,
    num_partial_tokens: tl.tensor,
    num_heads: tl.tensor,
    HAS_OWN: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    element = tl.arange(0, HEAD_BLOCK)
    is_element = element < HEAD_SIZE
    output_ptrs = output_ptr + token * output_stride_token + head * output_stride_head + element

    # FlashAttention 2 says of no keys at all that their log-sum-exp is plus infinity.
    own_lse = float("-inf")
    if HAS_OWN:
        own_lse = tl.load(output_lse_ptr + head * output_lse_stride_head + token)
        own_lse = tl.where(own_lse == float("inf"), float("-inf"), own_lse)
    highest = own_lse
    for i in tl.static_range(NUM_PARTIALS):
        lse = tl.load(partial_lse_ptr + (i * num_heads + head) * num_partial_tokens + token)
        highest = tl.maximum(highest, tl.where(lse == float("inf"), float("-inf"), lse))
    highest = tl.where(highest == float("-inf"), 0.0, highest)

    total = 0.0
    merged = tl.zeros([HEAD_BLOCK], dtype=tl.float32)
    if HAS_OWN:
        weight = tl.exp(own_lse - highest)
        own = tl.load(output_ptrs, mask=is_element, other=0.0).to(tl.float32)
        merged += tl.where(weight == 0.0, 0.0, weight * own)
        total += weight
    for i in tl.static_range(NUM_PARTIALS):
        lse = tl.load(partial_lse_ptr + (i * num_heads + head) * num_partial_tokens + token)
        weight = tl.exp(tl.where(lse == float("inf"), float("-inf"), lse) - highest)
        row = (i * num_partial_tokens + token) * num_heads + head
        partial = tl.load(partial_ptr + row * HEAD_SIZE + element, mask=is_element, other=0.0)
        merged += tl.where(weight == 0.0, 0.0, weight * partial.to(tl.float32))
        total += weight
    merged = tl.where(total == 0.0, 0.0, merged / total)
    tl.store(output_ptrs, merged.to(output_ptr.dtype.element_ty), mask=is_element)


def merge_partials(
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
    partials: torch.Tensor,
    partial_lses: torch.Tensor,
) -> None:
    """Merge partial results into ``output``, in float32 and always in the same order.

    A part without keys, whose log-sum-exp is infinite, has no say; without any keys the result is
    0.

    Args:
        output: ``[T, H, head_size]``, last axis contiguous; on entry a partial result itself if
            ``output_lse`` is given.
        output_lse: ``[H, T]`` float32, last axis contiguous, of what ``output`` holds, or None.
        partials: ``[N, M, H, head_size]``, contiguous, M >= T: the first T are read.
        partial_lses: ``[N, H, M]`` float32, contiguous, natural logarithms.
    """
    num_partials, num_partial_tokens, num_heads, head_size = partials.shape
    num_tokens = output.shape[0]
    assert num_tokens <= num_partial_tokens, f"{num_tokens} > {num_partial_tokens}"
    assert output.shape[1:] == (num_heads, head_size), f"{output.shape} and {partials.shape}"
    assert partial_lses.shape == (num_partials, num_heads, num_partial_tokens)
    assert partials.is_contiguous()
    assert partial_lses.is_contiguous()
    assert output.stride(2) == 1
    if output.is_cuda:
        _launch_kernel(output, output_lse, partials, partial_lses)
    else:
        _merge_torch(output, output_lse, partials, partial_lses)


def _launch_kernel(
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
    partials: torch.Tensor,
    partial_lses: torch.Tensor,
) -> None:
    num_partials, num_partial_tokens, num_heads, head_size = partials.shape
    lse = partial_lses[0] if output_lse is None else output_lse
    assert lse.stride(1) == 1
    launch: Any = _merge_partials_kernel[(output.shape[0], num_heads)]
    launch(
        output,
        lse,
        partials,
        partial_lses,
        output.stride(0),
        output.stride(1),
        lse.stride(0),
        num_partial_tokens,
        num_heads,
        HAS_OWN=output_lse is not None,
        NUM_PARTIALS=num_partials,
        HEAD_SIZE=head_size,
        HEAD_BLOCK=triton.next_power_of_2(head_size),
    )


def _merge_torch(
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
    partials: torch.Tensor,
    partial_lses: torch.Tensor,
) -> None:
    num_tokens = output.shape[0]
    parts, lses = [*partials[:, :num_tokens]], [*partial_lses[..., :num_tokens]]
    if output_lse is not None:
        parts, lses = [output, *parts], [output_lse, *lses]
    lse = torch.stack(lses)
    lse = lse.masked_fill(lse == torch.inf, -torch.inf).transpose(1, 2)[..., None]
    weights = (lse - lse.amax(dim=0).nan_to_num(neginf=0.0)).exp()
    total = weights.sum(dim=0)
    # A part that no key went into may be anything.
    merged = torch.where(weights > 0, weights * torch.stack(parts), 0.0).sum(dim=0)
    output.copy_(torch.where(total > 0, merged / total, 0.0))
