# SPDX-License-Identifier: Apache-2.0
"""Gather before write leaves the cache as the stock backend leaves it for all tokens at once, byte
for byte."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.pcp import kv_gather, peer_caches
from vllm.v1.attention.backends.pcp import BACKENDS

PCP_WORLD_SIZE = 3
NUM_TOKENS = 37
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 64
BLOCK_SIZE, NUM_BLOCKS = 32, 8

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a CPU build of vLLM")
CASES = [
    pytest.param("CPU_ATTN", "auto", torch.float32, id="CPU_ATTN-fp32", marks=on_cpu),
    pytest.param("CPU_ATTN", "auto", torch.bfloat16, id="CPU_ATTN-bf16", marks=on_cpu),
    *(
        pytest.param(
            name, kv_dtype, torch.bfloat16, id=f"{name}-{kv_dtype}", marks=[pytest.mark.gpu, on_gpu]
        )
        for name in ("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASHINFER", "TRITON_ATTN")
        for kv_dtype in ("auto", "fp8")
        if (name, kv_dtype) != ("FLASH_ATTN_DIFFKV", "fp8")
    ),
]


class RecordedGather(kv_gather.KVGather):
    """Stands in for the ranks: remembers what each put in, and hands out what all of them put
    in."""

    def __init__(self, device: torch.device) -> None:
        group: Any = SimpleNamespace(world_size=PCP_WORLD_SIZE, rank_in_group=0)
        super().__init__(group, NUM_TOKENS, device)
        self.memory = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
        self.recorded: dict[int, torch.Tensor] = {}
        self.gathers = 0

    def _buffer(self) -> torch.Tensor:
        return self.memory

    def _exchange(self, rows: torch.Tensor, own_rows: torch.Tensor) -> None:
        self.gathers += 1
        self.recorded[self.pcp_rank] = own_rows.clone()
        for rank, recorded in self.recorded.items():
            rows[rank * NUM_TOKENS : (rank + 1) * NUM_TOKENS] = recorded


@pytest.fixture
def gather(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RecordedGather:
    device = torch.device("cpu" if request.node.callspec.params["name"] == "CPU_ATTN" else "cuda")
    gather = RecordedGather(device)
    monkeypatch.setattr(kv_gather, "_kv_gather", gather)
    return gather


def make_config(folder: Path, dtype: torch.dtype) -> VllmConfig:
    """Return a configuration of the smallest model there is."""
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "hidden_size": NUM_HEADS * HEAD_SIZE,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": NUM_HEADS,
                "num_key_value_heads": NUM_KV_HEADS,
                "head_dim": HEAD_SIZE,
                "vocab_size": 128,
                "max_position_embeddings": 512,
            }
        )
    )
    model = ModelConfig(str(folder), skip_tokenizer_init=True, dtype=dtype)
    return VllmConfig(model_config=model, cache_config=CacheConfig(block_size=BLOCK_SIZE))


def make_impl(name: str, kv_dtype: str) -> tuple[Any, Any]:
    module, _, backend = BACKENDS[name].rpartition(".")
    backend_cls = getattr(importlib.import_module(module), backend)
    if name == "FLASH_ATTN_DIFFKV":
        backend_cls.set_head_size_v(HEAD_SIZE // 2)
    impl = backend_cls.get_impl_cls()(NUM_HEADS, HEAD_SIZE, 1.0, NUM_KV_HEADS, None, None, kv_dtype)
    impl.pcp_world_size = PCP_WORLD_SIZE
    return backend_cls, impl


@pytest.mark.parametrize(("name", "kv_dtype", "dtype"), CASES)
def test_cache_equals_the_stock_write_of_all_ranks_tokens(
    gather: RecordedGather, tmp_path: Path, name: str, kv_dtype: str, dtype: torch.dtype
) -> None:
    device = gather.memory.device
    generator = torch.Generator(device).manual_seed(0)
    with set_current_vllm_config(make_config(tmp_path, dtype)):
        backend_cls, impl = make_impl(name, kv_dtype)
    head_size_v = HEAD_SIZE // 2 if name == "FLASH_ATTN_DIFFKV" else HEAD_SIZE
    total = PCP_WORLD_SIZE * NUM_TOKENS

    def random(size: int) -> torch.Tensor:
        # Keys and values are slices of one projection, as models hand them over: strided.
        wide = torch.randn(total, NUM_KV_HEADS * size + 8, generator=generator, device=device)
        return wide.to(dtype)[:, : NUM_KV_HEADS * size].view(-1, NUM_KV_HEADS, size)

    keys, values = random(HEAD_SIZE), random(head_size_v)
    layer = SimpleNamespace(
        _k_scale=torch.tensor(0.5, device=device),
        _v_scale=torch.tensor(0.25, device=device),
        _k_scale_float=0.5,
        _v_scale_float=0.25,
    )
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator, device=device)[:total]
    slots[::5] = -1
    shape = backend_cls.get_kv_cache_shape(
        NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, kv_dtype
    )
    cache_dtype = dtype if kv_dtype == "auto" else torch.uint8
    expected = torch.full(shape, 7, dtype=cache_dtype, device=device)
    actual = expected.clone()

    impl.do_kv_cache_update(layer, keys, values, expected, slots)
    assert gather.gathers == 0, "a mapping of the layer's own rows must not gather"

    unwritten = torch.full_like(slots, -1)
    for rank in [*range(PCP_WORLD_SIZE), 1]:
        gather.pcp_rank = rank
        rows = slice(rank * NUM_TOKENS, (rank + 1) * NUM_TOKENS)
        mapping = slots if len(gather.recorded) == PCP_WORLD_SIZE else unwritten
        impl.do_kv_cache_update(layer, keys[rows], values[rows], actual, mapping)
    assert gather.gathers == PCP_WORLD_SIZE + 1
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    assert not torch.equal(actual, torch.full_like(actual, 7))


@pytest.mark.parametrize(("name", "kv_dtype", "dtype"), CASES)
def test_a_rank_writes_its_own_rows_and_hands_them_on(
    gather: RecordedGather,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kv_dtype: str,
    dtype: torch.dtype,
) -> None:
    """Where ranks reach each other's caches, there is one write, and nothing is gathered."""
    device = gather.memory.device
    with set_current_vllm_config(make_config(tmp_path, dtype)):
        backend_cls, impl = make_impl(name, kv_dtype)
    head_size_v = HEAD_SIZE // 2 if name == "FLASH_ATTN_DIFFKV" else HEAD_SIZE
    total = PCP_WORLD_SIZE * NUM_TOKENS
    keys = torch.randn(total, NUM_KV_HEADS, HEAD_SIZE, device=device).to(dtype)
    values = torch.randn(total, NUM_KV_HEADS, head_size_v, device=device).to(dtype)
    scale = torch.ones((), device=device)
    layer = SimpleNamespace(_k_scale=scale, _v_scale=scale, _k_scale_float=1.0, _v_scale_float=1.0)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, device=device)[:total]
    slots[::5] = -1
    shape = backend_cls.get_kv_cache_shape(
        NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, kv_dtype
    )
    cache_dtype = dtype if kv_dtype == "auto" else torch.uint8
    expected = torch.zeros(shape, dtype=cache_dtype, device=device)
    actual = expected.clone()
    handed_on: list[tuple[torch.Tensor, torch.Tensor]] = []
    peers: Any = object.__new__(peer_caches.PeerCaches)
    peers.pcp_world_size, peers.pcp_rank = PCP_WORLD_SIZE, 1
    peers.copy = lambda *arguments: handed_on.append(arguments)
    monkeypatch.setattr(peer_caches, "_peer_caches", peers)

    rows = slice(NUM_TOKENS, 2 * NUM_TOKENS)
    impl.do_kv_cache_update(layer, keys[rows], values[rows], expected, slots[rows])
    assert not handed_on, "a mapping of the layer's own rows is for this rank alone"
    impl.do_kv_cache_update(layer, keys[rows], values[rows], actual, slots)
    assert gather.gathers == 0
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    assert actual.view(torch.uint8).any()
    ((cache, own_slots),) = handed_on
    assert cache is actual
    assert torch.equal(own_slots, slots[rows])


def test_caches_are_shared_only_by_attention_that_can() -> None:
    from vllm.v1.attention.backends.pcp.kv_gather import GatherKVMixin

    class Stock:
        dcp_world_size = 2

    class Impl(GatherKVMixin, Stock):
        pass

    impl: Any = Impl
    with pytest.raises(NotImplementedError, match="got Impl"):
        impl()
