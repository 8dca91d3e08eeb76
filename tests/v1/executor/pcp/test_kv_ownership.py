# SPDX-License-Identifier: Apache-2.0
"""The engine core counts the KV cache by D alone: P = 2 and 4 are as P = 1, whatever D is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.plugins.pcp.test_admission import LLAMA
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_capacity,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.pcp import scheduler_view
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 40, 512

# P, D.
WORLDS = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 4), (2, 4))
Make = Callable[[int, int], VllmConfig]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return what makes the configuration that an engine core has, with P and D."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(
        "vllm.model_executor.models.registry._run_in_subprocess", lambda look: look()
    )
    args = EngineArgs(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
    )

    def make_config(pcp: int, dcp: int) -> VllmConfig:
        config = args.create_engine_config()
        config.parallel_config.prefill_context_parallel_size = pcp
        config.parallel_config.decode_context_parallel_size = dcp
        config.parallel_config = scheduler_view(config.parallel_config)
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        config.scheduler_config.async_scheduling = False
        return config

    return make_config


def caches() -> list[FullAttentionSpec]:
    """Return a layer of either kind."""
    mla = MLAAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    gqa = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return [mla, gqa]


def kv_cache(spec: FullAttentionSpec) -> KVCacheConfig:
    tensor = KVCacheTensor(size=NUM_BLOCKS * spec.page_size_bytes, shared_by=["layer"])
    return KVCacheConfig(NUM_BLOCKS, [tensor], [KVCacheGroupSpec(["layer"], spec)])


@pytest.mark.parametrize("spec", caches(), ids=["mla", "gqa"])
@pytest.mark.parametrize(("pcp", "dcp"), WORLDS)
def test_sizes(make: Make, pcp: int, dcp: int, spec: FullAttentionSpec) -> None:
    config, cache = make(pcp, dcp), kv_cache(spec)
    assert resolve_kv_cache_block_sizes(cache, config) == (dcp * BLOCK_SIZE,) * 2
    blocks = -(-MAX_MODEL_LEN // (dcp * BLOCK_SIZE))
    assert spec.max_memory_usage_bytes(config) == blocks * spec.page_size_bytes
    num_tokens, _ = get_kv_cache_capacity(config, cache)
    assert num_tokens == dcp * NUM_BLOCKS * BLOCK_SIZE


@pytest.mark.parametrize(("pcp", "dcp"), WORLDS)
def test_a_prefix_is_found_in_whole_blocks_of_all_ranks(make: Make, pcp: int, dcp: int) -> None:
    config, cache = make(pcp, dcp), kv_cache(caches()[0])
    size, hash_size = resolve_kv_cache_block_sizes(cache, config)
    scheduler = Scheduler(
        config, cache, StructuredOutputManager(config), size, hash_block_size=hash_size
    )
    init_none_hash(sha256)
    hasher = get_request_block_hasher(hash_size, sha256)
    prefix = list(range(3 * dcp * BLOCK_SIZE + 5))
    num_cached, blocks_used = [], []
    for name, prompt in (("first", prefix), ("second", [*prefix, 7, 7])):
        params = SamplingParams(max_tokens=1)
        scheduler.add_request(Request(name, prompt, params, None, block_hasher=hasher))
        output = scheduler.schedule()
        (new,) = output.scheduled_new_reqs
        num_cached.append(new.num_computed_tokens)
        blocks_used.append(len(new.block_ids[0]))
        ran = ModelRunnerOutput(req_ids=[name], req_id_to_index={name: 0}, sampled_token_ids=[[1]])
        scheduler.update_from_output(output, ran)
    assert num_cached == [0, 3 * dcp * BLOCK_SIZE]
    # Each rank has its part of a block, under one number.
    assert blocks_used == [4, 4]


@pytest.mark.parametrize(("pcp", "dcp"), [(2, 1), (2, 2)])
def test_without_the_view_p_counts_too(make: Make, pcp: int, dcp: int) -> None:
    config = make(1, dcp)
    config.parallel_config.prefill_context_parallel_size = pcp
    size, _ = resolve_kv_cache_block_sizes(kv_cache(caches()[0]), config)
    assert size == pcp * dcp * BLOCK_SIZE
