# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN's last layer attends for sampled rows as for all of them, and leaves the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.v1.attention.backends.pcp.dcp_ranks import Setting, make_config
from vllm.config import set_current_vllm_config
from vllm.distributed.pcp.step import REPLICATED, StepState, set_step_state
from vllm.v1.attention.backends import flash_attn as stock
from vllm.v1.attention.backends.pcp.flash_attn import PCPFlashAttentionImpl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEAD_SIZE = 64
SETTING = Setting(1, head_size=HEAD_SIZE, device=DEVICE)
NUM_BLOCKS = 32
# Of each row; behind the last there is padding.
ROW_LENS, SEQ_LENS, NUM_PADDING = (5, 1, 9, 3), (30, 17, 9, 200), 2
LEFT = 77.0


@pytest.fixture(autouse=True)
def _step() -> Iterator[None]:
    yield
    set_step_state(REPLICATED)


@pytest.fixture(params=[2, 3])
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PCPFlashAttentionImpl:
    """Return an implementation; on CPUs over twins of the kernels."""
    if DEVICE == "cpu":
        twins = pytest.importorskip("vllm_cpu_trial.flash_attention", reason="no twins of kernels")
        for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):
            monkeypatch.setattr(stock, name, getattr(twins, name), raising=False)
        monkeypatch.setattr(stock, "get_flash_attn_version", twins.flash_attn_version)
    else:
        from vllm.vllm_flash_attn import fa_version_unsupported_reason

        if unsupported := fa_version_unsupported_reason(request.param):
            pytest.skip(f"FlashAttention {request.param}: {unsupported}")
    setting = dataclasses.replace(SETTING, fa_version=request.param)
    heads = (setting.num_heads, HEAD_SIZE, HEAD_SIZE**-0.5, setting.num_kv_heads)
    with set_current_vllm_config(make_config(setting)):
        impl = PCPFlashAttentionImpl(*heads, None, None, "auto")
    assert impl.vllm_flash_attn_version == request.param
    return impl


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def attend(impl: PCPFlashAttentionImpl, sampled: Any) -> torch.Tensor:
    """Return the output ``[L, H, head_size]`` of a step over a random cache."""
    torch.manual_seed(0)
    num_rows, num_tokens = len(ROW_LENS), sum(ROW_LENS)
    shape = (num_tokens + NUM_PADDING, SETTING.num_heads, HEAD_SIZE)
    query = torch.randn(shape).to(DEVICE, SETTING.dtype)
    key = torch.zeros(shape[0], SETTING.num_kv_heads, HEAD_SIZE).to(query)
    cache = torch.randn(NUM_BLOCKS, 2, SETTING.block_size, SETTING.num_kv_heads, HEAD_SIZE)
    block_table = torch.randperm(NUM_BLOCKS)[: num_rows * 4].view(num_rows, 4)
    # The longest row has more blocks than the others, some of them theirs.
    block_table = torch.cat([block_table, torch.randint(0, NUM_BLOCKS, (num_rows, 9))], dim=1)
    metadata = stock.FlashAttentionMetadata(
        num_actual_tokens=num_tokens,
        max_query_len=max(ROW_LENS),
        query_start_loc=offsets(ROW_LENS).to(DEVICE),
        max_seq_len=max(SEQ_LENS),
        seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32, device=DEVICE),
        block_table=block_table.to(DEVICE, torch.int32),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE),
        use_cascade=False,
        common_prefix_len=0,
        cu_prefix_query_lens=None,
        prefix_kv_lens=None,
        suffix_kv_lens=None,
    )
    layer = SimpleNamespace(
        _q_scale=None, _k_scale=torch.ones(1).to(DEVICE), _v_scale=torch.ones(1).to(DEVICE)
    )
    layer._q_scale = layer._k_scale
    set_step_state(StepState(is_partitioned=True, sampled=sampled))
    output = torch.full_like(query, LEFT)
    result = impl.forward(layer, query, key, key, cache.to(query), metadata, output)
    assert result is output
    return output


# Ends of rows, tokens ahead of them, and the first one over again, as ranks with fewer repeat it.
@pytest.mark.parametrize("tokens", [[17], [4, 5, 14, 17], [2, 12, 0, 0]])
def test_sampled_rows_are_those_of_the_whole(
    impl: PCPFlashAttentionImpl, tokens: list[int]
) -> None:
    whole = attend(impl, None)
    index = torch.tensor(tokens)
    starts = offsets(ROW_LENS)
    row = torch.searchsorted(starts, index, right=True) - 1
    num_behind = starts[row + 1] - 1 - index
    sampled = SimpleNamespace(
        send_idx=index.to(DEVICE, torch.int32),
        rows=lambda: (row.to(DEVICE, torch.int32), num_behind.to(DEVICE, torch.int32)),
        is_partial=False,
    )
    assert torch.equal(attend(impl, sampled), whole), "another layer's rows are all read"
    assert not sampled.is_partial
    impl.attends_sampled_rows = True
    assert torch.equal(attend(impl, None), whole), "so are all of another step"
    partial = attend(impl, sampled)
    assert sampled.is_partial
    tolerance = 1e-5 if DEVICE == "cpu" else 2e-2
    torch.testing.assert_close(partial[index], whole[index], atol=tolerance, rtol=tolerance)
    others = torch.ones(partial.shape[0], dtype=torch.bool)
    others[index] = False
    assert (partial[others] == LEFT).all()


def test_the_last_layer_of_a_run_without_requests_is_known(impl: PCPFlashAttentionImpl) -> None:
    output = torch.zeros(3, SETTING.num_heads, HEAD_SIZE)
    any_layer: Any = None
    impl.forward(any_layer, output, output, output, output, None, output)
    assert PCPFlashAttentionImpl.ran_last is impl
