# SPDX-License-Identifier: Apache-2.0
"""Attention to parts of the keys, weighed and added, is attention to all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm.v1.attention.backends.pcp.partial_results import weigh

HAS_GPU = torch.cuda.is_available()
NUM_TOKENS, NUM_HEADS, HEAD_SIZE = 5, 3, 24

pytestmark: list[pytest.MarkDecorator] = [pytest.mark.gpu] if HAS_GPU else []


def parts(num_ranks: int, *, is_base_e: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs and lse of each rank's keys, and the output of all keys; some have none."""
    generator = torch.Generator().manual_seed(num_ranks)
    num_keys = 4 * num_ranks
    shape = (NUM_TOKENS, NUM_HEADS)
    scores = 10 * torch.randn(*shape, num_keys, generator=generator)
    values = torch.randn(*shape, num_keys, HEAD_SIZE, generator=generator)
    # Token 0 sees no key at all, token 1 only those of rank 0, token 2 only those of the last one.
    scores[0] = scores[1, :, 4:] = scores[2, :, :-4] = -torch.inf
    lses = scores.view(*shape, num_ranks, 4).logsumexp(dim=-1).movedim(-1, 0)
    weights = scores.view(*shape, num_ranks, 4).softmax(dim=-1)
    outputs = (weights[..., None] * values.view(*shape, num_ranks, 4, -1)).sum(dim=-2)
    expected = (scores.softmax(dim=-1)[..., None] * values).sum(dim=-2)
    expected[0] = 0.0
    lses = lses if is_base_e else lses / math.log(2)
    # As kernels say it that have seen nothing.
    lses[0, 2], lses[-1, 1] = torch.nan, torch.inf
    return outputs.movedim(-2, 0).contiguous(), lses.contiguous(), expected


@pytest.mark.parametrize("is_base_e", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6])
def test_weighed_results_add_up(num_ranks: int, is_base_e: bool) -> None:
    device = "cuda" if HAS_GPU else "cpu"
    outputs, lses, expected = (
        tensor.to(device) for tensor in parts(num_ranks, is_base_e=is_base_e)
    )
    total = torch.zeros_like(expected)
    for out, lse in zip(outputs, lses, strict=True):
        total += weigh(out, lse.clone(), lses, is_base_e=is_base_e)
    assert (total - expected).abs().max() < 1e-5


def weigh_by_kernel(num_ranks: int, is_base_e: bool) -> torch.Tensor:
    """Return what ranks get from the kernel, interpreted or not."""
    from vllm.triton_utils import triton
    from vllm.v1.attention.backends.pcp import partial_results

    kernel: Any = partial_results._weigh_kernel
    outputs, lses, _ = parts(num_ranks, is_base_e=is_base_e)
    scale = math.log2(math.e) if is_base_e else 1.0
    for out, lse in zip(outputs, lses, strict=True):
        kernel[(lse.numel(),)](
            out,
            lse.clone(),
            lses,
            lse.numel(),
            scale,
            num_ranks,
            HEAD_SIZE,
            triton.next_power_of_2(num_ranks),
            triton.next_power_of_2(HEAD_SIZE),
        )
    return outputs


@pytest.mark.skipif(HAS_GPU, reason="weigh is the kernel there")
@pytest.mark.parametrize("is_base_e", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_kernel_does_what_its_twin_does(
    request: pytest.FixtureRequest, num_ranks: int, is_base_e: bool
) -> None:
    call: Callable[..., Any] = request.getfixturevalue("interpreter")
    outputs, lses, _ = parts(num_ranks, is_base_e=is_base_e)
    for out, lse in zip(outputs, lses, strict=True):
        weigh(out, lse.clone(), lses, is_base_e=is_base_e)
    ours = call(weigh_by_kernel, num_ranks, is_base_e)
    assert torch.isfinite(ours).all()
    assert (ours - outputs).abs().max() < 1e-5
