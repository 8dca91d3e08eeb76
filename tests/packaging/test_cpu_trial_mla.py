# SPDX-License-Identifier: Apache-2.0
"""The pieces of dense MLA on CPUs, each against a loop over tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any, cast

import pytest
import torch

from tests.conftest import Interpreter

LATENT, ROPE = 12, 4
BLOCK_SIZE, NUM_BLOCKS = 4, 9
HEADS = 3
SCALE = 0.3
INF = float("inf")


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def attention_of_one_query(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Return what a query ``[head_dim]`` gets from keys ``[n, head_dim]``, and its lse."""
    weights = [math.exp(SCALE * float(q.double() @ key.double())) for key in k]
    total = sum(weights)
    out = torch.zeros(v.shape[-1], dtype=torch.float64)
    for weight, value in zip(weights, v, strict=True):
        out += weight / total * value.double()
    return out.float(), math.log(total) if total else -INF


# The cache


def write_cache(
    cache: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    dtype: str,
    scale: float,
) -> torch.Tensor:
    """Write rows whose parts lie in a wider tensor; return the cache."""
    from vllm import _custom_ops as ops

    wide = torch.cat((random(len(rows), 5), rows), dim=1)
    kv_c, k_pe = wide[:, 5 : 5 + LATENT], wide[:, 5 + LATENT :]
    assert not kv_c.is_contiguous()
    ops.concat_and_cache_mla(kv_c, k_pe, cache, slots, dtype, torch.tensor(scale))
    return cache


def read_cache(
    function: str,
    cache: torch.Tensor,
    num_rows: int,
    block_table: torch.Tensor,
    lengths: Sequence[int],
    *args: Any,
    starts: torch.Tensor | None,
    is_fp8: bool = False,
) -> torch.Tensor:
    """Read runs of tokens into ``num_rows`` rows of sevens."""
    from vllm import _custom_ops as ops

    dst = torch.full((num_rows, cache.shape[-1]), 7.0)
    cu_seq_lens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if is_fp8:
        cache = cache.view(torch.float8_e4m3fn)
    getattr(ops, function)(cache, dst, block_table, cu_seq_lens, *args, starts)
    return dst


def fp8_value(byte: int) -> float:
    """Return what a byte means as float8_e4m3fn: a sign, 4 bits of exponent, 3 of mantissa."""
    sign, exponent, mantissa = 1 - 2 * (byte >> 7), byte >> 3 & 15, byte & 7
    return sign * (
        2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    )


FP8_VALUES = torch.tensor([fp8_value(byte) for byte in range(256) if byte & 127 != 127])


def test_rows_are_written_to_their_slots_and_nowhere_else(interpreter: Interpreter) -> None:
    rows = random(6, LATENT + ROPE)
    # One row more than slots: padding.
    slots = torch.tensor([17, -1, 3, 0, 34])
    # Tensors are shared with the other process.
    before = random(NUM_BLOCKS, 2, BLOCK_SIZE, LATENT + ROPE, seed=1)[:, 1]
    after = interpreter(write_cache, before.clone(), rows, slots, "auto", 1.0)
    for slot in range(NUM_BLOCKS * BLOCK_SIZE):
        where = divmod(slot, BLOCK_SIZE)
        source = rows[slots.tolist().index(slot)] if slot in slots else before[where]
        assert torch.equal(after[where], source)


def test_a_quantised_cache_holds_the_nearest_values(interpreter: Interpreter) -> None:
    scale = 0.02
    rows = torch.cat((random(3, LATENT + ROPE), random(2, LATENT + ROPE, scale=50.0)))
    cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, LATENT + ROPE, dtype=torch.uint8)
    slots = torch.tensor([4, 9, -1, 30, 5])
    cache = interpreter(write_cache, cache, rows, slots, "fp8", scale)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot >= 0:
            for byte, element in zip(cache.flatten(0, 1)[slot].tolist(), row / scale, strict=True):
                error = abs(fp8_value(byte) - float(element))
                assert error <= float((FP8_VALUES - element).abs().min()) + 1e-4


@pytest.mark.parametrize("starts", [None, [4, 0, 8]])
@pytest.mark.parametrize("function", ["gather_and_maybe_dequant_cache", "cp_gather_cache"])
def test_runs_of_tokens_are_read_one_behind_the_other(
    interpreter: Interpreter, function: str, starts: list[int] | None
) -> None:
    cache = random(NUM_BLOCKS, 2, BLOCK_SIZE, LATENT + ROPE)[:, 1]
    block_table = torch.tensor([[8, 2, 5], [1, 0, 0], [7, 3, 6]], dtype=torch.int32)
    lengths = (7, 0, 3)
    num_tokens = sum(lengths)
    token_to_seq = torch.tensor([0] * 7 + [2] * 3 + [0], dtype=torch.int32)
    args = (
        # vLLM takes the number of tokens out of a tensor.
        (token_to_seq, torch.tensor(num_tokens), "auto", torch.tensor(1.0))
        if function == "gather_and_maybe_dequant_cache"
        else (len(lengths),)
    )
    read = interpreter(
        read_cache,
        function,
        cache,
        num_tokens + 2,
        block_table,
        lengths,
        *args,
        starts=None if starts is None else torch.tensor(starts, dtype=torch.int32),
    )
    expected = [
        cache[int(block_table[seq, position // BLOCK_SIZE]), position % BLOCK_SIZE]
        for seq, (start, length) in enumerate(zip(starts or (0, 0, 0), lengths, strict=True))
        for position in range(start, start + length)
    ]
    assert torch.equal(read[:num_tokens], torch.stack(expected))
    assert (read[num_tokens:] == 7).all()


def test_what_is_read_of_a_quantised_cache_is_scaled(interpreter: Interpreter) -> None:
    cache = torch.randint(0, 120, (NUM_BLOCKS, BLOCK_SIZE, LATENT + ROPE)).to(torch.uint8)
    read = interpreter(
        read_cache,
        "gather_and_maybe_dequant_cache",
        cache,
        2,
        torch.tensor([[6]]),
        [2],
        torch.zeros(2, dtype=torch.int32),
        2,
        "fp8_e4m3",
        torch.tensor(0.5),
        starts=None,
        is_fp8=True,
    )
    expected = [[0.5 * fp8_value(byte) for byte in row] for row in cache[6, :2].tolist()]
    assert read.tolist() == expected


# Attention


def decode(
    q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode as the Triton MLA backend does."""
    triton_mla: Any = import_module("vllm.v1.attention.backends.mla.triton_mla")
    num_reqs, num_heads, _ = q.shape
    out, lse = (
        torch.full((num_reqs, num_heads, LATENT), 7.0),
        torch.full((num_reqs, num_heads), 7.0),
    )
    one = torch.tensor(1.0)
    keys = cache.unsqueeze(2)
    triton_mla.decode_attention_fwd(
        q,
        keys,
        keys[..., :LATENT],
        out,
        lse,
        block_table,
        torch.tensor(lengths, dtype=torch.int32),
        torch.empty(num_reqs, num_heads, 1, LATENT + 1),
        1,
        SCALE,
        BLOCK_SIZE,
        k_scale=one,
        v_scale=one,
        is_mla=True,
    )
    return out, lse


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: Sequence[int],
    starts_k: Sequence[int],
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as a prefill does, from and to several sequences."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    backend: Any = MLAPrefillBackendEnum.FLASH_ATTN.get_class()(
        num_heads=HEADS,
        scale=SCALE,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=4,
        qk_rope_head_dim=ROPE,
        v_head_dim=5,
        vllm_config=cast(Any, None),
    )
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor(starts, dtype=torch.int32) for starts in (starts_q, starts_k)
    )
    lengths = [max(b - a for a, b in pairwise(starts)) for starts in (starts_q, starts_k)]
    call = (q, k, v, cu_seqlens_q, cu_seqlens_k, *lengths, causal)
    out, lse = backend.attend(*call, return_softmax_lse=True)
    assert torch.equal(backend.attend(*call, return_softmax_lse=False), out)
    return out, lse


def merge(
    prefix: tuple[torch.Tensor, torch.Tensor],
    suffix: tuple[torch.Tensor, torch.Tensor],
    num_tokens_with_context: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge as MLA's prefill does."""
    mla_attention: Any = import_module("vllm.model_executor.layers.attention.mla_attention")
    out, lse = torch.empty_like(prefix[0]), torch.empty_like(prefix[1])
    mla_attention.merge_attn_states(
        output=out,
        output_lse=lse,
        prefix_output=prefix[0],
        prefix_lse=prefix[1],
        suffix_output=suffix[0],
        suffix_lse=suffix[1],
        prefill_tokens_with_context=num_tokens_with_context,
    )
    return out, lse


def test_a_decode_attends_to_its_requests_tokens(interpreter: Interpreter) -> None:
    cache = random(NUM_BLOCKS, BLOCK_SIZE, LATENT + ROPE)
    block_table = torch.tensor([[8, 2, 5], [1, 0, 0], [7, 3, 6], [4, 0, 0]], dtype=torch.int32)
    lengths = (9, 0, 8, 1)
    q = random(len(lengths), HEADS, LATENT + ROPE, seed=1)
    out, lse = interpreter(decode, q, cache, block_table, lengths)
    for req, length in enumerate(lengths):
        blocks = block_table[req].long()
        keys = cache[blocks].flatten(0, 1)[:length]
        for head in range(HEADS):
            expected = attention_of_one_query(q[req, head], keys, keys[:, :LATENT])
            torch.testing.assert_close(out[req, head], expected[0])
            assert float(lse[req, head]) == pytest.approx(expected[1], abs=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_a_prefill_attends_to_its_sequences_tokens(interpreter: Interpreter, causal: bool) -> None:
    # Chunks, without keys, without queries, more queries than keys, more than one pass takes.
    num_queries = (5, 3, 0, 6, 270, 1)
    num_keys = (9, 0, 4, 2, 280, 1)
    starts_q = torch.tensor([0, *num_queries]).cumsum(0).tolist()
    starts_k = torch.tensor([0, *num_keys]).cumsum(0).tolist()
    q = random(starts_q[-1], HEADS, 8)
    k, v = random(starts_k[-1], HEADS, 13, seed=1).split([8, 5], dim=-1)
    out, lse = interpreter(attend, q, k, v, starts_q, starts_k, causal=causal)
    assert out.shape == (len(q), HEADS, 5)
    assert lse.dtype == torch.float32
    for start_q, stop_q, start_k, stop_k in zip(
        starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False
    ):
        # All of short sequences, some of the long one.
        for query in range(start_q, stop_q, 1 if stop_q - start_q < 10 else 51):
            stop = max(start_k, stop_k - (stop_q - 1 - query)) if causal else stop_k
            for head in range(HEADS):
                expected = attention_of_one_query(
                    q[query, head], k[start_k:stop, head], v[start_k:stop, head]
                )
                torch.testing.assert_close(out[query, head], expected[0])
                assert float(lse[head, query]) == pytest.approx(expected[1], abs=1e-5)


def test_a_merge_is_attention_to_all_of_the_keys(interpreter: Interpreter) -> None:
    # Queries with keys in both, in one, in none, and beyond those that have context.
    num_keys = ((3, 4), (0, 5), (2, 0), (0, 0), (3, 2))
    num_with_context = 4
    q = random(len(num_keys), HEADS, 8)
    parts = [(torch.zeros(len(q), HEADS, 5), torch.zeros(HEADS, len(q))) for _ in range(2)]
    expected_out, expected_lse = torch.zeros(len(q), HEADS, 5), torch.zeros(HEADS, len(q))
    for query, nums in enumerate(num_keys):
        k, v = random(sum(nums), HEADS, 13, seed=query).split([8, 5], dim=-1)
        used = slice(0 if query < num_with_context else nums[0], sum(nums))
        for head in range(HEADS):
            for (out, lse), keys in zip(
                (*parts, (expected_out, expected_lse)),
                (slice(nums[0]), slice(nums[0], None), used),
                strict=True,
            ):
                out[query, head], lse[head, query] = attention_of_one_query(
                    q[query, head], k[keys, head], v[keys, head]
                )
    prefix, suffix = parts
    # What some kernels leave behind where there is no key.
    prefix[1][:, 1], prefix[0][1] = INF, math.nan
    prefix[0][num_with_context], prefix[1][:, num_with_context] = math.nan, math.nan
    out, lse = interpreter(merge, prefix, suffix, num_with_context)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
