# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA on CPUs: its pieces against loops over tokens, models against transformers."""

from __future__ import annotations

import math
import multiprocessing
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import pytest
import torch
from transformers import DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm_moe_dsa

from tests.conftest import Checkpoints, Interpreter
from tests.e2e.processes import ENV
from tests.packaging.test_cpu_trial_mla import (
    FP8_VALUES,
    HEADS,
    attention_of_one_query,
    fp8_value,
    random,
)
from tests.packaging.test_cpu_trial_model import MAX_NUM_BATCHED_TOKENS, Answer, generate

LARGEST = 448.0
HEAD_DIM = 8
BLOCK_SIZE, NUM_BLOCKS = 4, 9
TOPK = 5
FP8 = torch.float8_e4m3fn

Bytes: TypeAlias = torch.Tensor


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other to get a core take longer than one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def random_bytes(*shape: int) -> Bytes:
    """Return float8 values, positive and negative ones."""
    numbers = torch.randint(2 * 127, shape, generator=torch.Generator().manual_seed(0))
    # 127 and 255 would be no numbers.
    return (numbers + numbers // 127).byte()


def assert_is_nearest(byte: int, value: float) -> None:
    error = abs(fp8_value(byte) - value)
    assert error <= float((FP8_VALUES - value).abs().min()) + 1e-4


# Quantisation, and the indexer's cache


def quantised(rows: torch.Tensor, group_size: int) -> tuple[Bytes, torch.Tensor, str]:
    """Quantise as the models do."""
    deepseek_v2: Any = import_module("vllm.model_executor.models.deepseek_v2")
    function = deepseek_v2.per_token_group_quant_fp8
    values, scales = function(rows, group_size, column_major_scales=False, use_ue8m0=True)
    return values.view(torch.uint8), scales, function.__module__


def write_keys(cache: Bytes, keys: torch.Tensor, slots: torch.Tensor) -> Bytes:
    from vllm import _custom_ops as ops

    ops.indexer_k_quant_and_cache(keys, cache, slots, keys.shape[1], "ue8m0")
    return cache


def read_keys(
    cache: Bytes, num_rows: int, block_table: torch.Tensor, cu_seq_lens: torch.Tensor
) -> tuple[Bytes, Bytes]:
    """Read keys into ``num_rows`` rows of sevens."""
    from vllm import _custom_ops as ops

    keys = torch.full((num_rows, HEAD_DIM), 7, dtype=torch.uint8)
    scales = torch.full((num_rows, 4), 7, dtype=torch.uint8)
    ops.cp_gather_indexer_k_quant_cache(cache, keys.view(FP8), scales, block_table, cu_seq_lens)
    return keys, scales


def assert_is_quantised(values: Sequence[int], scale: float, row: torch.Tensor) -> None:
    """Check that the scale is the smallest power of two that lets the values in."""
    assert math.frexp(scale)[0] == 0.5
    largest = float(row.abs().max())
    assert largest / scale <= LARGEST
    assert largest / (scale / 2) > LARGEST or largest < 0.1
    for byte, element in zip(values, row.tolist(), strict=True):
        assert_is_nearest(byte, element / scale)


def rows_to_quantise() -> torch.Tensor:
    rows = random(8, HEAD_DIM)
    rows[1] *= 1e6
    # Right at the edge of a scale, and beyond.
    rows[2, 3], rows[3, 3], rows[4, 3] = 448.0, 448.0001, -447.9999
    rows[5] *= 1e-3
    rows[6] = 0.0
    return rows


def test_models_quantise_to_the_nearest_values(interpreter: Interpreter) -> None:
    rows = rows_to_quantise()
    values, scales, module = interpreter(quantised, rows.view(4, 2 * HEAD_DIM), HEAD_DIM)
    assert module == "vllm_cpu_trial.indexer"
    assert scales.shape == (4, 2)
    for value, scale, row in zip(values.view(-1, HEAD_DIM), scales.flatten(), rows, strict=True):
        assert_is_quantised(value.tolist(), float(scale), row)


def module_that_quantises() -> str:
    """Return it for a process that has imported its worker by the time it loads plugins."""
    import vllm_cpu_trial

    import vllm.v1.worker.cpu_worker  # noqa: F401

    vllm_cpu_trial.register()
    deepseek_v2: Any = import_module("vllm.model_executor.models.deepseek_v2")
    module: str = deepseek_v2.per_token_group_quant_fp8.__module__
    return module


def test_models_that_are_there_before_plugins_quantise_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(module_that_quantises).result() == "vllm_cpu_trial.indexer"


def test_keys_are_written_to_their_slots_and_nowhere_else(interpreter: Interpreter) -> None:
    keys = rows_to_quantise()
    # One row more than slots: padding.
    slots = torch.tensor([17, -1, 3, 0, 34, 2])
    before = random_bytes(NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM + 4)
    after = interpreter(write_keys, before.clone(), keys, slots)
    for slot in range(NUM_BLOCKS * BLOCK_SIZE):
        block, place = divmod(slot, BLOCK_SIZE)
        # All values of a block come before all of its scales.
        value_bytes = slice(place * HEAD_DIM, (place + 1) * HEAD_DIM)
        scale_bytes = slice(
            BLOCK_SIZE * HEAD_DIM + place * 4, BLOCK_SIZE * HEAD_DIM + place * 4 + 4
        )
        values, scale = (after[block].flatten()[part] for part in (value_bytes, scale_bytes))
        if slot in slots:
            (number,) = struct.unpack("<f", bytes(scale.tolist()))
            assert_is_quantised(values.tolist(), number, keys[slots.tolist().index(slot)])
        else:
            assert torch.equal(values, before[block].flatten()[value_bytes])
            assert torch.equal(scale, before[block].flatten()[scale_bytes])


def test_keys_are_read_one_sequence_behind_the_other(interpreter: Interpreter) -> None:
    cache = random_bytes(NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM + 4)
    block_table = torch.tensor([[8, 2, 5], [1, 0, 0], [7, 3, 6]], dtype=torch.int32)
    lengths = (7, 0, 3)
    cu_seq_lens = torch.tensor([0, 7, 7, 10], dtype=torch.int32)
    keys, scales = interpreter(read_keys, cache, 12, block_table, cu_seq_lens)
    places = [
        (int(block_table[seq, position // BLOCK_SIZE]), position % BLOCK_SIZE)
        for seq, length in enumerate(lengths)
        for position in range(length)
    ]
    for row, (block, place) in enumerate(places):
        values = cache[block].flatten()[: BLOCK_SIZE * HEAD_DIM].view(BLOCK_SIZE, HEAD_DIM)
        ends = cache[block].flatten()[BLOCK_SIZE * HEAD_DIM :].view(BLOCK_SIZE, 4)
        assert torch.equal(keys[row], values[place])
        assert torch.equal(scales[row], ends[place])
    assert (keys[10:] == 7).all()
    assert (scales[10:] == 7).all()


# Scores


def scores(
    q: Bytes,
    keys: Bytes,
    scales: torch.Tensor,
    weights: torch.Tensor,
    first: torch.Tensor,
    stop: torch.Tensor,
) -> torch.Tensor:
    """Score as a prefill does."""
    from vllm.utils.deep_gemm import fp8_fp4_mqa_logits

    kv = (keys.view(FP8), scales)
    return fp8_fp4_mqa_logits((q.view(FP8), None), kv, weights, first, stop, clean_logits=False)


def paged_scores(
    q: Bytes,
    cache: Bytes,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    max_model_len: int,
) -> torch.Tensor:
    """Score as decodes do."""
    from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits

    return fp8_fp4_paged_mqa_logits(
        (q.view(FP8), None),
        cache.unsqueeze(2),
        weights,
        lengths,
        block_table,
        torch.empty(0),
        max_model_len=max_model_len,
        clean_logits=False,
    )


def score(q: Bytes, weights: torch.Tensor, key: Bytes, scale: float) -> float:
    """Score a key for one query ``[num_heads, head_dim]``."""
    key_values = [fp8_value(byte) for byte in key.tolist()]
    total = 0.0
    for head, weight in zip(q.tolist(), weights.tolist(), strict=True):
        product = sum(fp8_value(a) * b for a, b in zip(head, key_values, strict=True))
        total += weight * max(0.0, product)
    return total * scale


def test_a_prefill_scores_the_keys_of_its_own_sequence(interpreter: Interpreter) -> None:
    # The second sequence has a chunk of three queries, the last a single one.
    first = torch.tensor([0, 0, 4, 4, 4, 11], dtype=torch.int32)
    stop = torch.tensor([3, 4, 9, 10, 11, 12], dtype=torch.int32)
    q, keys = random_bytes(6, HEADS, HEAD_DIM), random_bytes(12, HEAD_DIM).flip(0)
    scales, weights = 2.0 ** torch.arange(-6, 6), random(6, HEADS)
    logits = interpreter(scores, q, keys, scales, weights, first, stop)
    assert logits.shape == (6, 12)
    assert logits.dtype == torch.float32
    for query in range(6):
        for key in range(int(first[query]), int(stop[query])):
            expected = score(q[query], weights[query], keys[key], float(scales[key]))
            assert float(logits[query, key]) == pytest.approx(expected, rel=1e-6)


def test_scores_do_not_depend_on_the_batch(interpreter: Interpreter) -> None:
    """Choices have to be the same however prompts are cut, and ties at rounding are close."""
    lengths = (9, 3, 6)
    num_keys = sum(lengths)
    head_dim, num_heads = 128, 16
    keys = random(num_keys, head_dim)
    block_table = torch.tensor([[8, 2, 5], [1, 0, 0], [7, 3, 0]], dtype=torch.int32)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    slots = torch.tensor(
        [
            int(block_table[seq, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
            for seq, length in enumerate(lengths)
            for position in range(length)
        ]
    )
    cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, head_dim + 4, dtype=torch.uint8)
    cache = interpreter(write_keys, cache, keys, slots)
    q, weights = random_bytes(3, num_heads, head_dim), random(3, num_heads, seed=1)
    paged = interpreter(
        paged_scores, q[:, None], cache, weights, torch.tensor(lengths)[:, None], block_table, 12
    )
    parts = cache.flatten(1).split([BLOCK_SIZE * head_dim, BLOCK_SIZE * 4], dim=1)
    values = parts[0].reshape(-1, head_dim)[slots]
    scales = parts[1].reshape(-1, 4)[slots].view(torch.float32).flatten()
    first, stop = (torch.tensor(ends, dtype=torch.int32) for ends in (starts[:-1], starts[1:]))
    together = interpreter(scores, q, values, scales, weights, first, stop)
    for seq, length in enumerate(lengths):
        alone = interpreter(
            scores,
            q[seq : seq + 1],
            values[starts[seq] : starts[seq + 1]],
            scales[starts[seq] : starts[seq + 1]],
            weights[seq : seq + 1],
            torch.tensor([0]),
            torch.tensor([length]),
        )[0]
        assert torch.equal(together[seq, starts[seq] : starts[seq + 1]], alone)
        assert torch.equal(paged[seq, :length], alone)


def test_each_query_of_a_decode_has_its_own_length(interpreter: Interpreter) -> None:
    cache = random_bytes(NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM + 4)
    q, weights = random_bytes(2, 2, HEADS, HEAD_DIM), random(4, HEADS)
    block_table = torch.tensor([[8, 2, 5], [1, 4, 0]], dtype=torch.int32)
    lengths = torch.tensor([[8, 9], [1, 2]], dtype=torch.int32)
    logits = interpreter(paged_scores, q, cache, weights, lengths, block_table, 12)
    assert logits.shape == (4, 12)
    for query, length in enumerate(lengths.flatten().tolist()):
        for position in range(length):
            block = cache[int(block_table[query // 2, position // BLOCK_SIZE])].flatten()
            place = position % BLOCK_SIZE
            key = block[place * HEAD_DIM : (place + 1) * HEAD_DIM]
            end = BLOCK_SIZE * HEAD_DIM + place * 4
            (scale,) = struct.unpack("<f", bytes(block[end : end + 4].tolist()))
            expected = score(q.flatten(0, 1)[query], weights[query], key, scale)
            assert float(logits[query, position]) == pytest.approx(expected, rel=1e-6)


# Choices


def best_of_prefill(logits: torch.Tensor, first: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
    from vllm import _custom_ops as ops

    indices = torch.full((len(logits), TOPK), 7, dtype=torch.int32)
    strides = logits.stride()
    ops.top_k_per_row_prefill(
        logits, first, stop, indices, len(logits), strides[0], strides[1], TOPK
    )
    return indices


def best_of_decode(logits: torch.Tensor, lengths: torch.Tensor, next_n: int) -> torch.Tensor:
    from vllm import _custom_ops as ops

    indices = torch.full((len(logits), TOPK), 7, dtype=torch.int32)
    strides = logits.stride()
    ops.top_k_per_row_decode(
        logits, next_n, lengths, indices, len(logits), strides[0], strides[1], TOPK
    )
    return indices


def logits_with_ties(first: Sequence[int], stop: Sequence[int], num_keys: int) -> torch.Tensor:
    """Return small integers where a query sees a key, and no number elsewhere."""
    logits = random(len(stop), num_keys, scale=2.0).round()
    keys = torch.arange(num_keys)
    is_seen = (keys >= torch.tensor(first)[:, None]) & (keys < torch.tensor(stop)[:, None])
    return logits.masked_fill(~is_seen, math.nan)


def best(row: torch.Tensor, first: int, stop: int) -> list[int]:
    keys = sorted(range(first, stop), key=lambda key: (-float(row[key]), key))[:TOPK]
    return sorted(key - first for key in keys) + [-1] * (TOPK - len(keys))


def test_a_prefill_chooses_the_best_of_its_own_keys(interpreter: Interpreter) -> None:
    # None, fewer than chosen, as many, one more, many.
    first, stop = (0, 0, 3, 3, 3, 9), (0, 3, 8, 9, 23, 23)
    logits = logits_with_ties(first, stop, 23)
    chosen = interpreter(best_of_prefill, logits, torch.tensor(first), torch.tensor(stop))
    assert chosen.tolist() == [
        best(row, *ends) for row, *ends in zip(logits, first, stop, strict=True)
    ]


def test_more_may_be_chosen_than_there_are_keys(interpreter: Interpreter) -> None:
    logits = random(2, 3)
    chosen = interpreter(best_of_prefill, logits, torch.tensor([0, 1]), torch.tensor([3, 3]))
    assert chosen.tolist() == [[0, 1, 2, -1, -1], [0, 1, -1, -1, -1]]


@pytest.mark.parametrize(
    ("lengths", "next_n"),
    [([[4], [23], [6], [1]], 1), ([[22, 23], [5, 6]], 2), ([23, 6], 2)],
)
def test_a_decode_chooses_the_best_of_its_keys(
    interpreter: Interpreter, lengths: list[Any], next_n: int
) -> None:
    stop = [4, 23, 6, 1] if next_n == 1 else [22, 23, 5, 6]
    logits = logits_with_ties([0] * 4, stop, 23)
    chosen = interpreter(best_of_decode, logits, torch.tensor(lengths), next_n)
    assert chosen.tolist() == [
        best(row, 0, length) for row, length in zip(logits, stop, strict=True)
    ]


# Slots


def slots_of(
    req_id: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    workspace: tuple[torch.Tensor, torch.Tensor] | None,
) -> Any:
    """Look up slots as the FlashMLA backend does."""
    flashmla_sparse: Any = import_module("vllm.v1.attention.backends.mla.flashmla_sparse")
    return flashmla_sparse.triton_convert_req_index_to_global_index(
        req_id,
        block_table,
        positions,
        BLOCK_SIZE=BLOCK_SIZE,
        NUM_TOPK_TOKENS=positions.shape[1],
        HAS_PREFILL_WORKSPACE=workspace is not None,
        prefill_workspace_request_ids=workspace[0] if workspace else None,
        prefill_workspace_starts=workspace[1] if workspace else None,
        return_valid_counts=True,
    )


@pytest.mark.parametrize("has_workspace", [False, True])
def test_positions_become_slots(interpreter: Interpreter, has_workspace: bool) -> None:
    block_table = torch.tensor([[8, 2], [1, 4], [7, 3]], dtype=torch.int32)
    req_id = torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    positions = torch.tensor([[0, 5, -1], [7, 3, 4], [1, 6, 7], [-1, -1, -1]], dtype=torch.int32)
    workspace_req = torch.tensor([-1, -1, 0, 0], dtype=torch.int32)
    starts = torch.tensor([100], dtype=torch.int32)
    if has_workspace:
        # Where the block table ends is nothing to the workspace.
        positions[2, 1:] = torch.tensor([8, 4711])
    slots, counts = interpreter(
        slots_of,
        req_id,
        block_table,
        positions,
        workspace=(workspace_req, starts) if has_workspace else None,
    )
    last = [101, 108, 4811] if has_workspace else [29, 14, 15]
    assert slots.tolist() == [[32, 9, -1], [19, 7, 16], last, [-1, -1, -1]]
    assert slots.dtype == torch.int32
    assert counts.tolist() == [2, 3, 3, 0]


# Attention


def attend(q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *length: Any) -> torch.Tensor:
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl

    impl = SimpleNamespace(kv_lora_rank=cache.shape[-1] - 4, softmax_scale=0.3)
    return FlashMLASparseImpl._bf16_flash_mla_kernel(cast(Any, impl), q, cache, slots, *length)


@pytest.mark.parametrize("has_lengths", [False, True])
def test_a_query_attends_to_the_chosen_slots(interpreter: Interpreter, has_lengths: bool) -> None:
    cache = random(NUM_BLOCKS, BLOCK_SIZE, 16)
    q = random(4, HEADS, 16, seed=1)
    slots = torch.tensor([[35, 0, 7, 8], [3, 2, -1, -1], [-1] * 4, [5, -1, 6, -1]])
    lengths = torch.tensor([2, 2, 0, 3]) if has_lengths else None
    out = interpreter(attend, q, cache, slots, *(() if lengths is None else (lengths,)))
    assert out.shape == (4, HEADS, 12)
    for query in range(4):
        stop = 4 if lengths is None else int(lengths[query])
        used = [slot for slot in slots[query, :stop].tolist() if slot >= 0]
        keys = cache.flatten(0, 1)[used]
        for head in range(HEADS):
            expected, _ = attention_of_one_query(q[query, head], keys, keys[:, :12])
            torch.testing.assert_close(out[query, head], expected)


def attend_as_kernels(
    q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results and log-sum-exps as the kernel that the bytes are for."""
    flashmla_sparse: Any = import_module("vllm.v1.attention.backends.mla.flashmla_sparse")
    if cache.dtype != torch.uint8:
        out, _, lse = flashmla_sparse.flash_mla_sparse_fwd(
            q, cache.view(-1, 1, cache.shape[-1]), slots[:, None], 0.3, d_v=12
        )
        return out, lse
    out, lse = flashmla_sparse.flash_mla_with_kvcache(
        q=q[None],
        k_cache=cache[:, :, None],
        indices=slots[None],
        head_dim_v=512,
        softmax_scale=0.3,
        is_fp8_kvcache=True,
    )
    return out[0], lse[0].T


@pytest.mark.parametrize("is_quantized", [False, True])
def test_kernels_tell_the_log_sum_exp(interpreter: Interpreter, is_quantized: bool) -> None:
    keys = random(NUM_BLOCKS, BLOCK_SIZE, 576 if is_quantized else 16)
    cache = keys
    if is_quantized:
        latent, rotary = keys.flatten(0, 1).bfloat16().split([512, 64], dim=1)
        cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 656, dtype=torch.uint8)
        cache = interpreter(write_latents, cache, latent[1:], rotary[1:])
        keys = torch.tensor([latents_of(row) for row in cache.flatten(0, 1)]).bfloat16().float()
    q = random(3, HEADS, keys.shape[-1], seed=1) / 10
    slots = torch.tensor([[35, 9, 7, 8], [3, -1, 2, -1], [-1] * 4])
    out, lse = interpreter(attend_as_kernels, q, cache, slots)
    rows = keys.reshape(-1, keys.shape[-1])
    for query in range(3):
        seen = rows[[slot for slot in slots[query].tolist() if slot >= 0]]
        for head in range(HEADS):
            values = seen[:, : out.shape[-1]]
            expected, expected_lse = attention_of_one_query(q[query, head], seen, values)
            torch.testing.assert_close(out[query, head], expected)
            if len(seen) > 0:
                assert lse[query, head] == pytest.approx(float(expected_lse), abs=1e-4)
            else:
                assert lse[query, head] == float("inf")


# The quantised cache


def write_latents(cache: Bytes, kv_c: torch.Tensor, k_pe: torch.Tensor) -> Bytes:
    from vllm import _custom_ops as ops

    slots = torch.arange(len(kv_c)) + 1
    ops.concat_and_cache_mla(kv_c, k_pe, cache, slots, "fp8_ds_mla", torch.tensor(1.0))
    return cache


def read_latents(
    cache: Bytes, block_table: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    from vllm import _custom_ops as ops

    rows = torch.full((20, 576), 7.0, dtype=torch.bfloat16)
    ops.cp_gather_and_upconvert_fp8_kv_cache(
        cache, rows, block_table, lengths, starts, len(lengths)
    )
    return rows


def latents_of(row: Bytes) -> list[float]:
    """Return the latent and the rope key that 656 bytes stand for, before rounding."""
    scales = struct.unpack("<4f", bytes(row[512:528].tolist()))
    values = [fp8_value(byte) for byte in row[:512].tolist()]
    latent = [value * scales[place // 128] for place, value in enumerate(values)]
    # A bfloat16 number is the upper half of a float32 one.
    halves = [bytes(row[528 + 2 * place : 530 + 2 * place].tolist()) for place in range(64)]
    return latent + [struct.unpack("<f", b"\0\0" + half)[0] for half in halves]


def test_a_latent_has_four_scales_and_a_rope_key_none(interpreter: Interpreter) -> None:
    kv_c, k_pe = random(3, 512), random(3, 64, seed=1)
    kv_c[1, 128:256] *= 1e4
    kv_c[2, 256:384] = 0.0
    cache = interpreter(write_latents, random_bytes(2, BLOCK_SIZE, 656), kv_c, k_pe)
    for row, (latent, key) in enumerate(zip(kv_c, k_pe, strict=True)):
        cached = cache.flatten(0, 1)[row + 1]
        scales = struct.unpack("<4f", bytes(cached[512:528].tolist()))
        for tile in range(4):
            part = slice(128 * tile, 128 * (tile + 1))
            assert scales[tile] == pytest.approx(float(latent[part].abs().max()) / LARGEST)
            for byte, element in zip(cached[part].tolist(), latent[part].tolist(), strict=True):
                assert_is_nearest(byte, element / max(scales[tile], 1e-37))
        assert latents_of(cached)[512:] == key.bfloat16().tolist()


def test_quantised_latents_are_read_to_where_a_sequence_begins(interpreter: Interpreter) -> None:
    cache = random_bytes(NUM_BLOCKS, BLOCK_SIZE, 656)
    # Scales between 1 and 2, and rope keys near 1.
    cache[..., 512:528] = torch.tensor([0, 0, 0xA0, 0x3F] * 4, dtype=torch.uint8)
    cache[..., 529::2] = 0x3F
    block_table = torch.tensor([[8, 2], [7, 3]], dtype=torch.int32)
    lengths, starts = torch.tensor([3, 7]), torch.tensor([9, 1])
    rows = interpreter(read_latents, cache, block_table, lengths, starts)
    expected = torch.full((20, 576), 7.0)
    for seq in range(2):
        for position in range(int(lengths[seq])):
            block = int(block_table[seq, position // BLOCK_SIZE])
            latent = latents_of(cache[block, position % BLOCK_SIZE])
            expected[int(starts[seq]) + position] = torch.tensor(latent)
    assert torch.equal(rows, expected.bfloat16())


# The indexer's layer


def method_of_a_subclass() -> str:
    """Return which method of an indexer runs on a CPU."""
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

    class Ours(SparseAttnIndexer):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def forward_cuda(self, *args: Any) -> str:
            return f"forward_cuda{args}"

    ours: Any = Ours()
    return cast(str, ours.forward_cpu(1, 2, 3, 4))


def test_an_indexer_registered_over_the_stock_one_runs(interpreter: Interpreter) -> None:
    assert interpreter(method_of_a_subclass) == "forward_cuda(1, 2, 3, 4)"


# Models

INDEXER_BLOCK_SIZE = 64  # It knows no other.


class Reference:
    """A model of transformers that attends to the tokens that vLLM's indexers chose.

    Its own indexers then say how good the choice was. They do not choose themselves: rounding puts
    a value on the other side now and then, and all that follows would differ.
    """

    def __init__(self, checkpoint: Path, *, has_quantised_cache: bool) -> None:
        is_glm = "glm" in checkpoint.name
        model_class: Any = GlmMoeDsaForCausalLM if is_glm else DeepseekV32ForCausalLM
        self.model = model_class.from_pretrained(checkpoint)
        self.index_topk: int = self.model.config.index_topk
        self.tokens: list[int] = []
        self.choices: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        self.worst = -math.inf
        self.layers = set()
        for name, module in self.model.named_modules():
            if isinstance(module, deepseek_v32.DeepseekV32Indexer | glm_moe_dsa.GlmMoeDsaIndexer):
                self.layers.add(f"{name}.k_cache")
                module.forward = self._indexer(f"{name}.k_cache", module)
            elif name.endswith("self_attn") and has_quantised_cache:
                module.expand_kv = with_quantised_latents(module.expand_kv)

    def learn_choices(self, prompt: list[int], answer: Answer) -> None:
        """Note what was chosen, of everything that was computed."""
        tokens = [*prompt, *answer.tokens]
        # The last token is sampled, and not computed.
        computed = range(answer.num_cached_tokens, len(tokens) - 1)
        assert answer.choices.keys() == {
            (layer, position) for layer in self.layers for position in computed
        }
        for (layer, position), chosen in answer.choices.items():
            assert len(chosen) == min(self.index_topk, position + 1)
            assert set(chosen) <= set(range(position + 1))
            # They depend on these tokens alone, whatever was computed beside them, and when.
            prefix = tuple(tokens[: position + 1])
            assert self.choices.setdefault((layer, prefix), chosen) == chosen

    def check(self, prompt: list[int], answer: Answer, tolerance: float) -> None:
        """Check the logprobs of an answer, and that there is no likelier token."""
        self.tokens = [*prompt, *answer.tokens[:-1]]
        with torch.inference_mode():
            logits = self.model(torch.tensor([self.tokens])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 :]
        said = expected.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), said, atol=tolerance, rtol=0)
        torch.testing.assert_close(said, expected.max(-1).values, atol=2 * tolerance, rtol=0)

    def _indexer(self, layer: str, indexer: Any) -> Any:
        is_glm = isinstance(indexer, glm_moe_dsa.GlmMoeDsaIndexer)
        rotate: Any = (
            glm_moe_dsa.apply_rotary_pos_emb_interleave
            if is_glm
            else deepseek_v32.apply_rotary_pos_emb
        )

        def choose(x: torch.Tensor, q_latent: torch.Tensor, angles: Any, *_: Any, **__: Any) -> Any:
            q = indexer.wq_b(q_latent).unflatten(-1, (-1, indexer.head_dim))
            k = indexer.k_norm(indexer.wk(x)).unsqueeze(2)
            turned = rotate(q[..., :64], k[..., :64], *angles, unsqueeze_dim=2)
            q, k = (
                scaled_to_fp8(torch.cat((turning, whole[..., 64:]), dim=-1))
                for turning, whole in zip(turned, (q, k), strict=True)
            )
            scores = torch.einsum("bqhd,bkgd->bqhk", q, k).relu()
            scores = torch.einsum("bqhk,bqh->bqk", scores, indexer.weights_proj(x).double())
            rows = [
                self.choices[layer, tuple(self.tokens[: position + 1])]
                for position in range(len(self.tokens))
            ]
            for position, chosen in enumerate(rows):
                self._judge(scores[0, position, : position + 1], chosen)
            width = len(max(rows, key=len))
            return torch.tensor([[row + row[:1] * (width - len(row)) for row in rows]])

        return choose

    def _judge(self, scores: torch.Tensor, chosen: list[int]) -> None:
        """Note how much better a token that was left out is than one that was chosen."""
        is_chosen = torch.zeros(len(scores), dtype=torch.bool)
        is_chosen[chosen] = True
        if not is_chosen.all():
            difference = scores[~is_chosen].max() - scores[is_chosen].min()
            self.worst = max(self.worst, float(difference / scores.std()))


def scaled_to_fp8(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors as they are after a round trip through float8, in float64."""
    largest = vectors.abs().amax(dim=-1, keepdim=True).double()
    scale = 2.0 ** (largest / LARGEST).log2().ceil()
    return (vectors / scale).to(FP8).double() * scale


def with_quantised_latents(expand_kv: Any) -> Any:
    """Make a layer of transformers attend to latents as they are in an fp8_ds_mla cache."""

    def expand(latents: torch.Tensor, k_rot: torch.Tensor) -> Any:
        tiles = latents.unflatten(-1, (-1, 128))
        scale = tiles.abs().amax(dim=-1, keepdim=True) / LARGEST
        rounded = ((tiles / scale).to(FP8).float() * scale).flatten(-2)
        return expand_kv(rounded.bfloat16().float(), k_rot.bfloat16().float())

    return expand


def prompts_and_continuations() -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts, one of three chunks beside short ones, and others that begin like them."""
    lengths = (2 * MAX_NUM_BATCHED_TOKENS + 50, 3, 17, 1, INDEXER_BLOCK_SIZE, 2, 100, 65, 33)
    tokens = iter(Random(0).choices(range(94), k=1000))
    prompts = [[next(tokens) for _ in range(length)] for length in lengths]
    # One token, two and some more are left to compute.
    cached = [prompts[0][:n] + [next(tokens)] * m for n, m in ((256, 1), (128, 2), (64, 40))]
    return prompts, [*cached, prompts[6]]


def check_model(
    interpreter: Interpreter, checkpoint: Path, tolerance: float, **arguments: Any
) -> Reference:
    """Compare an engine and a reference; return the reference."""
    batches = prompts_and_continuations()
    answers = interpreter(generate, checkpoint, batches, INDEXER_BLOCK_SIZE, **arguments)
    assert [answer.num_cached_tokens for answer in answers[1]] == [256, 128, 64, 64]
    reference = Reference(checkpoint, has_quantised_cache="kv_cache_dtype" in arguments)
    pairs = [*zip(batches[0], answers[0], strict=True), *zip(batches[1], answers[1], strict=True)]
    for prompt, answer in pairs:
        reference.learn_choices(prompt, answer)
    for prompt, answer in pairs:
        reference.check(prompt, answer, tolerance)
    return reference


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_mla_chooses_the_best_and_says_what_transformers_says(
    interpreter: Interpreter, checkpoints: Checkpoints, name: str
) -> None:
    reference = check_model(interpreter, checkpoints(name), 1e-4)
    # Of the deviation of a query's scores. Without quantisation it would be 0.2 to 0.3; what a
    # single value does that is rounded to the other side is 0.002.
    assert -0.01 < reference.worst < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("kv_cache_dtype", "tolerance"), [("auto", 1e-4), ("fp8", 0.05)])
def test_where_all_tokens_are_chosen_it_says_what_transformers_says(
    interpreter: Interpreter, checkpoints: Checkpoints, kv_cache_dtype: str, tolerance: float
) -> None:
    """Without the rounding of a quantised cache it would be 1.8 off."""
    arguments = {} if kv_cache_dtype == "auto" else {"kv_cache_dtype": kv_cache_dtype}
    reference = check_model(interpreter, checkpoints("deepseek_v32_2048"), tolerance, **arguments)
    assert reference.worst == -math.inf
