# SPDX-License-Identifier: Apache-2.0
"""Every head's key is its own part and behind it the shared one, whatever the strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

pytestmark: list[pytest.MarkDecorator] = [pytest.mark.gpu] if HAS_GPU else []


def concatenated(
    num_tokens: int, num_heads: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys from the kernel, and from torch."""
    from vllm.v1.attention.backends.pcp.mla.concat_keys import concat_keys

    nope_size, rope_size, v_size = sizes
    # Beside V, and behind a latent, as they are in use.
    kv = torch.randn(num_tokens, num_heads, nope_size + v_size, device=DEVICE).to(dtype)
    latents = torch.randn(num_tokens, 32 + rope_size, device=DEVICE).to(dtype)
    nope, rope = kv[..., :nope_size], latents[:, 32:]
    expected = torch.cat([nope, rope[:, None].expand(-1, num_heads, -1)], dim=-1)
    return concat_keys(nope, rope).cpu(), expected.cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "sizes"),
    [(5, 16, (128, 64, 128)), (3, 20, (192, 64, 256)), (1, 1, (32, 16, 32)), (4, 3, (24, 8, 40))],
)
def test_keys_are_concatenated(
    call: Callable[..., Any],
    num_tokens: int,
    num_heads: int,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    keys, expected = call(concatenated, num_tokens, num_heads, sizes, dtype)
    assert torch.equal(keys, expected)
