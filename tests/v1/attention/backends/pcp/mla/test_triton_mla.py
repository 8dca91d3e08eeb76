# SPDX-License-Identifier: Apache-2.0
"""What ranks weigh their decodes by is no less exact for a model in 16 bits.

On a GPU the kernel is vLLM's; on CPUs that of the CPU trial, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import Interpreter

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
LATENT, ROPE, NUM_HEADS = 512, 64, 16
BLOCK_SIZE, NUM_KEYS = 16, (1, 40, 0, 300)
SCALE = 0.3

pytestmark: list[pytest.MarkDecorator] = [pytest.mark.gpu] if HAS_GPU else []


def make_impl() -> Any:
    """Return an implementation without its engine: what it was given stands in attributes."""
    from vllm.v1.attention.backends.pcp.mla.triton_mla import PCPTritonMLAImpl

    class Impl(PCPTritonMLAImpl):
        def __init__(self) -> None:
            self.num_shards, self.num_head_shards = 2, 1
            self.num_heads, self.kv_lora_rank, self.scale = NUM_HEADS, LATENT, SCALE
            self._sm_count = 4

    return Impl()


def decoded() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a rank's result and log-sum-exp, and what both should be."""
    from vllm.v1.attention.backends.pcp.mla import shared_decode
    from vllm.v1.worker import workspace

    generator = torch.Generator().manual_seed(0)
    num_blocks = -(-max(NUM_KEYS) // BLOCK_SIZE)
    shape = (len(NUM_KEYS) * num_blocks, BLOCK_SIZE, LATENT + ROPE)
    cache = torch.randn(shape, generator=generator).bfloat16()
    q = torch.randn(len(NUM_KEYS), NUM_HEADS, LATENT + ROPE, generator=generator).bfloat16()
    table = torch.arange(shape[0], dtype=torch.int32).view(len(NUM_KEYS), num_blocks)
    decode = SimpleNamespace(
        block_table=table.to(DEVICE), seq_lens=torch.tensor(NUM_KEYS, dtype=torch.int32).to(DEVICE)
    )
    metadata = SimpleNamespace(decode=decode, max_seq_len=2048)
    layer = SimpleNamespace(_k_scale=torch.ones((), device=DEVICE))
    lses = []

    def gather_lse(lse: torch.Tensor) -> torch.Tensor:
        lses.append(lse)
        return lse[None]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(shared_decode, "gather_lse", gather_lse)
        monkeypatch.setattr(shared_decode, "sum_over_shards", lambda partial: partial)
        monkeypatch.setattr(workspace, "_manager", None)
        workspace.init_workspace_manager(DEVICE)
        parts = q.to(DEVICE).split([LATENT, ROPE], dim=-1)
        out, _ = make_impl().forward_mqa(parts, cache.to(DEVICE), metadata, layer)

    keys = cache.view(len(NUM_KEYS), -1, LATENT + ROPE).double()
    scores = torch.einsum("bhd,bkd->bhk", q.double(), keys) * SCALE
    is_kept = torch.arange(scores.shape[2]) < torch.tensor(NUM_KEYS)[:, None, None]
    scores = scores.masked_fill(~is_kept, -torch.inf)
    expected = torch.einsum("bhk,bkd->bhd", scores.softmax(dim=-1), keys[..., :LATENT])
    return out.cpu(), lses[0].cpu(), expected.nan_to_num(), scores.logsumexp(dim=-1)


def test_results_and_their_weights(request: pytest.FixtureRequest) -> None:
    call: Callable[..., Any] = lambda function: function()
    if not HAS_GPU:
        run: Interpreter = request.getfixturevalue("interpreter")
        call = run
    out, lse, expected, expected_lse = call(decoded)
    has_keys = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), has_keys)
    # In bfloat16 the largest would be off by up to 0.1.
    assert expected_lse[has_keys].max() > 20
    assert (lse - expected_lse)[has_keys].abs().max() < 0.01
    assert (out - expected).abs().max() < 0.03
