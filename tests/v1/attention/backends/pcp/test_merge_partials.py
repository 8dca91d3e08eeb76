# SPDX-License-Identifier: Apache-2.0
"""What merges partial attention, a kernel and its twin in torch, against a plain softmax.

On CPUs the kernel is interpreted, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# Results of the same token that the parts are from; the last two are a rank's padding.
NUM_TOKENS, NUM_PARTIAL_TOKENS, NUM_HEADS = 5, 7, 3

pytestmark: list[pytest.MarkDecorator] = [pytest.mark.gpu] if HAS_GPU else []


def merged(
    num_partials: int, head_size: int, dtype: torch.dtype, has_own: bool
) -> list[torch.Tensor]:
    """Return what the kernel, its twin and the oracle make of the same parts."""
    from tests.v1.attention.backends.pcp import dense_attention
    from vllm.v1.attention.backends.pcp import merge_partials

    generator = torch.Generator().manual_seed(num_partials)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    # Parts of very different weight, and heads without keys in one part, in all parts.
    lses = 30 * random(num_partials, NUM_HEADS, NUM_PARTIAL_TOKENS)
    lses[0, 0] = torch.inf
    lses[:, 1, 2] = -torch.inf
    lses[:, 2, 3] = torch.inf
    partials = random(num_partials, NUM_PARTIAL_TOKENS, NUM_HEADS, head_size)
    partials[0, :, 0] = torch.nan
    own_lse = 30 * random(NUM_HEADS, NUM_TOKENS + 4)[:, 2 : 2 + NUM_TOKENS]
    own_lse[1, 4] = -torch.inf
    output = random(NUM_TOKENS, NUM_HEADS, 2 * head_size)[..., :head_size]
    if not has_own:
        output[:] = torch.nan

    results = []
    cpu = torch.device("cpu")
    for merge, device in (
        (merge_partials._launch_kernel, DEVICE),
        (merge_partials.merge_partials, cpu),
        (dense_attention.merge, cpu),
    ):
        # A tensor of its own: of the same type and device, to() gives all of them one.
        result = output.to(device, dtype, copy=True)
        lse = own_lse.to(device) if has_own else None
        merge(result, lse, partials.to(dtype).to(device), lses.to(device))
        results.append(result.cpu())
    return results


@pytest.mark.parametrize("has_own", [True, False])
@pytest.mark.parametrize(
    ("num_partials", "head_size", "dtype"),
    [
        (2, 64, torch.float32),
        (3, 96, torch.bfloat16),
        (4, 128, torch.float16),
        (8, 80, torch.float32),
    ],
)
def test_kernel_and_twin_weigh_by_the_softmax(
    call: Callable[..., Any], num_partials: int, head_size: int, dtype: torch.dtype, has_own: bool
) -> None:
    *results, expected = call(merged, num_partials, head_size, dtype, has_own)
    for result in results:
        assert not result.isnan().any()
        torch.testing.assert_close(result, expected)
        if not has_own:
            assert not result[2, 1].any(), "no keys at all must give 0"
