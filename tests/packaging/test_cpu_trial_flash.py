# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN on CPUs: its functions against a loop over tokens, and what engines then say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.conftest import Checkpoints, Interpreter, interpreting_process
from tests.packaging.test_cpu_trial_mla import attention_of_one_query, random
from tests.packaging.test_cpu_trial_model import (
    BLOCK_SIZE,
    MAX_NUM_BATCHED_TOKENS,
    attention_backend,
    generate,
    require_answers_of_transformers,
)

twins = pytest.importorskip("vllm_cpu_trial.flash_attention", reason="no CPU trial")

SCALE = 0.3  # that of attention_of_one_query
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8
PAGE_SIZE, NUM_PAGES = 4, 25
# Chunks, without keys, without queries, as many as keys, a decode.
NUM_QUERIES = (5, 3, 0, 6, 1)
NUM_KEYS = (9, 0, 4, 6, 18)


def starts(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def pages() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cache, ``[2, NUM_PAGES, ...]``, NaN where nothing must be read, and its table."""
    cache = random(2, NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_SIZE, seed=1)
    table = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(2))
    table = table.view(len(NUM_KEYS), -1).to(torch.int32)
    for seq, length in enumerate(NUM_KEYS):
        own = cache[:, table[seq].long()].flatten(1, 2)
        own[:, length:] = math.nan
        cache[:, table[seq].long()] = own.unflatten(1, (-1, PAGE_SIZE))
    return cache, table


def arguments(*, paged: bool, version: int, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a launch, with two queries of no sequence."""
    q = random(sum(NUM_QUERIES) + 2, HEADS, HEAD_SIZE)
    if paged:
        cache, table = pages()
        num_keys = torch.tensor(NUM_KEYS, dtype=torch.int32)
        keys: dict[str, Any] = {"seqused_k": num_keys, "block_table": table}
    else:
        cache = random(2, sum(NUM_KEYS), KV_HEADS, HEAD_SIZE, seed=1)
        keys = {"cu_seqlens_k": starts(NUM_KEYS)}
    one = torch.ones(len(NUM_QUERIES), KV_HEADS)
    return {
        "q": q,
        "k": cache[0],
        "v": cache[1],
        "out": torch.zeros_like(q),
        "cu_seqlens_q": starts(NUM_QUERIES),
        "max_seqlen_q": max(NUM_QUERIES),
        "max_seqlen_k": max(NUM_KEYS),
        "softmax_scale": SCALE,
        "causal": True,
        "fa_version": version,
        "return_softmax_lse": True,
        **dict.fromkeys(("q_descale", "k_descale", "v_descale"), one),
        **keys,
        **changes,
    }


def rows_of(launch: dict[str, Any], name: str, seq: int) -> torch.Tensor:
    """Return the keys or values of a sequence, one after the other."""
    rows: torch.Tensor = launch[name]
    length = NUM_KEYS[seq]
    if "block_table" not in launch:
        start = sum(NUM_KEYS[:seq])
        return rows[start : start + length]
    table = launch["block_table"][seq].tolist()
    places = [divmod(position, PAGE_SIZE) for position in range(length)]
    found = [rows[table[page], offset] for page, offset in places]
    return torch.stack(found) if found else rows[0, :0]


@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (3, 1), (0, -1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("version", [2, 3])
def test_queries_attend_to_what_they_see(
    version: int, paged: bool, causal: bool, window: tuple[int, int]
) -> None:
    launch = arguments(paged=paged, version=version, causal=causal, window_size=window)
    out, lse = twins.flash_attn_varlen_func(**launch)
    assert out is launch["out"]
    assert lse.dtype == torch.float32
    assert lse.shape == (HEADS, len(out))
    left, right = window
    for seq, (length, num_keys) in enumerate(zip(NUM_QUERIES, NUM_KEYS, strict=True)):
        keys, values = (rows_of(launch, name, seq) for name in ("k", "v"))
        for i in range(length):
            query = sum(NUM_QUERIES[:seq]) + i
            own = num_keys - length + i
            seen = [
                key
                for key in range(num_keys)
                if (key <= own or not causal)
                and (left < 0 or key >= own - left)
                and (right < 0 or key <= own + right)
            ]
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                expected, expected_lse = attention_of_one_query(
                    launch["q"][query, head], keys[seen, kv_head], values[seen, kv_head]
                )
                torch.testing.assert_close(out[query, head], expected)
                if not seen:
                    expected_lse = math.inf if version == 2 else -math.inf
                assert float(lse[head, query]) == pytest.approx(expected_lse, abs=1e-5)
    assert out[-2:].isnan().all(), "of no sequence"


def test_the_log_sum_exp_comes_where_it_is_asked_for() -> None:
    launch = arguments(paged=True, version=2, return_softmax_lse=False)
    assert twins.flash_attn_varlen_func(**launch) is launch["out"]


PLAN = {
    "batch_size": len(NUM_QUERIES),
    "max_seqlen_q": max(NUM_QUERIES),
    "max_seqlen_k": max(NUM_KEYS),
    "num_heads_q": HEADS,
    "num_heads_kv": KV_HEADS,
    "headdim": HEAD_SIZE,
    "cache_seqlens": torch.tensor(NUM_KEYS, dtype=torch.int32),
    "qkv_dtype": torch.float32,
    "cu_seqlens_q": starts(NUM_QUERIES),
    "page_size": PAGE_SIZE,
    "causal": True,
}


def test_a_plan_is_for_one_launch() -> None:
    plan = twins.get_scheduler_metadata(**PLAN)
    assert plan.dtype == torch.int32
    assert plan.shape == (1 + 4 * 8,)
    launch = arguments(paged=True, version=3)
    twins.flash_attn_varlen_func(**launch, scheduler_metadata=plan)
    for other in ({"num_heads_q": 2 * HEADS}, {"causal": False}, {"max_seqlen_k": 99}):
        plan = twins.get_scheduler_metadata(**PLAN | other)
        with pytest.raises(AssertionError, match="another launch"):
            twins.flash_attn_varlen_func(**launch, scheduler_metadata=plan)


@pytest.mark.parametrize(
    "change",
    [
        {"max_seqlen_q": 4},
        {"max_seqlen_q": 1},
        {"max_seqlen_k": 17},
        {"num_splits": 2},
        {"scheduler_metadata": torch.zeros(33, dtype=torch.int32)},
        {"cu_seqlens_q": starts(NUM_QUERIES).long()},
        {"cu_seqlens_q": starts((*NUM_QUERIES[:-1], 4))},
        {"seqused_k": torch.tensor(NUM_KEYS[:-1], dtype=torch.int32)},
        {"seqused_k": torch.tensor([99, 0, 4, 6, 18], dtype=torch.int32), "max_seqlen_k": 99},
        {"cu_seqlens_k": starts(NUM_KEYS)},
        {"k_descale": torch.ones(1, KV_HEADS)},
        {"v_descale": torch.full((len(NUM_QUERIES), KV_HEADS), 2.0)},
        {"q": random(18, HEADS, HEAD_SIZE, 2)[..., 0]},
    ],
    ids=lambda change: "-".join(change),
)
def test_contracts_are_insisted_on(change: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        twins.flash_attn_varlen_func(**arguments(paged=True, version=2, **change))


@pytest.mark.parametrize("name", ["alibi_slopes", "s_aux", "softcap", "dynamic_causal"])
def test_what_twins_lack_is_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        twins.flash_attn_varlen_func(**arguments(paged=True, version=2, **{name: 1.0}))
    off = {name: 0.0 if name == "softcap" else None}
    twins.flash_attn_varlen_func(**arguments(paged=True, version=2, **off))


def write(
    key: torch.Tensor, value: torch.Tensor, caches: torch.Tensor, slots: torch.Tensor, dtype: str
) -> torch.Tensor:
    """Write as the backend does, through the operator of a GPU build; return the caches."""
    from vllm import _custom_ops as ops

    one = torch.tensor(1.0)
    ops.reshape_and_cache_flash(key, value, caches[:, 0], caches[:, 1], slots, dtype, one, one)
    return caches


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_tokens_are_written_to_their_slots_and_nowhere_else(
    interpreter: Interpreter, dtype: str
) -> None:
    slots = torch.tensor([17, -1, 3, 0, 34])
    # One row more than slots, padding, and rows that lie in a wider tensor.
    key, value = random(len(slots) + 1, 2, KV_HEADS, 2 * HEAD_SIZE)[..., 3:11].unbind(1)
    before = random(NUM_PAGES, 2, PAGE_SIZE, KV_HEADS, HEAD_SIZE, seed=1)
    if dtype == "fp8":
        before = before.to(torch.float8_e4m3fn).view(torch.uint8)
    after = interpreter(write, key, value, before.clone(), slots, dtype)
    for slot in range(NUM_PAGES * PAGE_SIZE):
        page, offset = divmod(slot, PAGE_SIZE)
        for which, rows in enumerate((key, value)):
            if dtype == "fp8":
                rows = rows.to(torch.float8_e4m3fn).view(torch.uint8)
            old = before[page, which, offset]
            source = rows[slots.tolist().index(slot)] if slot in slots else old
            assert torch.equal(after[page, which, offset], source)


def version_of(asked: Any) -> int:
    from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config

    flash_attn: Any = import_module("vllm.v1.attention.backends.flash_attn")
    config = VllmConfig(attention_config=AttentionConfig(flash_attn_version=asked))
    with set_current_vllm_config(config):
        version: int = flash_attn.get_flash_attn_version(head_size=64)
    return version


def test_the_version_is_the_one_that_is_asked_for(interpreter: Interpreter) -> None:
    assert [interpreter(version_of, asked) for asked in (None, 2, 3)] == [2, 2, 3]
    with pytest.raises(NotImplementedError, match="flash_attn_version=4"):
        interpreter(version_of, 4)


def test_the_backend_is_found_where_it_is_asked_for(interpreter: Interpreter) -> None:
    def found(selected: str, registered: str | None = None) -> Any:
        return interpreter(attention_backend, "FLASH_ATTN", registered, selected=selected)

    assert found("FLASH_ATTN").endswith(".flash_attn.FlashAttentionBackend")
    assert found("FLASH_ATTN", "ours.Flash") == "ours.Flash"
    assert found("CPU_ATTN", "ours.Flash").endswith(".cpu_attn.CPUAttentionBackend")
    with pytest.raises(NotImplementedError):
        interpreter(attention_backend, selected="FLASH_ATTN", use_sparse=True)
    mla = interpreter(attention_backend, selected="FLASH_ATTN", use_mla=True)
    assert mla.endswith(".triton_mla.TritonMLABackend")


@pytest.fixture(scope="module")
def dense_engines() -> Iterator[Interpreter]:
    """Call functions in another process: behind models without experts, none with them runs."""
    with interpreting_process() as run:
        yield run


@pytest.mark.slow
@pytest.mark.parametrize(("name", "version"), [("qwen3", 3), ("gemma3", 2)])
def test_flash_attention_says_what_transformers_says(
    dense_engines: Interpreter, checkpoints: Checkpoints, name: str, version: int
) -> None:
    """Full attention, its launches planned, and sliding windows; chunks, decodes, prefix hits."""
    tokens = torch.randint(94, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    lengths = (2 * MAX_NUM_BATCHED_TOKENS + 50, 3, 1, BLOCK_SIZE, 100, BLOCK_SIZE + 1)
    prompts = [tokens[200 * i : 200 * i + length] for i, length in enumerate(lengths)]
    cached = [prompts[0][:n] + tokens[-m:] for n, m in ((256, 1), (96, 40))]
    attention = {"backend": "FLASH_ATTN", "flash_attn_version": version}
    answers = dense_engines(
        generate,
        checkpoints(name),
        [prompts, cached],
        BLOCK_SIZE,
        attention_config=attention,
    )
    assert [answer.num_cached_tokens for answer in answers[1]] == [256, 96]
    require_answers_of_transformers(
        checkpoints(name), [*prompts, *cached], [*answers[0], *answers[1]]
    )
